"""A folder of a model as transformers writes it, here or on the HuggingFace hub: which files of it
are read, and the tensors in them. Needs no torch to be imported."""

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from megatron.config.model import HF_FILES
from megatron.errors import UsageError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack")
# Files that are fetched from the hub: no pickle, no code, and no weights in other formats.
FETCHED = (
    "config.json",
    "preprocessor_config.json",
    "model*.safetensors",
    INDEX,
    *HF_FILES,
)


def has_weights(name: str, folder: Path) -> bool:
    """Whether the folder of --hf-model `name` has weights that training can start from. Raises
    UsageError if it has only others."""
    if any((folder / each).is_file() for each in (SINGLE, INDEX)):
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
    """The folder of --hf-model `name`. For a name on the hub, files that match these patterns are
    fetched to it. Raises UsageError if the hub does not give them."""
    if Path(name).is_dir():
        return Path(name)
    if Path(name).exists():
        allowed = "a folder, and not a file of it"
        raise UsageError("--hf-model", name, allowed, works=Path(name).parent)
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's client exports no class for HTTP errors
        lines = str(error).strip().splitlines() or [type(error).__name__]
        allowed = f"a folder, and there is none here, or a name on the hub ({lines[0]})"
        raise UsageError("--hf-model", name, allowed) from error


def open_files(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """{key of a tensor: the open file of the folder that has it}; `stack` closes the files. Raises
    ValueError or OSError, naming the file, if one is missing or damaged, or if two have a tensor of
    the same key."""
    names = [SINGLE]
    if not (folder / SINGLE).is_file():
        index = json.loads((folder / INDEX).read_bytes())
        names = sorted(set(index["weight_map"].values()))
    files: dict[str, Any] = {}
    for name in names:
        try:
            file = stack.enter_context(safe_open(folder / name, "pt"))
        except FileNotFoundError:
            raise FileNotFoundError(f"{folder / name} is not there: {INDEX} lists it") from None
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}") from None
        for key in file.keys():  # noqa: SIM118, as it is no dict
            if key in files:
                raise ValueError(
                    f"{folder / name} has {key}, and so has another of {INDEX}'s files"
                )
            files[key] = file
    return files
