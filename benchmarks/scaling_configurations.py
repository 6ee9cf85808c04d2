"""What section 5.1 of the paper measures, configuration by configuration, and in miniature.

The models are those of the presets of table 1, and what the paper says of each is what
tools/planning/figure5.py has of it. A miniature keeps the proportions, so that its parameters on a
rank stay as equal as the paper's:

    hidden / 8   layers / 4   heads / 2   sequence / 8   padded vocabulary / 32
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from benchmarks.cases import Case
from benchmarks.own import make_batch
from megatron.config.model import ModelConfig
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.gpt2 import GPT2Batch
from tools.planning.figure5 import COPIES, HEADS, MODELS, PRESETS, STRONG
from tools.planning.shape import Shape, shape_of

HIDDEN, LAYERS, HALVED, SEQUENCE, VOCABULARY = 8, 4, 2, 8, 32  # divisors of a miniature
SMALL_COPIES = 2  # data-parallel, in miniature
MODEL, BOTH, STRONG_SCALING, NUMBER_OF_HEADS = (
    "model parallel",
    "model and data parallel",
    "strong scaling",
    "heads",
)


@dataclass(frozen=True)
class Configuration:
    """A model of table 1 on so many ranks."""

    preset: str
    tensor: int
    copies: int = 1  # data-parallel
    heads: int | None = None  # of the paper's model, in place of the preset's
    is_small: bool = False

    @property
    def ranks(self) -> int:
        return self.tensor * self.copies

    @property
    def name(self) -> str:
        """The same for two that are the same."""
        heads = self.config.model.num_attention_heads
        return f"{self.model}, {heads} heads, t = {self.tensor}, d = {self.copies}"

    @property
    def model(self) -> str:
        """As the paper calls it."""
        return self.preset.rpartition("_")[2].upper()

    @cached_property
    def config(self) -> PretrainGPT2Config:
        """The preset's, cut over the ranks."""
        words = ["--preset", str(PRESETS / f"{self.preset}.toml")]
        table = parse(PretrainGPT2Config, words, {})
        if self.heads is not None:
            table = replace(table, model=replace(table.model, num_attention_heads=self.heads))
        found = parse(PretrainGPT2Config, [*words, *self._flags(table)], {})
        found.check(self.ranks)
        return found

    def _flags(self, table: PretrainGPT2Config) -> Iterator[str]:
        """What this changes in the settings of the table, which the preset alone tells."""
        settings = {
            "tensor-model-parallel-size": self.tensor,
            "num-attention-heads": table.model.num_attention_heads,
        }
        # The vocabulary is padded alike at every parallel size.
        padded = shape_of(table, table.parallel.tensor_model_parallel_size, "fp16").padded
        if self.is_small:
            padded //= VOCABULARY
            settings |= _reduced(table.model, table.data.seq_length) | {"vocab-size": padded}
            yield "--no-fp16"
        settings["make-vocab-size-divisible-by"] = padded // self.tensor
        for flag, value in settings.items():
            yield from (f"--{flag}", str(value))

    def shape(self, precision: str) -> Shape:
        return shape_of(self.config, self.ranks, precision)

    def batch(self, number: int) -> GPT2Batch:
        """Random tokens; each number has its own."""
        shape = self.shape("fp32")
        return make_batch(
            Case(
                name=self.name,
                num_layers=shape.layers,
                hidden_size=shape.hidden,
                heads=shape.heads,
                vocab_size=shape.vocabulary,
                batch=shape.batch,
                sequence=shape.sequence,
            ),
            number,
        )


def _reduced(model: ModelConfig, sequence: int) -> dict[str, int]:
    return {
        "num-layers": model.num_layers // LAYERS,
        "hidden-size": model.hidden_size // HIDDEN,
        "num-attention-heads": model.num_attention_heads // HALVED,
        "seq-length": sequence // SEQUENCE,
        "max-position-embeddings": model.max_position_embeddings // SEQUENCE,
    }


@dataclass(frozen=True)
class Point:
    """A configuration in one of the studies, and what the paper says of it: a share of linear
    scaling in %, in strong scaling how many times as fast."""

    study: str
    configuration: Configuration
    paper: float


def studies(ranks: int, *, is_small: bool) -> list[Point]:
    """All of section 5.1, whether so many ranks suffice or not; the baseline is the first.

    In miniature the data-parallel copies are two, and the numbers of heads, which are halved, are
    compared on half of the paper's ranks or as many as there are.
    """
    copies = SMALL_COPIES if is_small else COPIES
    one, largest = MODELS[0], MODELS[-1]
    tensor = largest.tensor // HALVED if is_small else largest.tensor
    while is_small and tensor > ranks:
        tensor //= 2

    def on(preset: str, tensor: int, copies: int = 1, heads: int | None = None) -> Configuration:
        return Configuration(preset, tensor, copies, heads, is_small)

    weak = [Point(MODEL, on(each.preset, each.tensor), each.model_parallel) for each in MODELS]
    data = [
        Point(BOTH, on(each.preset, each.tensor, copies), each.model_and_data_parallel)
        for each in MODELS
    ]
    strong = [
        Point(STRONG_SCALING, on(one.preset, size), speed_up) for size, speed_up in STRONG.items()
    ]
    heads = [
        Point(NUMBER_OF_HEADS, on(largest.preset, tensor, heads=number), share)
        for number, share in HEADS.items()
    ]
    return [*weak, *data, *strong, *heads]
