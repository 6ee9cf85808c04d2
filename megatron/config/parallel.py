"""How the processes of a run divide its models, their layers and their samples."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megatron.config.checks import at_most, excludes, is_set, left_out, positive
from megatron.config.parts import check_parts
from megatron.errors import UsageError, flag
from megatron.parallel.axes import INNER, UNIONS, token_pieces

HEADS, HIDDEN = "--num-attention-heads", "--hidden-size"
TENSOR, CONTEXT = "--tensor-model-parallel-size", "--context-parallel-size"
PROCESSES = "the processes: torchrun --nproc-per-node"
MODE, COMM, LAYERS = "--tensor-parallel-mode", "--cp-comm-type", "--num-layers"
STAGES = "pipeline_model_parallel_size"
EACH = "num_layers_per_virtual_pipeline_stage"
VIRTUAL = "num_virtual_stages_per_pipeline_rank"
ENDS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
Widths = Mapping[str, int] | None
"""Sizes that tensor parallelism divides, by flag."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = field(default=1, metadata={"alias": "model_parallel_size"})
    """Processes that share one model, each holding a slice of every layer; the remaining
    factor of the world size is data parallelism. Also spelt --model-parallel-size."""

    tensor_parallel_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    """How the tensor-parallel processes shard a layer. 1d: along the columns or rows of its
    weights, as in the paper. 2d: as q x q processes, which shard the hidden states, too. 2.5d: as
    several such squares, which read different samples. 3d: as l x l x l processes."""

    tensor_parallel_depth: int = 1
    """Number of squares in --tensor-parallel-mode 2.5d."""

    process_group: str = "torch"
    """Part that connects the processes: torch, or module:name of a function that calls
    torch.distributed.init_process_group with what it is given."""

    distributed_timeout_minutes: float = 10.0
    """Minutes without progress after which a run of several processes stops and names the one that
    is behind; longer than the longest save, evaluation or load."""

    def __post_init__(self) -> None:
        check_parts(self, custom=False)
        positive(self, "tensor_model_parallel_size", "distributed_timeout_minutes")
        positive(self, "tensor_parallel_depth")
        mode, size = self.tensor_parallel_mode, self.tensor_model_parallel_size
        depth, dims = self.tensor_parallel_depth, self.grid_dims
        if mode != "2.5d":
            left_out(self, "tensor_parallel_depth", "without {} 2.5d", MODE)
        if size != depth * self.side**dims:
            shapes = {"2d": "a square", "3d": "a cube"}
            shape = shapes.get(mode, f"--tensor-parallel-depth {depth} times a square")
            allowed = f"{shape} with {{}} {mode}"
            raise UsageError(TENSOR, size, allowed, MODE, works=depth * max(2, self.side) ** dims)

    @property
    def grid_dims(self) -> int:
        """Dims of the grid of tensor-parallel processes: 2 of a square, 3 of a cube, 1 in 1d."""
        return len([axis for axis in INNER[self.tensor_parallel_mode] if axis != "depth"])

    @property
    def side(self) -> int:
        """Processes along a side: q of a square, l of a cube; in 1d all of them."""
        size, dims = self.tensor_model_parallel_size // self.tensor_parallel_depth, self.grid_dims
        root = round(size ** (1 / dims))
        return root - (root**dims > size)

    @property
    def cuts_stream(self) -> bool:
        """Whether the tensor-parallel processes shard the rows of the hidden states, too."""
        return False

    @property
    def context_type(self) -> str:
        """`cp_comm_type` of a mesh."""
        return "a2a"

    @property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis except data, which has the remaining ones."""
        sizes = dict.fromkeys(INNER[self.tensor_parallel_mode], self.side)
        if "depth" in sizes:
            sizes["depth"] = self.tensor_parallel_depth
        return sizes

    def batch_parallel_size(self, world_size: int) -> int:
        """Processes that read different samples: the data-parallel models, times the rows of
        processes in 2d, times depth and rows in 2.5d, times l^2 in 3d."""
        batch = UNIONS[self.tensor_parallel_mode]["batch"]
        return world_size // math.prod(n for axis, n in self.sizes.items() if axis not in batch)

    def data_parallel_size(self, world_size: int) -> int:
        """Models trained side by side by world_size processes."""
        return world_size // math.prod(self.sizes.values())

    def check_kind(self, model: Any, given: str = "--model") -> None:
        """Raise UsageError if layers of a model with this config cannot be sharded in this mode.
        given: the flag that names the model."""
        if not model.has_grids:
            reason = f"with {given} of the kind {model.kind}, whose plan cuts along one axis"
            left_out(self, "tensor_parallel_mode", reason)

    def check(self, world_size: int, widths: Widths = None, seq_length: int | None = None) -> None:
        """Raise UsageError if the processes, a model's `KindConfig.widths`, or with sequence
        parallelism the tokens of a sample cannot be divided evenly, or a part is not there."""
        check_parts(self)
        self._check_own(world_size)
        size, side, mode = self.tensor_model_parallel_size, self.side, self.tensor_parallel_mode
        widths = dict(widths or {})
        if self.cuts_stream and seq_length is not None:
            widths["--seq-length"] = seq_length
        divided = [world_size, *(widths.values() if mode == "1d" else ())]
        if any(whole % size for whole in divided):
            others = math.prod(self.sizes.values()) // size
            smaller = [
                self.tensor_parallel_depth * n**self.grid_dims
                for n in range(1, min(side, world_size + 1))
            ]
            fitting = [
                n
                for n in smaller
                if not world_size % (n * others) and not any(whole % n for whole in divided)
            ]
            names = [*widths] if mode == "1d" else []
            of_model = "".join(f"{{}} {widths[name]} and of " for name in names)
            allowed = f"a divisor of {of_model}{PROCESSES}, now {world_size}"
            works = fitting[-1] if fitting else ()
            raise UsageError(TENSOR, size, allowed, *names, works=works)
        for name, width in widths.items():
            # In 3D a weight's input dim is cut along two axes; the columns of a head are never cut.
            parts = side**2 if mode == "3d" and "heads" not in name else side
            if width % parts:
                step = math.lcm(parts, widths.get(HEADS, 1)) if name == HIDDEN else parts
                fitting = [math.ceil(width / step) * step]
                if name == HEADS:
                    hidden = widths.get(HIDDEN, 1)
                    fitting = [n for n in range(side, hidden + 1, side) if not hidden % n]
                allowed = f"a multiple of {parts} with {{}} {mode} and {{}} {size}"
                works = fitting[0] if fitting else ()
                raise UsageError(name, width, allowed, MODE, TENSOR, works=works)

    def _check_own(self, world_size: int) -> None:
        """The first part of `check`: nothing here; subclasses check their own settings."""


@dataclass(frozen=True, kw_only=True)
class ContextParallelConfig(ParallelConfig):
    """Parallelism of programs that read whole samples."""

    context_parallel_size: int = 1
    """Processes that share the tokens of each sample: sequences that many times as long in the same
    memory for activations."""

    cp_comm_type: Literal["a2a", "p2p"] = "a2a"
    """How attention reads the tokens of the other context-parallel processes. a2a: each has all
    tokens of some heads meanwhile (Ulysses). p2p: keys and values travel round a ring."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "context_parallel_size")
        if (mode := self.tensor_parallel_mode) != "1d":
            reason = f"with {{}} {mode}, which cuts the hidden states already"
            left_out(self, "context_parallel_size", reason, MODE)
        if self.context_parallel_size == 1:
            left_out(self, "cp_comm_type", "without {} above 1", CONTEXT)

    @property
    def context_type(self) -> str:
        return self.cp_comm_type

    @property
    def is_ring(self) -> bool:
        return self.context_parallel_size > 1 and self.cp_comm_type == "p2p"

    @property
    def sizes(self) -> dict[str, int]:
        return {"context": self.context_parallel_size, **super().sizes}

    @property
    def context_pieces(self) -> int:
        """Equal pieces into which the processes cut a sample's tokens."""
        return token_pieces(self.context_parallel_size, self.cp_comm_type)

    def check_kind(self, model: Any, given: str = "--model") -> None:
        super().check_kind(model, given)
        if not model.has_context:
            reason = f"with {given} of the kind {model.kind}, whose attention reads whole samples"
            left_out(self, "context_parallel_size", reason)

    def check(self, world_size: int, widths: Widths = None, seq_length: int | None = None) -> None:
        super().check(world_size, widths, seq_length)
        context, tensor = self.context_parallel_size, self.tensor_model_parallel_size
        heads = (widths or {}).get(HEADS)
        if context == 1:
            return
        if world_size % math.prod(self.sizes.values()):
            others = {flag(STAGES): self.sizes.get("pipeline", 1), TENSOR: tensor}
            names = [name for name, size in others.items() if size > 1]
            named = " x ".join(f"{{}} {others[name]}" for name in names)
            allowed = f"such that it times {named} divides" if names else "a divisor of"
            allowed += f" {PROCESSES}, now {world_size}"
            parts = math.prod(others.values())
            smaller = range(1, min(context, world_size + 1))
            fitting = [n for n in smaller if not world_size % (n * parts)]
            if not self.is_ring:
                fitting = [n for n in fitting if not (heads or 0) % (n * tensor)]
            # A ring of one is refused, too.
            works = fitting[-1] if fitting[-1] > 1 or not self.is_ring else ()
            raise UsageError(CONTEXT, context, allowed, *names, works=works)
        if heads is not None and not self.is_ring and heads % (context * tensor):
            allowed = f"such that it times {{}} {tensor} divides {{}} {heads} with {{}} a2a"
            ring = (CONTEXT, str(context), COMM, "p2p")
            raise UsageError(CONTEXT, context, allowed, TENSOR, HEADS, COMM, works=ring)
        pieces = self.context_pieces * (tensor if self.cuts_stream else 1)
        if seq_length is not None and seq_length % pieces:
            allowed = f"a multiple of {pieces} with {{}} {context} and {{}} {self.cp_comm_type}"
            works = math.ceil(seq_length / pieces) * pieces
            raise UsageError("--seq-length", seq_length, allowed, CONTEXT, COMM, works=works)

    def check_images(self, tokens: int, works: object = 1) -> None:
        """Raise UsageError if images of so many tokens have no equal parts. works: see there."""
        if tokens % (pieces := self.context_pieces):
            allowed = f"such that the {pieces} pieces of an image are equal, of {tokens} tokens"
            raise UsageError(CONTEXT, self.context_parallel_size, allowed, works=works)

    def check_model(self, model: Any) -> None:
        """Raise UsageError if a model with this config cannot run in these parts."""
        if self.is_ring and model.recompute_granularity == "selective":
            reason = "with {} p2p, whose attention keeps no probabilities"
            left_out(model, "recompute_granularity", reason, COMM, works="full")


