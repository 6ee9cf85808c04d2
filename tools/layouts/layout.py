"""A layout by its name: serial, or words such as tensor=2,data=2,sequence, data=2,zero=3,
tensor=4:2d, tensor=8:2.5d:2, tensor=8:3d, context=2, context=2:p2p or
pipeline=2,virtual=2,schedule=interleaved."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from megatron.config.parallel import TrainingParallelConfig
from megatron.errors import UsageError
from megatron.parallel.schedules import KINDS

if TYPE_CHECKING:
    import torch

    from megatron.parallel.mesh import ControlGroup, Mesh

AXES = ("tensor", "context", "data", "pipeline")
NUMBERS = (*AXES, "virtual", "zero")
MODES = ("2d", "2.5d", "3d")  # of tensor=N:MODE
CP_COMM_TYPES = ("a2a", "p2p")  # of context=N:TYPE
STAGES_OF_ZERO = 3


@dataclass(frozen=True)
class Layout:
    sizes: Mapping[str, int] = field(default_factory=dict)
    """Size of each axis that is named."""
    cuts_stream: bool = False
    """Whether sequence parallelism is on."""
    virtual: int = 1
    """Virtual stages of a pipeline rank."""
    schedule: str | None = None
    """Schedule of the pipeline; None: the default of --pipeline-schedule."""
    zero: int = 0
    """ZeRO stage."""
    mode: str = "1d"
    """Mode of tensor parallelism."""
    depth: int = 1
    """Depth of mode 2.5d."""
    cp_comm_type: str = "a2a"
    """Kind of context parallelism."""

    @property
    def name(self) -> str:
        mode = f":{self.mode}" * (self.mode != "1d") + f":{self.depth}" * (self.depth > 1)
        suffixes = {"tensor": mode, "context": ":p2p" * (self.cp_comm_type == "p2p")}
        words = [
            f"{axis}={self.sizes[axis]}{suffixes.get(axis, '')}"
            for axis in AXES
            if axis in self.sizes
        ]
        words += [f"virtual={self.virtual}"] if self.virtual > 1 else []
        words += [f"schedule={self.schedule}"] if self.schedule else []
        words += [f"zero={self.zero}"] if self.zero else []
        words += ["sequence"] if self.cuts_stream else []
        return ",".join(words) or "serial"

    @property
    def ranks(self) -> int:
        return prod(self.sizes.values())

    def size(self, axis: str) -> int:
        return self.sizes.get(axis, 1)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of TrainingParallelConfig; the data axis takes the remaining ranks."""
        return {
            "tensor_model_parallel_size": self.size("tensor"),
            "tensor_parallel_mode": self.mode,
            "tensor_parallel_depth": self.depth,
            "sequence_parallel": self.cuts_stream,
            "context_parallel_size": self.size("context"),
            "cp_comm_type": self.cp_comm_type,
            "pipeline_model_parallel_size": self.size("pipeline"),
            "num_virtual_stages_per_pipeline_rank": self.virtual if self.virtual > 1 else None,
            "pipeline_schedule": self.schedule,
            "num_layers_per_virtual_pipeline_stage": None,
            "decoder_first_pipeline_num_layers": None,
            "decoder_last_pipeline_num_layers": None,
            "zero_stage": self.zero,
            "use_distributed_optimizer": False,
        }

    def mesh(self, device: torch.device, control: ControlGroup | None = None) -> Mesh:
        """Mesh of all ranks of the process group, as many as the layout has. Every rank calls
        this. control: their control group, if there is one already."""
        from megatron.parallel.mesh import build_mesh, serial_mesh

        if self.ranks == 1:
            return serial_mesh(device)
        sizes = TrainingParallelConfig(**self.settings).sizes
        return build_mesh(
            sizes,
            device,
            control=control,
            tensor_parallel_mode=self.mode,
            sequence_parallel=self.cuts_stream,
            cp_comm_type=self.cp_comm_type,
        )


