"""The models and batches on which training steps are timed; numbers alone, so that a peer whose
top-level package is called like this project's can read them too."""

import json
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

SEED = 1234
# As contenders are called; the floor is none.
OURS, FLOOR = "this project", "floor"
NOT_COMPILED = "this project, not compiled"
FULL, SELECTIVE = "this project, full recomputation", "this project, selective recomputation"
COORDINATES, KERNEL = (
    f"this project, dropout 0.1, attention's {rng}" for rng in ("by coordinates", "by the kernel")
)
SEQUENCE = "this project, sequence parallel"
PLAIN, DTENSOR, MEGATRON = "plain torch", "DTensor", "Megatron-Core"
TRANSFORMERS, COMPILED = "transformers", "transformers, compiled"
IN_CHUNKS, AT_ONCE = "logits in chunks", "all logits at once"  # of the output layer alone
# Settings of the model of our own, beside the case's.
SETTINGS: dict[str, dict[str, Any]] = {
    FULL: {"recompute_granularity": "full"},
    SELECTIVE: {"recompute_granularity": "selective"},
    **{
        name: {"attention_dropout": 0.1, "hidden_dropout": 0.1, "attention_dropout_rng": rng}
        for name, rng in {COORDINATES: "coordinates", KERNEL: "kernel"}.items()
    },
}
VARIANTS = (OURS, NOT_COMPILED, SEQUENCE, *SETTINGS)
NAMES = (*VARIANTS, PLAIN, DTENSOR, MEGATRON, TRANSFORMERS, COMPILED)
LEARNING_RATE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Case:
    """A GPT-2 without dropout and its micro-batch, which is the whole batch of a rank's model."""

    name: str
    num_layers: int
    hidden_size: int
    heads: int
    vocab_size: int
    batch: int
    sequence: int = 256
    divisible_by: int = 128  # rows of the vocabulary, beside the tensor-parallel size
    checkpoint_activations: bool = False
    epsilon: float = 1e-5
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.999)
    adam_eps: float = 1e-8
    clip_grad: float = 1.0

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.sequence

    @property
    def flops(self) -> float:
        """Of a step, as MFU counts them: recomputation is not useful, attention is counted whole.

        3 passes of 2 each for every token and weight of a matrix, 12 layers h^2 + v h, and in each
        layer 12 s h a token for attention's two products.
        """
        h, layers = self.hidden_size, self.num_layers
        matrices = 12 * layers * h**2 + self.vocab_size * h
        return float(self.tokens * (6 * matrices + 12 * layers * self.sequence * h))

    @classmethod
    def read(cls, text: str) -> "Case":
        settings: dict[str, Any] = json.loads(text)
        return cls(**{**settings, "betas": tuple(settings["betas"])})

    def written(self) -> str:
        return json.dumps(asdict(self))

    def text(self, number: int) -> NDArray[np.int64]:
        """Token ids [b, s + 1] of one batch: the inputs and, one further, the labels."""
        shape = (self.batch, self.sequence + 1)
        return np.random.default_rng((SEED, number)).integers(0, self.vocab_size, shape)

    def products(self, tensor_parallel: int) -> list["Product"]:
        """The matrix products of a forward and backward pass on one rank, recomputation aside.

        Attention is causal: half of its products need not be done.
        """
        n, h, s, t = self.tokens, self.hidden_size, self.sequence, tensor_parallel
        multiple = self.divisible_by * t
        vocabulary = -(-self.vocab_size // multiple) * multiple // t
        linear = {
            "qkv": (h, 3 * h // t),
            "output": (h // t, h),
            "up": (h, 4 * h // t),
            "down": (4 * h // t, h),
        }
        layers = self.num_layers
        weights = [(name, *sizes, layers) for name, sizes in linear.items()]
        weights.append(("logits", h, vocabulary, 1))
        found = []
        for name, inputs, outputs, times in weights:
            found += [
                Product(f"{name}, forward", 1, n, inputs, outputs, times),
                Product(f"{name}, gradient of the input", 1, n, outputs, inputs, times),
                Product(f"{name}, gradient of the weight", 1, outputs, n, inputs, times),
            ]
        d, heads = h // self.heads, self.batch * self.heads // t
        # Forward q k' and p v; backward two of each kind.
        return [
            *found,
            Product("attention, [s, d] x [d, s]", heads, s, d, s, layers * (1 + 1) / 2),
            Product("attention, [s, s] x [s, d]", heads, s, s, d, layers * (1 + 3) / 2),
        ]


@dataclass(frozen=True)
class Product:
    """[batch, m, k] x [batch, k, n], so many times a step."""

    name: str
    batch: int
    m: int
    k: int
    n: int
    times: float

    @property
    def flops(self) -> float:
        return 2.0 * self.batch * self.m * self.k * self.n * self.times