@dataclass(frozen=True, kw_only=True)
class FinetuneParallelConfig(ContextParallelConfig):
    """Parallelism of programs that fine-tune."""

    sequence_parallel: bool = False
    """Shard the hidden states between layers over the tensor-parallel processes, by tokens: the
    same numbers with less memory for activations."""

    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO: state that the data-parallel models shard, and do not each hold. 1: the optimizer's
    state; 2: summed gradients, too; 3: weights, too, except those of the layers in use."""

    use_distributed_optimizer: bool = False
    """Megatron's name for --zero-stage 1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (mode := self.tensor_parallel_mode) != "1d":
            reason = f"with {{}} {mode}, which cuts the hidden states already"
            left_out(self, "sequence_parallel", reason, MODE)
        if self.zero_stage > 1:
            reason = f"with {{}} {self.zero_stage}, which does more"
            left_out(self, "use_distributed_optimizer", reason, "--zero-stage")

    @property
    def stage_of_zero(self) -> int:
        return max(self.zero_stage, int(self.use_distributed_optimizer))

    @property
    def cuts_stream(self) -> bool:
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def zero_flag(self) -> str:
        return "--zero-stage" if self.zero_stage else "--use-distributed-optimizer"

    def divides_state(self, world_size: int) -> bool:
        """Whether ZeRO divides the optimizer's state over several processes."""
        copies = self.data_parallel_size(world_size) * self.tensor_parallel_depth
        return self.stage_of_zero > 0 and copies * self.context_parallel_size > 1

    def _check_own(self, world_size: int) -> None:
        """Warn of settings that shard nothing."""
        if self.sequence_parallel and not self.cuts_stream:
            warnings.warn(f"--sequence-parallel does nothing with {TENSOR} 1", stacklevel=2)
        if (mode := self.tensor_parallel_mode) != "1d" and self.side == 1:
            size = self.tensor_model_parallel_size
            warnings.warn(f"{MODE} {mode} cuts no layer with {TENSOR} {size}", stacklevel=2)
        if self.stage_of_zero and not self.divides_state(world_size):
            text = f"{self.zero_flag} shares nothing out with one data-parallel model: more "
            text += "processes than tensor-parallel ones x pipeline stages would make several"
            warnings.warn(text, stacklevel=2)


