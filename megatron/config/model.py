"""The models: shape, dropout and initialisation."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from megatron.config.checks import UsageError, fraction, positive

RecomputeGranularity = Literal["none", "full", "selective"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"]
ResidualOrder = Literal["pre-ln", "post-ln"]
Head = Literal["classifier", "choice", "span"]
TOKEN_TYPES = 2  # of the first and of the second segment of a BERT's sample
# What a folder of transformers has beside the model, and so has one that an export makes.
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
KEPT = "hf_"  # of names of files in a checkpoint that were in such a folder


def beside(folder: Path, prefix: str = "", names: Iterable[str] = BESIDE) -> dict[str, bytes]:
    """{name: content} of the folder's files of these names, which have this prefix there."""
    files = {name: folder / f"{prefix}{name}" for name in names}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


@dataclass(frozen=True, kw_only=True)
class KindConfig:
    """What every kind of model has."""

    kind: ClassVar[str]
    """What checkpoints call such a model."""
    adaptable: ClassVar[frozenset[str]] = frozenset()
    """Fields that no parameter depends on, which fine-tuning may change."""
    has_grids: ClassVar[bool] = True
    """Whether its layers can be cut in each --tensor-parallel-mode, and not in 1d alone."""
    layernorm_impl = "torch"
    """LayerNorm's kernel."""
    granularities: ClassVar[tuple[RecomputeGranularity, ...]] = ("none", "selective", "full")
    """Of recomputation, that it has."""

    attention_dropout_rng: Literal["coordinates", "coordinates-flex", "kernel"] | None = None
    """Where the dropout of attention comes from: coordinates, a function of sample, head, query and
    key, the same at every layout; kernel, what torch's kernel draws, which depends on the layout.
    By default coordinates on CPUs; kernel on GPUs, where the other needs more time and memory.
    coordinates-flex drops what coordinates does; compiled layers on GPUs compute it by two calls of
    torch's flex_attention, which keep no probabilities."""

    recompute_granularity: RecomputeGranularity = field(
        default="none", metadata={"alias": "checkpoint_activations"}
    )
    """What the backward pass computes again, to save memory: full, each layer from its input, as in
    the paper; selective, attention's core alone, which saves its probabilities where its kernel
    keeps them. Also spelt --checkpoint-activations."""

    cpu_offload_activations: bool = False
    """Keep what layers need for their backward in the host's memory until then; with
    --recompute-granularity full that is the input of each."""

    def starts_from(self) -> str | None:
        """The weights of another program from which a run starts that has no checkpoint; None for
        random ones. Raises UsageError for those that cannot be read."""
        return None

    def completed(self, saved: Callable[[], Mapping[str, Any] | None]) -> Self:
        """With what is known of a run's checkpoint alone. saved: reads its config of the model;
        None where the run has no checkpoint."""
        return self

    def files(self, saved: Path | None) -> Mapping[str, bytes]:
        """{name: content} of what checkpoints keep beside the model. saved: the checkpoint that
        the run goes on from, or whose weights it takes."""
        found = {} if saved is None else beside(saved, KEPT, ("config.json", *BESIDE))
        return {f"{KEPT}{name}": content for name, content in found.items()}

    @property
    def widths(self) -> dict[str, int]:
        """What tensor parallelism cuts into equal parts, by flag."""
        raise NotImplementedError

    @property
    def drops_attention(self) -> bool:
        """Whether probabilities of attention are dropped."""
        raise NotImplementedError

    @property
    def can_compile(self) -> bool:
        """Whether --compile takes its layers: no compiler sees into apex's kernel."""
        return self.layernorm_impl == "torch"

    def of_depth(self, layers: int) -> Self:
        """The same model with so many layers."""
        changes: Any = {"num_layers": layers}
        return replace(self, **changes)

    def draws_in_kernel(self, device: str) -> bool:
        """Whether a kernel draws attention's dropout; device: torch's name of its kind."""
        by_default = "kernel" if device == "cuda" else "coordinates"
        return self.drops_attention and (self.attention_dropout_rng or by_default) == "kernel"

    def attends_by_flex(self, device: str) -> bool:
        """Whether compiled layers drop in flex_attention; device: torch's name of its kind."""
        is_asked = self.attention_dropout_rng == "coordinates-flex"
        return self.drops_attention and is_asked and device == "cuda"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(KindConfig):
    """What the kinds have that are built from this project's own layers."""

    has_biases: ClassVar[bool] = True
    """Whether the matmuls of its layers add a bias."""
    normalization: ClassVar[Literal["layer", "rms"]] = "layer"
    """LayerNorm or RMSNorm."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the stream between layers."""

    num_attention_heads: int
    """Attention heads of a layer; divides the hidden size."""

    ffn_hidden_size: int | None = None
    """Width of the MLP; 4 x --hidden-size if not given."""

    activation: Activation = "gelu"
    """Between the two matmuls of the MLP; swiglu and geglu are SiLU and GeLU of a gate."""

    layernorm_epsilon: float = 1e-5
    """Added to the variance in LayerNorm, to the mean square in RMSNorm."""

    layernorm_impl: Literal["torch", "apex"] = "torch"
    """LayerNorm: torch's own fused kernel, or NVIDIA apex's FusedLayerNorm, with which layers are
    not compiled."""

    init_method_std: float = 0.02
    """Standard deviation of the initial weights; divided by sqrt(2 x layers) before residuals."""

    attention_dropout: float = 0.1
    """Dropout probability of the attention probabilities."""

    hidden_dropout: float = 0.1
    """Dropout probability before each residual add."""

    embedding_dropout: float | None = None
    """Dropout probability of the embeddings; that of --hidden-dropout if not given."""

    def __post_init__(self) -> None:
        positive(
            self,
            "num_layers",
            "hidden_size",
            "num_attention_heads",
            "ffn_hidden_size",
            "layernorm_epsilon",
            "init_method_std",
        )
        fraction(self, "attention_dropout", "hidden_dropout", "embedding_dropout")
        if self.hidden_size % (heads := self.num_attention_heads):
            divisors = [n for n in range(1, self.hidden_size + 1) if self.hidden_size % n == 0]
            nearest = min(divisors, key=lambda n: (abs(n - heads), -n))
            raise UsageError(
                "--num-attention-heads",
                heads,
                f"a divisor of --hidden-size {self.hidden_size}",
                works=("--num-attention-heads", str(nearest)),
            )

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def widths(self) -> dict[str, int]:
        found = {"--num-attention-heads": self.num_attention_heads}
        found["--hidden-size"] = self.hidden_size
        if self.ffn_hidden_size is not None:
            found["--ffn-hidden-size"] = self.ffn_hidden_size
        return found

    @property
    def dropout_of_embeddings(self) -> float:
        given = self.embedding_dropout
        return self.hidden_dropout if given is None else given

    @property
    def drops_attention(self) -> bool:
        return self.attention_dropout > 0

    @property
    def drops(self) -> bool:
        return self.drops_attention or max(self.hidden_dropout, self.dropout_of_embeddings) > 0


