"""The models: shape, dropout and initialisation."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf, isfinite
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from megatron.config.checks import divides, fraction, left_out, positive
from megatron.errors import UsageError, flag, spelling

RecomputeGranularity = Literal["none", "full", "selective"]
Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu"]
ResidualOrder = Literal["pre-ln", "post-ln"]
Head = Literal["classifier", "choice", "span"]
Pooling = Literal["class-token", "mean"]
HALF = (0.5, 0.5, 0.5)  # mean and deviation of colors where no data give them
TOKEN_TYPES = 2  # of the first and the second segment of a BERT sample
# Files beside the model in a folder of transformers, and in a folder that an export makes.
HF_FILES = (
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
HF_PREFIX = "hf_"  # prefix of files in a checkpoint that were in such a folder


def hf_files(folder: Path, prefix: str = "", names: Iterable[str] = HF_FILES) -> dict[str, bytes]:
    """{name: content} of files with these names, which have this prefix in the folder."""
    files = {name: folder / f"{prefix}{name}" for name in names}
    return {name: file.read_bytes() for name, file in files.items() if file.is_file()}


@dataclass(frozen=True, kw_only=True)
class KindConfig:
    """Settings of every kind of model."""

    resume: ClassVar[str] = "fixed"
    """Whether a resumed run may change its settings; a field's metadata may say otherwise."""
    kind: ClassVar[str]
    """Name of such a model in checkpoints."""
    adaptable: ClassVar[frozenset[str]] = frozenset()
    """Fields that no parameter depends on, which fine-tuning may change."""
    has_grids: ClassVar[bool] = True
    """Whether its layers can be sharded in every --tensor-parallel-mode, and not only in 1d."""
    has_context: ClassVar[bool] = False
    """Whether its ranks can hold other tokens of a sample: its attention and its loss are those of
    a LayerFactory's `attention_core` and `context`."""
    is_unmodified: ClassVar[bool] = False
    """Whether it is an unmodified model of transformers, which has a tokenizer of its own."""
    layernorm_impl = "torch"
    """LayerNorm's kernel."""
    is_causal: ClassVar[bool] = True
    """Whether a token attends only to those before it."""
    granularities: ClassVar[tuple[RecomputeGranularity, ...]] = ("none", "selective", "full")
    """Values of --recompute-granularity that it has."""

    layers: tuple[str, ...] = ()
    """Layers of your own: rms_norm=module:Norm in place of the factory's, called with the mesh and
    then as a model calls that; factory=module:name in place of layer_factory."""

    attention_dropout_rng: Literal["coordinates", "coordinates-flex", "kernel"] | None = field(
        default=None, metadata={"resume": "effect"}
    )
    """Source of attention's dropout. coordinates: a function of sample, head, query and key, the
    same at every layout. kernel: drawn by torch's kernel, and dependent on the layout. If not
    given: coordinates on CPUs; kernel on GPUs, where coordinates needs more time and memory.
    coordinates-flex: drops the same as coordinates; compiled layers on GPUs compute it by two calls
    of torch's flex_attention, which keep no probabilities."""

    recompute_granularity: RecomputeGranularity = field(
        default="none", metadata={"alias": "checkpoint_activations", "resume": "free"}
    )
    """Activations that the backward recomputes, to save memory. full: each layer from its input, as
    in the paper. selective: only attention's core, which saves the memory of its probabilities if
    its kernel keeps them. Also spelt --checkpoint-activations."""

    cpu_offload_activations: bool = field(default=False, metadata={"resume": "free"})
    """Keep the tensors that layers save for their backward in host memory until then; with
    --recompute-granularity full, the input of each layer."""

    def starts_from(self) -> str | None:
        """Weights of another program from which a run without a checkpoint starts; None for random
        ones. Raises UsageError for weights that cannot be read."""
        return None

    def prove(self, mesh: Any) -> list[str]:
        """Check on the ranks of the mesh, before the model is built, that it can be divided (every
        rank calls this). Returns messages. Raises UsageError, the same on every rank."""
        return []

    def facts(self, model: Any, checkpoint: Any | None) -> dict[str, Any]:
        """Further facts for the manifests of the model. checkpoint: the one to be loaded, or None.
        Raises UsageError if its model has other facts."""
        return {}

    def completed(self, saved: Mapping[str, Any] | None) -> Self:
        """This config with the settings that only a run's checkpoint has. saved: the checkpoint's
        config of the model; None if the run has no checkpoint."""
        return self

    def files(self, saved: Path | None) -> Mapping[str, bytes]:
        """{name: content} of files that checkpoints keep beside the model. saved: the checkpoint
        that the run resumes, or whose weights it takes."""
        files = {} if saved is None else hf_files(saved, HF_PREFIX, ("config.json", *HF_FILES))
        return {f"{HF_PREFIX}{name}": content for name, content in files.items()}

    @property
    def widths(self) -> dict[str, int]:
        """Sizes that tensor parallelism divides into equal parts, by flag."""
        raise NotImplementedError

    @property
    def attention_width(self) -> int | None:
        """Layers x width of their heads; None if it is not known."""
        return None

    @property
    def drops_attention(self) -> bool:
        """Whether attention probabilities have dropout."""
        raise NotImplementedError

    @property
    def can_compile(self) -> bool:
        """Whether --compile supports its layers: no compiler sees into apex's kernel."""
        return self.layernorm_impl == "torch"

    @property
    def compiles_by_default(self) -> bool:
        """Whether layers are compiled on a GPU if no flag says it: unmodified models are not."""
        return self.can_compile and not self.is_unmodified

    def with_num_layers(self, layers: int) -> Self:
        """The same model with this many layers."""
        changes: Any = {"num_layers": layers}
        return replace(self, **changes)

    def draws_in_kernel(self, device: str) -> bool:
        """Whether a kernel draws attention's dropout; device: torch's device type."""
        by_default = "kernel" if device == "cuda" else "coordinates"
        return self.drops_attention and (self.attention_dropout_rng or by_default) == "kernel"

    def attends_by_flex(self, device: str) -> bool:
        """Whether compiled layers use flex_attention for dropout; device: torch's device type."""
        is_asked = self.attention_dropout_rng == "coordinates-flex"
        return self.drops_attention and is_asked and device == "cuda"


