"""Libraries that are used if they work: apex, numba, gigatoken, and torch.compile."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from megatron.config.pretrain import require_apex
from megatron.errors import UsageError
from megatron.libraries import failure
from tools.probes.findings import Fact, Finding, Problem

if TYPE_CHECKING:
    import torch

VOCABULARY = 300


def lack_of_apex() -> str | None:
    """Why --optimizer-impl and --layernorm-impl apex would be refused, with the cure; or None."""
    try:
        require_apex(optimizer_impl="apex", layernorm_impl="apex")
    except UsageError as error:
        return str(error)
    return None


def apex() -> Iterator[Finding]:
    """NVIDIA's apex is optional, so its absence is no problem; another package of its name is."""
    if importlib.util.find_spec("apex") is None:
        text = "not installed; optional, torch's own kernels are the default"
        yield Fact("apex", {"installed": False, "usable": False}, text)
        return
    lack = lack_of_apex()
    what, _, cure = (lack or "NVIDIA's, with its extensions").partition("; ")
    yield Fact("apex", {"installed": True, "usable": lack is None}, what)
    if lack is not None:
        yield Problem(what, cure)


def layer_compiler(device: torch.device) -> Iterator[Finding]:
    """torch.compile, which training uses by default on a GPU, and only there."""
    if device.type == "cpu":
        yield Fact("torch.compile", False, "not used on a CPU, unless --compile asks for it")
        return
    from megatron.train.machine import COMPILER_HELP, compiler_failure

    lack = compiler_failure(device)
    yield Fact("torch.compile", lack is None, lack or "works; layers are compiled")
    if lack is not None:
        yield Problem(f"torch.compile does not work: {lack}; layers run as they are", COMPILER_HELP)


def numba() -> Iterator[Finding]:
    """numba, tested by one function against its plain Python version."""
    import numpy as np

    if lack := failure("numba"):
        yield Fact("numba", False, f"{lack}; dedup and decontaminate need it")
        return
    from tools.corpus.compiled import mix

    word = np.uint64(0x0123456789ABCDEF)
    with np.errstate(over="ignore"):
        is_right = int(mix(word)) == int(mix.py_func(word))  # type: ignore[attr-defined]
    yield Fact("numba", is_right, "compiles, and computes what numpy computes")
    if not is_right:
        yield Problem(
            "numba computes something else than numpy", "another release of numba", is_needed=True
        )


def encoder() -> Iterator[Finding]:
    """The encoder that preprocessing would choose, on a small vocabulary made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    from tools.encoders import PROBES, build_encoder

    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    trainer = BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(PROBES, trainer)
    found = build_encoder("auto", bpe)
    yield Fact("tokenizer", {"name": found.name, "said": found.description}, found.description)


PROBES: dict[str, Callable[[], Iterator[Finding]]] = {
    "apex": apex,
    "numba": numba,
    "gigatoken": encoder,
}
