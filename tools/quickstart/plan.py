"""The commands of each stage, their outputs, and the number of processes that train."""

from dataclasses import dataclass
from pathlib import Path

from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.files import tokenizer_folder
from megatron.data.json_lines import find_shards
from tools.command import on_all, python, shown
from tools.processes import Processes, fit_processes
from tools.stages import Stage

PROMPTS = (
    "The purpose of this",
    "If you want to",
    "In order to",
    "Permission is hereby granted",
)
NEW_TOKENS = 96
TRAIN_TO_HELDOUT = "19:1"  # documents; a twentieth is enough for the evaluation
SPLIT = "9,1,0"  # a small corpus needs the tenth to have one sample for validation


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The user's choices; files exist and have absolute paths."""

    corpus: Path | None
    json_key: str
    out: Path
    preset: Path
    train_iters: int | None
    tensor_parallel: int
    vocab_size: int
    vocab_file: Path | None
    merge_file: Path | None


def choose_processes(settings: Settings, gpus: int, cores: int) -> Processes:
    """Raises ValueError, naming flags, if preset and sizes do not fit."""
    return fit_processes(training_config(settings), gpus, cores)


def training_flags(settings: Settings, preset: str) -> list[str]:
    size, steps = str(settings.tensor_parallel), settings.train_iters
    flags = ["--preset", preset, "--tensor-model-parallel-size", size, "--split", SPLIT]
    if steps is None:
        return flags
    # The preset's log interval, and a warm-up in steps, are for its own number of steps.
    own = parse(PretrainGPT2Config, ["--preset", str(settings.preset)], {})
    shortened = {
        "--train-iters": steps,
        "--log-interval": max(1, min(own.logging.log_interval, steps // 2)),
    }
    if own.optimizer.lr_warmup_fraction is None:
        shortened["--lr-warmup-iters"] = min(own.optimizer.lr_warmup_iters, steps // 10)
    return flags + [str(word) for pair in shortened.items() for word in pair]


def training_config(settings: Settings) -> PretrainGPT2Config:
    return parse(PretrainGPT2Config, training_flags(settings, str(settings.preset)), {})


def plan(settings: Settings, processes: Processes, cores: int) -> list[Stage]:
    """The stages from text to report, in order."""
    return [
        *corpus_stages(settings, cores),
        *token_stages(settings, cores),
        pretrain_stage(settings, processes),
        *model_stages(settings, cores),
    ]


def corpus_stages(settings: Settings, cores: int) -> list[Stage]:
    """corpus, clean (with dedup and split)."""
    folder = settings.out / "corpus"
    raw = settings.corpus or folder / "raw.jsonl"
    harvest = Stage(
        name="corpus",
        commands=(
            python("-m", "tools.corpus.harvest", "--output", raw,
                   "--report", folder / "harvest.json"),
        ),
        outputs=(raw, folder / "harvest.json"),
    )  # fmt: skip
    files = find_shards([raw]) if settings.corpus else []
    given = Stage(name="corpus", commands=(), inputs=tuple(files))
    steps = [("clean", raw, []), ("dedup", folder / "clean", []),
             ("split", folder / "dedup", ["--ratio", TRAIN_TO_HELDOUT])]  # fmt: skip
    if (key := settings.json_key) != "text":  # the key that all later steps read
        extract = ["--format", "jsonl", "--key", key, "--source", raw.name]
        steps[:1] = [("extract", raw, extract), ("clean", folder / "extract", [])]
    clean = Stage(
        name="clean",
        commands=tuple(
            on_all(python("-m", f"tools.corpus.{step}", "--input", source,
                          "--output", folder / step, *more), cores)
            for step, source, more in steps
        ),
        outputs=tuple(folder / step for step, _, _ in steps),
    )  # fmt: skip
    return [given if settings.corpus else harvest, clean]


def training_text(settings: Settings) -> Path:
    return settings.out / "corpus" / "split" / "train"


def heldout_text(settings: Settings) -> Path:
    """The folder of the first shard, the only one of a corpus as small as this."""
    return settings.out / "corpus" / "split" / "valid"


def vocabulary_flags(settings: Settings) -> list[str | Path]:
    folder = settings.out / "tokenizer"
    vocabulary = settings.vocab_file or folder / "vocab.json"
    merges = settings.merge_file or folder / "merges.txt"
    return ["--vocab-file", vocabulary, "--merge-file", merges]


def token_stages(settings: Settings, cores: int) -> list[Stage]:
    """tokenizer, preprocess."""
    text, folder = training_text(settings), settings.out / "tokenizer"
    train = Stage(
        name="tokenizer",
        commands=(
            python("tools/train_tokenizer.py", "--input", text,
                   "--vocab-size", str(settings.vocab_size), "--output-dir", folder),
        ),
        outputs=(folder,),
    )  # fmt: skip
    given = (settings.vocab_file, settings.merge_file)
    reuse = Stage(name="tokenizer", commands=(), inputs=tuple(file for file in given if file))
    encode = python(
        "tools/preprocess_data.py", "--input", text, "--json-key", "text",
        "--output-prefix", settings.out / "data" / "train",
        "--tokenizer-type", "GPT2BPETokenizer", *vocabulary_flags(settings),
    )  # fmt: skip
    preprocess = Stage(
        name="preprocess",
        commands=(on_all(encode, cores),),
        # Evaluation needs the tokenizer beside the data; older folders do not have it.
        outputs=(settings.out / "data", tokenizer_folder(str(data_prefix(settings)))),
    )
    return [reuse if settings.vocab_file else train, preprocess]


def data_prefix(settings: Settings) -> Path:
    return settings.out / "data" / "train_text_document"


def pretrain_stage(settings: Settings, processes: Processes) -> Stage:
    """Checks that there is enough text, then trains."""
    metrics, checkpoints = settings.out / "metrics.jsonl", settings.out / "checkpoints"
    world = processes.tensor_parallel * processes.data_parallel
    enough = python(
        "-m", "tools.quickstart.enough",
        "--data-path", data_prefix(settings), "--preset", settings.preset,
    )  # fmt: skip
    pretrain = python(
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world),
        "pretrain_gpt2.py", *training_flags(settings, shown(settings.preset)),
        "--micro-batch-size", str(processes.micro_batch_size),
        "--data-path", data_prefix(settings),
        "--save", checkpoints, "--metrics-file", metrics,
        OMP_NUM_THREADS=str(processes.threads),
    )  # fmt: skip
    return Stage(
        name="pretrain",
        commands=(enough, pretrain),
        inputs=(settings.preset,),
        outputs=(metrics, settings.out / "run.json", checkpoints),
        facts={
            "device": processes.device,
            "tensor_parallel_size": processes.tensor_parallel,
            "data_parallel_size": processes.data_parallel,
        },
    )


def new_tokens(settings: Settings) -> int:
    """NEW_TOKENS, or fewer if the model has no positions for them after the end mark and the
    longest prompt; a token is at least one byte."""
    longest = 1 + max(len(prompt.encode()) for prompt in PROMPTS)
    positions = training_config(settings).model.max_position_embeddings
    return max(1, min(NEW_TOKENS, positions - longest))


def model_stages(settings: Settings, cores: int) -> list[Stage]:
    """evaluate, sample, report."""
    out = settings.out
    model = ["--load", out / "checkpoints"]
    environ = {"OMP_NUM_THREADS": str(cores)}
    evaluate = python(
        "tasks/main.py", "--task", "HELDOUT", *model, "--input", heldout_text(settings),
        "--train-data", data_prefix(settings), "--output", out / "evaluation.json", **environ,
    )  # fmt: skip
    sample = python(
        "tools/generate.py", *model, "--prompt", *PROMPTS,
        "--max-new-tokens", str(new_tokens(settings)),
        "--temperature", "0.8", "--top-k", "50", "--seed", "1234",
        "--output", out / "samples.json", **environ,
    )  # fmt: skip
    page = (out / "report.json", out / "report.html")
    report = python("-m", "tools.quickstart.report", "--out", out)
    return [
        Stage(name="evaluate", commands=(evaluate,), outputs=(out / "evaluation.json",)),
        Stage(name="sample", commands=(sample,), outputs=(out / "samples.json",)),
        Stage(name="report", commands=(report,), outputs=page),
    ]