@dataclass(frozen=True, kw_only=True)
class ModelConfig(KindConfig):
    """Settings of the kinds that are built from this project's own layers."""

    has_biases: ClassVar[bool] = True
    """Whether the matmuls of its layers add a bias."""
    normalization: ClassVar[Literal["layer", "rms"]] = "layer"
    """LayerNorm or RMSNorm."""

    num_layers: int
    """Transformer layers."""

    hidden_size: int
    """Width of the hidden states."""

    num_attention_heads: int
    """Attention heads of a layer; a divisor of --hidden-size."""

    ffn_hidden_size: int | None = None
    """Width of the MLP; 4 x --hidden-size if not given."""

    activation: Activation = "gelu"
    """Activation between the matmuls of the MLP; swiglu and geglu are SiLU and GeLU of a gate."""

    layernorm_epsilon: float = 1e-5
    """Added to the variance in LayerNorm, to the mean square in RMSNorm."""

    layernorm_impl: Literal["torch", "apex"] = field(default="torch", metadata={"resume": "free"})
    """LayerNorm: torch's own fused kernel, or NVIDIA apex's FusedLayerNorm, with which layers are
    not compiled."""

    init_method_std: float = field(default=0.02, metadata={"resume": "free"})
    """Standard deviation of the initial weights; divided by sqrt(2 x layers) before residuals."""

    attention_dropout: float = field(default=0.1, metadata={"resume": "free"})
    """Dropout probability of the attention probabilities."""

    hidden_dropout: float = field(default=0.1, metadata={"resume": "free"})
    """Dropout probability before each residual add."""

    embedding_dropout: float | None = field(default=None, metadata={"resume": "free"})
    """Dropout probability of the embeddings; --hidden-dropout if not given."""

    def __post_init__(self) -> None:
        positive(self, "num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size")
        positive(self, "layernorm_epsilon", "init_method_std")
        fraction(self, "attention_dropout", "hidden_dropout", "embedding_dropout")
        divides(self, "num_attention_heads", self.hidden_size, "--hidden-size")

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def attention_width(self) -> int:
        return self.num_layers * self.hidden_size

    @property
    def ffn_size(self) -> int:
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def widths(self) -> dict[str, int]:
        names = ("num_attention_heads", "hidden_size", "ffn_hidden_size")
        sizes = {flag(name): getattr(self, name) for name in names}
        return {name: size for name, size in sizes.items() if size is not None}

    @property
    def dropout_of_embeddings(self) -> float:
        if self.embedding_dropout is None:
            return self.hidden_dropout
        return self.embedding_dropout

    @property
    def drops_attention(self) -> bool:
        return self.attention_dropout > 0

    @property
    def drops(self) -> bool:
        return self.drops_attention or max(self.hidden_dropout, self.dropout_of_embeddings) > 0