def layout_of(parallel: TrainingParallelConfig, ranks: int, num_layers: int) -> Layout:
    """The layout of these settings on so many ranks. num_layers: of the model."""
    sizes = {
        "tensor": parallel.tensor_model_parallel_size,
        "context": parallel.context_parallel_size,
        "data": parallel.data_parallel_size(ranks),
        "pipeline": parallel.pipeline_model_parallel_size,
    }
    copies = sizes["data"] * sizes["context"] * parallel.tensor_parallel_depth
    return Layout(
        {axis: number for axis, number in sizes.items() if number > 1},
        cuts_stream=parallel.cuts_stream,
        virtual=parallel.virtual_stages(num_layers),
        schedule=parallel.pipeline_schedule,
        zero=parallel.stage_of_zero if copies > 1 else 0,
        mode=parallel.tensor_parallel_mode,
        depth=parallel.tensor_parallel_depth,
        cp_comm_type=parallel.cp_comm_type,
    )


def parse_layout(text: str) -> Layout:
    """The layout of this name. Raises UsageError naming a word that is invalid."""
    numbers: dict[str, int] = {}
    schedule: str | None = None
    cuts_stream, mode, depth, cp_comm_type = False, "1d", 1, "a2a"
    for word in text.split(",") if text != "serial" else []:
        name, _, value = word.partition("=")
        if name == "tensor" and ":" in value and name not in numbers:
            value, mode, *rest = value.split(":")
            depth = int(rest[0]) if len(rest) == 1 and rest[0].isdecimal() else 0 if rest else 1
            value = value if mode in MODES and depth else ""
        if name == "context" and ":" in value and name not in numbers:
            value, _, cp_comm_type = value.partition(":")
            value = value if cp_comm_type in CP_COMM_TYPES and value != "1" else ""
        is_number = name in NUMBERS and name not in numbers and value.isdecimal()
        if word == "sequence" and not cuts_stream:
            cuts_stream = True
        elif is_number and (int(value) > 0 or name == "zero"):
            numbers[name] = int(value)
        elif name == "schedule" and value in KINDS and schedule is None:
            schedule = value
        else:
            known = ", ".join([*(f"{each}=N" for each in NUMBERS), "sequence"])
            known += f", tensor=N:{'|'.join(MODES)}, tensor=N:2.5d:DEPTH"
            known += f", context=N:{'|'.join(CP_COMM_TYPES)}"
            known += f", schedule={'|'.join(KINDS)}"
            raise UsageError("LAYOUT", text, f"serial, or of {known}, each once; not {word!r}")
    virtual, zero = numbers.pop("virtual", 1), numbers.pop("zero", 0)
    sizes = {axis: n for axis, n in numbers.items() if n > 1}
    layout = Layout(sizes, cuts_stream, virtual, schedule, zero, mode, depth, cp_comm_type)
    if mode != "1d" and layout.size("context") > 1:
        allowed = f"given without context=N, as tensor=N:{mode} cuts the hidden states already"
        raise UsageError("LAYOUT", text, allowed, works=(f"tensor={layout.size('tensor')}:{mode}",))
    if layout.cuts_stream and layout.size("tensor") == 1:
        allowed = "given with tensor=N, whose processes share out the sequence"
        raise UsageError("LAYOUT", text, allowed, works=("tensor=2,sequence",))
    if virtual > 1 and layout.size("pipeline") == 1:
        allowed = "given with pipeline=N, whose ranks have the virtual stages"
        raise UsageError("LAYOUT", text, allowed, works=(f"pipeline=2,virtual={virtual}",))
    if zero > STAGES_OF_ZERO:
        works = (text.replace(f"zero={zero}", f"zero={STAGES_OF_ZERO}"),)
        raise UsageError("LAYOUT", text, "with zero=0, 1, 2 or 3, a stage of ZeRO", works=works)
    if zero and layout.size("data") * layout.size("context") * depth == 1:
        allowed = (
            "given with data=N, or tensor=N:2.5d:DEPTH, whose ranks share out what each would hold"
        )
        raise UsageError("LAYOUT", text, allowed, works=(f"data=2,{text}",))
    return layout
