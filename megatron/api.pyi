# ruff: noqa: I001

# Start and mesh
from .config.parallel import (
    ParallelConfig as ParallelConfig,
    TrainingParallelConfig as TrainingParallelConfig,
)
from .errors import UsageError as UsageError
from .config.parse import user_errors as user_errors
from .train.launch import launch as launch
from .parallel.mesh import (
    Mesh as Mesh,
    build_mesh as build_mesh,
    serial_mesh as serial_mesh,
)
from .parallel.collectives import all_reduce as all_reduce

# Layers
from .parallel.layers import (
    Gathered as Gathered,
    Partition as Partition,
    ParallelLinear as ParallelLinear,
    ColumnParallelLinear as ColumnParallelLinear,
    RowParallelLinear as RowParallelLinear,
    LayerNorm as LayerNorm,
    RMSNorm as RMSNorm,
)
from .parallel.layers_grid import (
    Linear as Linear,
    Linear2D as Linear2D,
    InputLinear2D as InputLinear2D,
    OutputLinear2D as OutputLinear2D,
    VocabParallelEmbedding2D as VocabParallelEmbedding2D,
    LayerNorm2D as LayerNorm2D,
    RMSNorm2D as RMSNorm2D,
    GroupedQueryLinear2D as GroupedQueryLinear2D,
    VocabParallelHead2D as VocabParallelHead2D,
    Linear3D as Linear3D,
    LayerNorm3D as LayerNorm3D,
    RMSNorm3D as RMSNorm3D,
    GroupedQueryLinear3D as GroupedQueryLinear3D,
)
from .parallel.regions import (
    split_stream as split_stream,
    gather_stream as gather_stream,
)
from .parallel.dropout import Dropout as Dropout
from .parallel.factory import layer_factory as layer_factory
from .parallel.context import local_tokens as local_tokens

# Models that were not written for it, by a plan
from .huggingface.parallelize import (
    parallelize as parallelize,
    whole_state_dict as whole_state_dict,
)
from .huggingface.replacements import parameters_on_meta as parameters_on_meta
from .huggingface.plan import (
    PlanError as PlanError,
    Column as Column,
    Row as Row,
    Vocabulary as Vocabulary,
    Summed as Summed,
    Whole as Whole,
    Local as Local,
    Redistribute as Redistribute,
)

# Parameters
from .parallel.sharding import (
    ShardedModule as ShardedModule,
    ShardingSpec as ShardingSpec,
    sharding_specs as sharding_specs,
    replicated as replicated,
    gather_whole as gather_whole,
)
from .parallel.initialize import materialize as materialize

# Gradients
from .parallel.buckets import (
    GradientBuckets as GradientBuckets,
    clip_grad_norm as clip_grad_norm,
)

from .optim.adam import MasterWeights as MasterWeights
from .parallel.zero3 import offload_activations as offload_activations

# Pipelines of one's own stages
from .parallel.stages import (
    PipelineStage as PipelineStage,
    PipelineModel as PipelineModel,
    tie as tie,
)
from .train.pipelining import run_pipeline as run_pipeline

# Models and training
from .config.model import (
    BertConfig as BertConfig,
    GPT2Config as GPT2Config,
    LlamaConfig as LlamaConfig,
    ViTConfig as ViTConfig,
)
from .config.training import (
    OptimizerConfig as OptimizerConfig,
    PrecisionConfig as PrecisionConfig,
)
from .config.pretrain import PretrainGPT2Config as PretrainGPT2Config
from .models.gpt import (
    GPT2 as GPT2,
    TransformerLayer as TransformerLayer,
    Sequences as Sequences,
)
from .models.vit import Accuracy as Accuracy
from .parallel.schedules import (
    Action as Action,
    PipelinePlan as PipelinePlan,
)
from .train.pipelining import plan_pipeline as plan_pipeline
from .config.parts import register_part as register_part
from .models.registry import (
    ModelKind as ModelKind,
    find_kind as find_kind,
)
from .train.state import (
    TrainState as TrainState,
    build_state as build_state,
)
from .train.step import (
    train_step as train_step,
    StepResult as StepResult,
)
from .train.evaluate import mean_losses as mean_losses
from .train.objectives import WholeLogitsLoss as WholeLogitsLoss
from .optim.schedule import learning_rate as learning_rate
from .train.callbacks import (
    Callback as Callback,
    Training as Training,
)
from .train.monitors import peak_memory as peak_memory
from .train.metrics import Metrics as Metrics
from .train.loggers import TensorBoard as TensorBoard

# Data
from .data.batch import (
    Batch as Batch,
    Samples as Samples,
)
from .data.gpt2 import (
    GPT2Batch as GPT2Batch,
    RandomText as RandomText,
)
from .data.images import (
    Images as Images,
    open_images as open_images,
)
from .data.sources import open_document_corpus as open_document_corpus
from .data.documents import (
    Documents as Documents,
    open_documents as open_documents,
)
from .data.map_style import open_named as open_named
from .data.padded import open_padded_splits as open_padded_splits
from .data.tokenizer import (
    Tokenizer as Tokenizer,
    build_tokenizer as build_tokenizer,
)
from .train.inputs import (
    Inputs as Inputs,
    prefetch as prefetch,
)

# Checkpoints
from .checkpoint.format import Checkpoint as Checkpoint
from .checkpoint.load import (
    model_slices as model_slices,
    optimizer_slices as optimizer_slices,
    newest_checkpoint as newest_checkpoint,
    load_checkpoint as load_checkpoint,
    load_optimizer as load_optimizer,
)
from .checkpoint.save import save_checkpoint as save_checkpoint
from .parallel.dtensors import (
    to_dtensors as to_dtensors,
    from_dtensors as from_dtensors,
)
