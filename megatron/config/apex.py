"""Whether NVIDIA's apex is there where a setting asks for it, found out without importing it."""

from importlib.util import find_spec
from pathlib import Path

from megatron.config.checks import UsageError, flag

# What each setting takes from apex: a file of the package, and the extension that is its kernel.
_PARTS = {
    "optimizer_impl": ("optimizers/fused_adam.py", "amp_C"),
    "layernorm_impl": ("normalization/fused_layer_norm.py", "fused_layer_norm_cuda"),
}

_CURE = (
    "bash scripts/setup.sh --with-apex DIR builds it from DIR, a checkout of "
    "https://github.com/NVIDIA/apex (the package called apex on PyPI is unrelated); "
    "{setting} torch would work without it"
)


def require_apex(*, optimizer_impl: str, layernorm_impl: str) -> None:
    """Raise UsageError where an implementation is "apex" and what it needs is not installed."""
    asked = {"optimizer_impl": optimizer_impl, "layernorm_impl": layernorm_impl}
    for field, implementation in asked.items():
        if implementation == "apex" and (reason := _lack(*_PARTS[field])):
            raise UsageError(f"{flag(field)} apex: {reason}; " + _CURE.format(setting=flag(field)))


def _lack(file: str, extension: str) -> str | None:
    """What is not there, in words; None where all is."""
    spec = find_spec("apex")
    if spec is None:
        return "NVIDIA's apex is not installed"
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    if not any((folder / file).is_file() for folder in folders):
        place = spec.origin or ", ".join(map(str, folders))
        return (
            f"the package apex at {place} has no {file}, and so is not NVIDIA's but most likely "
            "the unrelated one from PyPI (pip uninstall apex)"
        )
    if find_spec(extension) is None:
        return f"apex is installed without its CUDA extension {extension}"
    return None