@dataclass(frozen=True, kw_only=True)
class TextModelConfig(ModelConfig):
    """What models of text add."""

    max_position_embeddings: int
    """Rows of the position embedding: the longest sequence that the model can read."""

    vocab_size: int | None = None
    """Rows of the word embedding, all of which are in the softmax: at least the ids of the data
    set's tokenizer, and as many if not given."""

    make_vocab_size_divisible_by: int = 128
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer a weight of its own; else it is the word embedding's."""

    @property
    def has_tied_head(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by")


@dataclass(frozen=True, kw_only=True)
class GPT2Config(TextModelConfig):
    kind: ClassVar[str] = "gpt2"

    activation: Activation = "gelu_tanh"

    max_position_embeddings: int = 1024


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextModelConfig):
    kind: ClassVar[str] = "llama"
    has_biases: ClassVar[bool] = False
    normalization: ClassVar[Literal["layer", "rms"]] = "rms"
    adaptable: ClassVar[frozenset[str]] = frozenset(
        ("max_position_embeddings", "rotary_base", "rope_scaling")
    )

    activation: Activation = "swiglu"

    attention_dropout: float = 0.0

    hidden_dropout: float = 0.0

    max_position_embeddings: int = 2048
    """The longest sequence that the model can read; it may be longer than those of training."""

    untie_embeddings_and_output_weights: bool = True

    num_query_groups: int | None = None
    """Heads of keys and values, of which each is shared by as many query heads (grouped-query
    attention); as many as --num-attention-heads if not given."""

    rotary_base: float = 10_000.0
    """Base of the rotary frequencies, theta: pair c of a head of size d turns by base^(-2c/d) a
    position."""

    rope_scaling: tuple[float, float, float, float] | None = None
    """Llama 3's scaling of the rotary frequencies for longer texts: factor, low and high frequency
    factor, positions of the original training; 8 1 4 8192 in Llama 3.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "num_query_groups", "rotary_base")
        if self.num_attention_heads % (groups := self.query_groups):
            heads, name = self.num_attention_heads, "--num-query-groups"
            most = max(n for n in range(1, min(groups, heads) + 1) if heads % n == 0)
            allowed = f"a divisor of --num-attention-heads {heads}"
            raise UsageError(name, groups, allowed, works=(name, str(most)))
        if self.head_size % 2:
            name, h = "--num-attention-heads", self.hidden_size
            allowed = f"such that heads of --hidden-size {h} have an even size"
            even = [n for n in range(1, self.num_attention_heads) if not h % (2 * n)]
            works = (name, str(even[-1])) if even else ()
            raise UsageError(name, self.num_attention_heads, allowed, works=works)
        if self.layernorm_impl != "torch":
            name = "--layernorm-impl"
            raise UsageError(name, self.layernorm_impl, "torch for RMSNorm", works=(name, "torch"))
        if self.rope_scaling is not None:
            factor, low, high, positions = self.rope_scaling
            is_finite = all(map(isfinite, self.rope_scaling))
            if not (is_finite and factor >= 1 and 0 < low < high and positions > 0):
                given = " ".join(f"{each:g}" for each in self.rope_scaling)
                allowed = "factor >= 1, 0 < low < high frequency factor, positions > 0"
                name = "--rope-scaling"
                raise UsageError(name, given, allowed, works=(name, "8", "1", "4", "8192"))

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class BertConfig(TextModelConfig):
    kind: ClassVar[str] = "bert"

    activation: Activation = "gelu"

    max_position_embeddings: int = 512

    residual_order: ResidualOrder = "pre-ln"
    """pre-ln: norm before attention and MLP, off the residual path, as the paper rearranged it;
    post-ln: after each residual add, as in the original BERT."""


@dataclass(frozen=True, kw_only=True)
class FinetunedConfig(BertConfig):
    """A BERT whose pretraining heads have given way to the head of a task; no program's flags."""

    kind: ClassVar[str] = "finetuned"

    head: Head
    """Scores of classes, of each option of a question, or of each token as first and last one."""

    labels: tuple[str, ...] = ()
    """Names of a classifier's classes, in the order of their ids."""
