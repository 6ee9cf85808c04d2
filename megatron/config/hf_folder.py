"""What a folder of transformers holds beside config.json, here or on the HuggingFace hub."""

from collections.abc import Iterable
from pathlib import Path

from megatron.config.checks import UsageError

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
# What a folder has beside the model, and a folder that is made of a checkpoint, too.
BESIDE = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
)
# What is fetched of a name on the hub: no pickle, no code, and no weights in other formats.
FETCHED = ("config.json", "model*.safetensors", "model.safetensors.index.json", *BESIDE)


def has_weights(name: str, folder: Path) -> bool:
    """Whether the folder of --hf-model `name` has weights that training can start from. Raises
    UsageError where it has only others."""
    if any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json")):
        return True
    others = [each.name for ending in WEIGHTS for each in sorted(folder.glob(ending))]
    if others:
        allowed = (
            f"a folder with model.safetensors or its index, and not {others[0]} alone: in Python, "
            "AutoModelForCausalLM (or ForMaskedLM) of transformers makes one: "
            f".from_pretrained({name!r}).save_pretrained(NEW)"
        )
        works = ("--hf-model", name, "--random-weights")
        raise UsageError("--hf-model", name, allowed, works=works)
    return False


def fetch(name: str, patterns: Iterable[str] = FETCHED) -> Path:
    """The folder of --hf-model `name`; of a name on the hub that with the files of these patterns,
    which are fetched. Raises UsageError where the hub does not give them."""
    if Path(name).is_dir():
        return Path(name)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # those of its HTTP client are of no kind that it exports
        lines = str(error).strip().splitlines() or [type(error).__name__]
        allowed = f"a folder, or a name that the hub knows ({lines[0]})"
        raise UsageError("--hf-model", name, allowed) from error


def beside(folder: Path, prefix: str = "") -> dict[str, bytes]:
    """{name: content} of the folder's files of BESIDE, which have this prefix there."""
    files = {name: folder / f"{prefix}{name}" for name in BESIDE}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}