@dataclass(frozen=True, kw_only=True)
class TextModelConfig(ModelConfig):
    """Settings that models of text add."""

    max_position_embeddings: int
    """Rows of the position embedding: the longest sequence that the model can read."""

    vocab_size: int | None = field(default=None, metadata={"resume": "effect"})
    """Rows of the word embedding, all of which are in the softmax: at least the number of ids of
    the data set's tokenizer, which is the default."""

    make_vocab_size_divisible_by: int = field(default=128, metadata={"resume": "free"})
    """The vocabulary is padded to a multiple of this times the tensor-parallel size."""

    untie_embeddings_and_output_weights: bool = False
    """Give the output layer its own weight; else it shares the word embedding's."""

    @property
    def has_tied_head(self) -> bool:
        return not self.untie_embeddings_and_output_weights

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "max_position_embeddings", "vocab_size", "make_vocab_size_divisible_by")


@dataclass(frozen=True, kw_only=True)
class GPT2Config(TextModelConfig):
    kind: ClassVar[str] = "gpt2"
    has_context: ClassVar[bool] = True

    activation: Activation = "gelu_tanh"

    max_position_embeddings: int = 1024


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(TextModelConfig):
    kind: ClassVar[str] = "llama"
    has_context: ClassVar[bool] = True
    has_biases: ClassVar[bool] = False
    normalization: ClassVar[Literal["layer", "rms"]] = "rms"
    adaptable: ClassVar[frozenset[str]] = frozenset(
        ("max_position_embeddings", "rotary_base", "rope_scaling")
    )

    activation: Activation = "swiglu"

    attention_dropout: float = 0.0

    hidden_dropout: float = 0.0

    max_position_embeddings: int = 2048
    """The longest sequence that the model can read; it may exceed the length in training."""

    untie_embeddings_and_output_weights: bool = True

    num_query_groups: int | None = None
    """Heads of keys and values, each shared by the same number of query heads (grouped-query
    attention); --num-attention-heads if not given."""

    rotary_base: float = 10_000.0
    """Base of the rotary frequencies, theta: pair c of a head of size d turns by base^(-2c/d) per
    position."""

    rope_scaling: tuple[float, float, float, float] | None = None
    """Llama 3's scaling of the rotary frequencies for longer texts: factor, low and high frequency
    factor, positions of the original training; 8 1 4 8192 in Llama 3.1."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "num_query_groups", "rotary_base")
        heads = self.num_attention_heads
        divides(self, "num_query_groups", heads, "--num-attention-heads")
        left_out(self, "layernorm_impl", "with RMSNorm, which apex's kernel does not compute")
        if self.head_size % 2:
            name, h = "--num-attention-heads", self.hidden_size
            even = [n for n in range(1, heads) if not h % (2 * n)]
            allowed = f"such that heads of {{}} {h} have an even size"
            nearest = even[-1] if even else ()
            raise UsageError(name, heads, allowed, "--hidden-size", works=nearest)
        if self.rope_scaling is not None:
            factor, low, high, positions = self.rope_scaling
            if not (1 <= factor < inf and 0 < low < high < inf and 0 < positions < inf):
                allowed = "factor >= 1, 0 < low < high frequency factor, positions > 0"
                name, *values = spelling("rope_scaling", self.rope_scaling)
                works = spelling("rope_scaling", (8, 1, 4, 8192))
                raise UsageError(name, " ".join(values), allowed, works=works)

    @property
    def query_groups(self) -> int:
        return self.num_query_groups or self.num_attention_heads


@dataclass(frozen=True, kw_only=True)
class BertConfig(TextModelConfig):
    kind: ClassVar[str] = "bert"
    is_causal: ClassVar[bool] = False
    has_context: ClassVar[bool] = True

    activation: Activation = "gelu"

    max_position_embeddings: int = 512

    residual_order: ResidualOrder = "pre-ln"
    """pre-ln: norm before attention and MLP, off the residual path, as the paper rearranged it;
    post-ln: after each residual add, as in the original BERT."""


@dataclass(frozen=True, kw_only=True)
class FinetunedConfig(BertConfig):
    """A BERT with the head of a task in place of pretraining heads; no program has these flags."""

    kind: ClassVar[str] = "finetuned"

    head: Head
    """Scores classes, each option of a question, or each token as first and last of a span."""

    labels: tuple[str, ...] = ()
    """Names of a classifier's classes, in the order of their ids."""


