"""torch.compile of the transformer's layers.

The layers of a model share one graph. Its matrix products, attention and collectives run as they
stand in the code, what is element by element between them in a few kernels that the compiler
writes. A draw from a random stream (parallel/random.py) ends a graph and another begins after it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.checks import UsageError
from megatron.models.transformer import TransformerLayer
from megatron.parallel.mesh import Mesh

CURE = "a C++ compiler (CPU) or Triton (GPU) is what it may lack; --no-compile does without"


def compile_layers(model: nn.Module) -> None:
    """Compile each layer when it is first called; names, weights and hooks of `model` stay."""
    for module in model.modules():
        if isinstance(module, TransformerLayer):
            module.compile(options={"fallback_random": True})  # draws as without a compiler


def choose_compile(asked: bool | None, mesh: Mesh) -> tuple[bool, list[str]]:
    """(whether layers are compiled, on all ranks or none, and what the user should know of it).

    asked: None where no flag was given: then they are on GPUs whose compiler works. Every rank
    calls this; raises UsageError on all of them where --compile asks for what does not work.
    """
    wants = mesh.device.type == "cuda" if asked is None else asked
    if not wants:
        return False, []
    lacks = [each for each in mesh.control.gather(lack_of_compiler(mesh.device)) if each]
    if not lacks:
        return True, []
    what = f"torch.compile does not work here: {lacks[0]}"
    if asked:
        raise UsageError("--compile", None, f"left out: {what}; {CURE}", works=("--no-compile",))
    return False, [f"warning: layers are not compiled, which is slower: {what}; {CURE}"]


def lack_of_compiler(device: torch.device) -> str | None:
    """Why torch.compile is of no use on this device, found by compiling a small function."""
    x = torch.linspace(-2, 2, 64, device=device)
    try:
        compiled = torch.compile(_sample)(x)
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None if torch.allclose(compiled, _sample(x)) else "it computes something else"


def _sample(x: Tensor) -> Tensor:
    return torch.tanh(x) * x + 1