@dataclass(frozen=True, kw_only=True)
class TrainingParallelConfig(FinetuneParallelConfig):
    """Parallelism of programs that pretrain."""

    gradient_reduction: str = "sum"
    """Part that adds up the gradients of ranks: sum, a collective that runs beside the backward, or
    module:name of a function of gradients x [n] and axis that returns their sum [n]."""

    pipeline_model_parallel_size: int = 1
    """Pipeline stages: processes that share one model, each holding some of its layers, whole or a
    tensor-parallel slice of them."""

    num_layers_per_virtual_pipeline_stage: int | None = None
    """Transformer layers of every virtual stage. Each process then holds several virtual stages:
    less idle time, more messages."""

    num_virtual_stages_per_pipeline_rank: int | None = None
    """Virtual stages of a process, in place of --num-layers-per-virtual-pipeline-stage; their
    numbers of layers may differ."""

    pipeline_schedule: str | None = None
    """Order in which each process runs its forwards and backwards: gpipe, 1f1b, interleaved (for
    virtual stages), zb-h1 (zero bubble), or module:name of a part. If not given: 1f1b, or with
    virtual stages interleaved."""

    pipeline_partition: Literal["balanced", "uniform"] = "balanced"
    """Layers of each stage. balanced: the slowest stage is as fast as possible, with the head
    counted as the layers that take its time. uniform: numbers of layers as equal as possible."""

    decoder_first_pipeline_num_layers: int | None = None
    """Transformer layers of the first stage; --pipeline-partition balanced divides the rest."""

    decoder_last_pipeline_num_layers: int | None = None
    """Transformer layers of the last stage; --pipeline-partition balanced divides the rest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, STAGES)
        excludes(self, VIRTUAL, EACH)
        # One virtual stage per process is a plain pipeline stage.
        of_virtual = (EACH,) if self.num_virtual_stages_per_pipeline_rank == 1 else (EACH, VIRTUAL)
        if self.pipeline_model_parallel_size == 1:
            for name in (*of_virtual, *ENDS):
                left_out(self, name, "without {} above 1", flag(STAGES))
        for name in ENDS:
            excludes(self, name, *of_virtual, "pipeline_partition")
        positive(self, EACH, VIRTUAL, *ENDS)
        if self.zero_stage > 1 and self.pipeline_model_parallel_size > 1:
            allowed = "at most 1 with pipeline stages: weights and gradients would cross the ranks"
            allowed += " once for each micro-batch"
            raise UsageError("--zero-stage", self.zero_stage, allowed, works=1)

    @property
    def sizes(self) -> dict[str, int]:
        return {"pipeline": self.pipeline_model_parallel_size, **super().sizes}

    def virtual_stages(self, num_layers: int) -> int:
        """Virtual stages of a process, for a model of this many layers; 1 with plain stages."""
        if (each := self.num_layers_per_virtual_pipeline_stage) is not None:
            return num_layers // (each * self.pipeline_model_parallel_size)
        return self.num_virtual_stages_per_pipeline_rank or 1

    def _check_own(self, world_size: int) -> None:
        """Refuse also a number of processes that the stages do not divide."""
        super()._check_own(world_size)
        stages, tensor = self.pipeline_model_parallel_size, self.tensor_model_parallel_size
        tensor = 1 if world_size % tensor else tensor  # which is refused below
        if world_size % (stages * tensor):
            most = min(stages - 1, world_size)
            most = max(n for n in range(1, most + 1) if not world_size % (n * tensor))
            is_needed = any(is_set(self, name) for name in (EACH, VIRTUAL, *ENDS))
            works = most if most > 1 or not is_needed else ()
            allowed = f"such that it times {{}} {tensor} divides {PROCESSES}, now {world_size}"
            raise UsageError(flag(STAGES), stages, allowed, TENSOR, works=works)

    def check_model(self, model: Any) -> None:
        """Raise UsageError also if it cannot have these stages or this schedule."""
        super().check_model(model)
        layers, stages = model.num_layers, self.pipeline_model_parallel_size
        of_model = f"{{}} {layers}"
        if (each := self.num_layers_per_virtual_pipeline_stage) is not None:
            if layers % stages:
                left_out(self, EACH, f"where {stages} stages do not divide {of_model}", LAYERS)
            fitting = [n for n in range(1, layers // stages) if not layers // stages % n]
            if each not in fitting:
                allowed = f"a divisor of {of_model} / {stages} stages, below it: several of a stage"
                works: Any = fitting[-1] if fitting else (flag(VIRTUAL), "1")
                raise UsageError(flag(EACH), each, allowed, LAYERS, works=works)
        rounded = f"{of_model} / {stages} stages, rounded:"
        at_most(self, VIRTUAL, max(1, layers // stages), LAYERS, rounded)
        most = max(n for n in range(1, min(layers, stages) + 1) if not stages % n)
        at_most(self, STAGES, layers, LAYERS, works=most)
        virtual = self.virtual_stages(layers)
        if layers % virtual:
            reason = f"where {virtual} virtual stages do not divide {of_model}"
            left_out(self, "pipeline_partition", reason, LAYERS)
        # Each of the other stages has at least one layer; two stages have all of them.
        first, last = self.decoder_first_pipeline_num_layers, self.decoder_last_pipeline_num_layers
        between = max(0, stages - 2)
        rest = f"{of_model} without those of other stages:"
        at_most(self, ENDS[0], layers - between - 1, LAYERS, rest)
        most = layers - between - (first or 1)
        at_most(self, ENDS[1], most, LAYERS, rest)
        if stages == 2 and first is not None and last is not None and last < most:
            allowed = f"the {most} other layers of {of_model}"
            raise UsageError(flag(ENDS[1]), last, allowed, LAYERS, works=most)
        schedule, instead, reason, others = self.pipeline_schedule, "1f1b", "", [flag(STAGES)]
        if schedule == "interleaved" and virtual == 1:
            reason, others = "where a process has one virtual stage, without {}", [flag(VIRTUAL)]
        elif schedule in ("gpipe", "zb-h1") and stages == 1:
            reason = "with {} 1, where it would only take memory"
        elif schedule in ("gpipe", "1f1b", "zb-h1") and virtual > 1:
            reason, instead = f"or interleaved with {virtual} virtual stages", "interleaved"
        elif schedule == "zb-h1" and model.recompute_granularity == "full":
            reason = "with {} full: zero bubble keeps what it frees"
            others = ["--recompute-granularity"]
        if reason:
            left_out(self, "pipeline_schedule", reason, *others, works=instead)
