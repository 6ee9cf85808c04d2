"""A layout by its name: serial, or words such as tensor=2,data=2,sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from megatron.config.checks import UsageError

if TYPE_CHECKING:
    import torch

    from megatron.parallel.mesh import Mesh

AXES = ("tensor", "data")
SWITCHES = ("sequence",)


@dataclass(frozen=True)
class Layout:
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Of the axes that are named."""
    switches: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        words = [f"{axis}={self.sizes[axis]}" for axis in AXES if axis in self.sizes]
        return ",".join([*words, *sorted(self.switches)]) or "serial"

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    @property
    def settings(self) -> dict[str, Any]:
        """Of TrainingParallelConfig; the data axis takes the ranks that are left."""
        return {
            "tensor_model_parallel_size": self.size("tensor"),
            "sequence_parallel": self.cuts_stream,
        }

    @property
    def cuts_stream(self) -> bool:
        return "sequence" in self.switches

    def mesh(self, device: torch.device) -> Mesh:
        """Of the ranks of the process group, of which there are as many as the layout has; every
        rank calls this."""
        from megatron.parallel.mesh import build_mesh, serial_mesh

        if self.ranks == 1:
            return serial_mesh(device)
        return build_mesh(self.sizes, device, sequence_parallel=self.cuts_stream)


def parse_layout(text: str) -> Layout:
    """Raises UsageError naming a word that is none."""
    sizes: dict[str, int] = {}
    switches: set[str] = set()
    for word in text.split(",") if text != "serial" else []:
        axis, _, size = word.partition("=")
        if word in SWITCHES and word not in switches:
            switches.add(word)
        elif axis in AXES and size.isdecimal() and int(size) > 0 and axis not in sizes:
            sizes[axis] = int(size)
        else:
            known = ", ".join([f"{axis}=N" for axis in AXES] + list(SWITCHES))
            raise UsageError("LAYOUT", text, f"serial, or of {known}, each once; not {word!r}")
    layout = Layout({axis: n for axis, n in sizes.items() if n > 1}, frozenset(switches))
    if layout.cuts_stream and layout.size("tensor") == 1:
        allowed = "given with tensor=N, whose processes share out the sequence"
        raise UsageError("LAYOUT", text, allowed, works=("tensor=2,sequence",))
    return layout