@dataclass(frozen=True, kw_only=True)
class ViTConfig(ModelConfig):
    is_causal: ClassVar[bool] = False
    kind: ClassVar[str] = "vit"
    has_context: ClassVar[bool] = True

    image_size: int = 32
    """Height and width of an image in pixels. The shorter side of other files is scaled to it, and
    their middle cut out."""

    patch_size: int = 4
    """Height and width of a patch, which is one token; a divisor of --image-size."""

    pooling: Pooling = "class-token"
    """Row that the classifier reads: that of a learned token before the patches, or the mean of all
    patches, without such a token."""

    num_classes: int | None = field(default=None, metadata={"resume": "effect"})
    """Classes of the classifier; those of --data-path if not given."""

    label_smoothing: float = field(default=0.0, metadata={"resume": "free"})
    """Share of each label that is spread evenly over all classes."""

    attention_dropout: float = 0.0

    hidden_dropout: float = 0.0

    image_mean: tuple[float, float, float] | None = field(default=None, metadata={"resume": "data"})
    """Mean of red, green and blue, of values from 0 to 1, which is subtracted; that of the training
    images if not given."""

    image_std: tuple[float, float, float] | None = field(default=None, metadata={"resume": "data"})
    """Standard deviation of red, green and blue, by which values are then divided; that of the
    training images if not given."""

    class_names: tuple[str, ...] = field(default=(), metadata={"resume": "free"})
    """Names of the classes, in the order of their scores; those of --data-path if not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "image_size", "patch_size", "num_classes")
        fraction(self, "label_smoothing")
        divides(self, "patch_size", self.image_size, "--image-size")
        stds, means = self.image_std or (), self.image_mean or ()
        if not all(0 < each < inf for each in stds):
            raise UsageError("--image-std", " ".join(map(str, stds)), "above 0 for each color")
        if not all(map(isfinite, means)):
            raise UsageError("--image-mean", " ".join(map(str, means)), "a number for each color")

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def positions(self) -> int:
        """Tokens of an image."""
        return self.patches + (self.pooling == "class-token")
