"""Settings that the programs refuse: each row is tried, and then again with the suggested cure."""

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from megatron.config.checks import at_least, fillable, share, writable
from megatron.config.parallel import TrainingParallelConfig
from megatron.config.parse import parse
from megatron.config.pretrain import (
    PretrainBertConfig,
    PretrainConfig,
    PretrainGPT2Config,
    PretrainLlamaConfig,
    PretrainViTConfig,
    epochs_of,
)
from megatron.config.training import PrecisionConfig
from megatron.errors import UsageError
from megatron.optim.schedule import learning_rate
from tests.models.own_kind import OwnConfig
from tests.refusals import by_last_flag, field_of, refusal, refused
from tools.layouts.job import program_of
from tools.plan.__main__ import QuestionConfig

SMALL = ["--num-layers=2", "--hidden-size=8", "--num-attention-heads=4", "--train-iters=300"]
PROGRAMS: dict[str, tuple[type[PretrainConfig], list[str]]] = {
    "gpt2": (PretrainGPT2Config, SMALL),
    "bert": (PretrainBertConfig, SMALL),
    "llama": (PretrainLlamaConfig, [*SMALL, "--seq-length=64"]),
    "plan": (program_of((), question=QuestionConfig), [*SMALL, "--gpus=8"]),
}
EACH = "--num-layers-per-virtual-pipeline-stage"
VIRTUAL = "--num-virtual-stages-per-pipeline-rank"
HEAD, TAIL = "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"
CONTEXT, RING = "--context-parallel-size", "--cp-comm-type p2p"
TENSOR, STAGES = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
GRID, DEPTH = "--tensor-parallel-mode", "--tensor-parallel-depth"
SQUARE = f"{GRID} 2d --tensor-model-parallel-size 4"
CUBE = f"{GRID} 3d --tensor-model-parallel-size 8"

# The last flag of each row is refused, with what else is given.
LAST = """
--num-layers 0 | --num-attention-heads 0 | --vocab-size 0 | --make-vocab-size-divisible-by 0
--seq-length 0 | --train-iters 0 | --micro-batch-size 0 | --eval-interval 0 | --log-interval 0
--tensor-model-parallel-size -1 | --global-batch-size -1 | --exit-interval -1 | --clip-grad -1
--lr-decay-iters -1 | --lr-warmup-iters -1 | --seed -1 | --eval-iters -1
--check-replicas-interval -1 | --layernorm-epsilon 0 | --layernorm-epsilon inf
--init-method-std 0 | --init-method-std nan | --lr 0 | --lr inf | --adam-eps 0
--distributed-timeout-minutes 0 | --exit-duration-in-mins 0 | --min-lr -1e-5
--weight-decay -0.1 | --clip-grad nan | --attention-dropout 1 | --attention-dropout -0.1
--hidden-dropout 1 | --adam-beta1 1 | --adam-beta2 -0.1 | --lr 1e-4 --min-lr 1e-3
--num-attention-heads 3 | --hidden-size 256 --num-attention-heads 300
--loss-scale 0 | --no-bf16 --hysteresis 0 | --fp16 --loss-scale 0
--fp16 --initial-loss-scale 0 | --fp16 --initial-loss-scale 2** | --fp16 --initial-loss-scale 3**4
--fp16 --initial-loss-scale 2**9999 | --fp16 --initial-loss-scale 2^16
--fp16 --initial-loss-scale nan | --fp16 --initial-loss-scale inf
--fp16 --initial-loss-scale large | --fp16 --initial-loss-scale 2**3 --min-loss-scale 16
--fp16 --initial-loss-scale 2**20 --min-loss-scale 2000000 | --min-loss-scale 100000
--fp16 --loss-scale 128 --min-loss-scale 1e5 | --bf16 --loss-scale 8 | --bf16 --min-loss-scale 1e5
--fp16 --loss-scale 8 --hysteresis 1 | --fp16 --loss-scale 8 --loss-scale-window 9
--fp16 --max-consecutive-skips 0 | --lr-warmup-iters 400 | --num-workers 0
--data-path x --mock-data | --vocab-file x --merge-file y --mock-data | --no-shuffle --mock-data
--split 1,1,0 --mock-data | --tokenizer-type x --mock-data
--num-layer 3 | --batch-size 4 | --n-layer 3 | --lr-decay-style cos
--override-data | --save a --override-data | --split x | --split= | --split 1,2
--split nan,1,0 | --split 1,-1,0 | --split 0,0,0 | --split 1/0,1,1
--save a --save-interval 0 | --save-interval -5 | --async-save | --keep-checkpoints 1
--save a --load a --memory-checkpoint-interval 0 | --load a --memory-checkpoint-interval 0
--save a --memory-checkpoint-interval 5
--save a --keep-checkpoints 1 | --finetune | --attention-dropout-rng kernal
--no-compile --attention-dropout-rng coordinates-flex
--layernorm-impl apex | --optimizer-impl apex | --preset gpt2_365m | --preset
--pipeline-model-parallel-size 0 | --pipeline-schedule 1F1B | --pipeline-schedule interleaved
--pipeline-partition even | --num-virtual-stages-per-pipeline-rank 0
--num-layers-per-virtual-pipeline-stage 1 | --num-virtual-stages-per-pipeline-rank 2
--decoder-first-pipeline-num-layers 0 | --decoder-last-pipeline-num-layers 1
--pipeline-model-parallel-size 2
--pipeline-schedule gpipe | --pipeline-schedule zb-h1
--lr-warmup-init -1 | --lr-warmup-iters 9 --lr-warmup-init -1 | --lr-wsd-decay-iters 0
--lr-warmup-fraction 0 | --lr-warmup-fraction 1.5 | --lr-warmup-iters 9 --lr-warmup-fraction 0.1
--lr-warmup-iters 9 --lr-warmup-init 1 | --fp16 --pure-bf16 | --no-bf16 --pure-bf16
--pure-bf16 --loss-scale 8 | --pure-bf16 --optimizer-impl apex
--optimizer-cpu-offload --optimizer-impl apex | --optimizer-cpu-offload --optimizer-impl compiled
--bf16 true | --deterministic=False | --metrics-file / | --metrics-file= | --save= | --vocab-file=
"""
# The same, of one kind of model.
LAST_OF_GPT2 = """
--begin-token [BOT] | --end-token [EOT] | --json-key body | --too-long refuse | --cache-tokens
--dataset-name x | --dataset-split test | --pad --dataset-name x --data-path y | --pad --mock-data
--eod-mask-loss --mock-data | --pad --eod-mask-loss | --pad --reset-position-ids
--pad --reset-attention-mask | --pad --too-long split
--pad --dataset-name x --dataset logging.config:dictConfig
--sample-interval 0 | --sample-prompts a.txt | --sample-interval 2 --sample-prompts nowhere.txt
--profile-step-start 0 | --profile-step-end 0 | --profile-step-end 2 --profile-step-start 1
--save s --profile-step-end 2 --profile-step-start 3
--save s --profile-step-end 401 --profile-step-start 400
"""
LAST_OF_LLAMA = """
--num-query-groups 3 | --num-query-groups 0 | --rotary-base 0 | --layernorm-impl apex
--hidden-size 20 --num-attention-heads 4 | --rope-scaling 0.5 1 4 8192 | --rope-scaling 8 4 4 8192
--rope-scaling 8 1 4 0 | --rope-scaling inf 1 4 8192
"""
LAST_OF_BERT = """
--max-ngram-size 0 | --mask-prob 0 | --mask-prob nan | --mask-prob 1.5
--short-seq-prob 1 | --short-seq-prob 0.2 --mock-data
"""
# The same, by the number of processes.
LAST_AT = {
    2: f"""{DEPTH} 2 | {DEPTH} 0 | --zero-stage 4 | --tp 2
--zero-stage 2 --use-distributed-optimizer | --sequence-parallel --seq-length 255 {TENSOR} 2
{CONTEXT} 0 | {CONTEXT} 3 | {RING} | {CONTEXT} 1 {RING} | {CONTEXT} 2 --cp-comm-type ring
{CONTEXT} 2 {RING} --recompute-granularity selective
{CONTEXT} 2 {RING} --attention-dropout-rng kernel
{CONTEXT} 2 {RING} --attention-dropout-rng coordinates-flex
{TENSOR} 2 --optimizer muon | --zero-stage 1 --optimizer adafactor
{TENSOR} 1000000000000 | {CONTEXT} 1000000000000 | {STAGES} 1000000000000""",  # at once
    3: f"{TENSOR} 3",
    4: f"""--ffn-hidden-size 6 {TENSOR} 4 | --micro-batch-size 3 --global-batch-size 8 | {GRID} 4d
{SQUARE} --hidden-size 12 --num-attention-heads 1 | {SQUARE} --ffn-hidden-size 7
{SQUARE} --hidden-size 12 --num-attention-heads 3 | {SQUARE} --sequence-parallel
{SQUARE} --micro-batch-size 3 --global-batch-size 8 | {SQUARE} --layernorm-impl apex""",
    6: f"{TENSOR} 4 | {GRID} 2d {TENSOR} 4 | {CONTEXT} 4 | {TENSOR} 2 {CONTEXT} 2",
    8: f"""{GRID} 2d {TENSOR} 8 | {GRID} 3d {TENSOR} 4 | {GRID} 2d {TENSOR} 4 {DEPTH} 2
{CUBE} --hidden-size 20 --num-attention-heads 5 | {CUBE} --ffn-hidden-size 6""",
}
Row = tuple[str, int, str]


def rows_of(table: str, processes: int = 1) -> list[Row]:
    return [(row, processes, flag) for row, flag in by_last_flag(table)]


# Arguments, number of processes, and the flag that is refused; the error says what works.
REFUSED = [
    *rows_of(LAST),
    *(row for processes, table in LAST_AT.items() for row in rows_of(table, processes)),
    ("--fp16 --bf16", 1, "--fp16"),
    ("--model-parallel-size 2", 1, TENSOR),
    (f"{GRID} 2.5d {TENSOR} 4 {DEPTH} 2", 8, TENSOR),
    (f"{CONTEXT} 2 --seq-length 255", 2, "--seq-length"),
    (f"{CONTEXT} 2 {RING} --seq-length 254", 2, "--seq-length"),
    (f"{CONTEXT} 2 {TENSOR} 2 --sequence-parallel --seq-length 254", 4, "--seq-length"),
    (f"{SQUARE} {CONTEXT} 2", 8, CONTEXT),
    (f"{CONTEXT} 8", 8, CONTEXT),  # of 4 heads
    (f"{CONTEXT} 4 {TENSOR} 2", 8, CONTEXT),
    ("--seq-length 65 --max-position-embeddings 64", 1, "--seq-length"),
    ("--lr-warmup-iters 4 --lr-decay-iters 2", 1, "--lr-warmup-iters"),
    ("--learning-rate=1e-3", 1, "--learning-rate"),
    ("--warmup_steps 3", 1, "--warmup-steps"),
    ("--preset=", 1, "--preset"),
    ("--preset --lr=1", 1, "--preset"),
]
OF_KINDS: dict[str, list[Row]] = {
    "gpt2": [
        *rows_of(LAST_OF_GPT2),
        ("--text-column body", 1, "--json-key"),
        (f"{CUBE} --hidden-size 6 --num-attention-heads 2", 8, "--hidden-size"),
    ],
    "bert": rows_of(LAST_OF_BERT),
    "llama": rows_of(LAST_OF_LLAMA),
}
# By stages, and layers of the model: what as many processes refuse, by the last flag.
SCHEDULE = "--pipeline-schedule"
LAST_OF_STAGES = {
    (2, 12): f"""{EACH} 4 | {EACH} 12 | {EACH} 6 | {EACH} 3 {VIRTUAL} 2 | {VIRTUAL} 2 {HEAD} 1
{EACH} 2 {TAIL} 1 | --pipeline-partition uniform {TAIL} 1 | {HEAD} 12 | {HEAD} 5 {TAIL} 6
{HEAD} 5 {TAIL} 8 | {SCHEDULE} interleaved | {VIRTUAL} 1 {SCHEDULE} interleaved
{VIRTUAL} 3 {SCHEDULE} gpipe | {VIRTUAL} 3 {SCHEDULE} 1f1b | {VIRTUAL} 3 {SCHEDULE} zb-h1
{VIRTUAL} 3 {SCHEDULE} no/file.json | --recompute-granularity full {SCHEDULE} zb-h1""",
    (2, 11): f"{EACH} 1",
    (2, 5): f"{VIRTUAL} 3 | {VIRTUAL} 2 --pipeline-partition uniform",
    (4, 6): f"{EACH} 1",
    (4, 12): f"{HEAD} 5 {TAIL} 6 | {TAIL} 10 | {HEAD} 0",
    (12, 12): f"{EACH} 1",
}
PIPELINES = [
    *(
        (*sizes, *row)
        for sizes, table in LAST_OF_STAGES.items()
        for row in rows_of(table, sizes[0])
    ),
    (2, 12, f"{TENSOR} 2", 2, "--pipeline-model-parallel-size"),
    (2, 12, f"{TENSOR} 4", 4, "--pipeline-model-parallel-size"),
    (2, 12, f"{TENSOR} 4", 6, TENSOR),
    (8, 6, "", 8, "--pipeline-model-parallel-size"),
    (7, 6, "", 7, "--pipeline-model-parallel-size"),
    (2, 12, "--zero-stage 2", 4, "--zero-stage"),
    (2, 12, "--zero-stage 3", 4, "--zero-stage"),
]
# Refused, by the first word, without one value that would do.
NO_CURE = ["--hidden-size 0", "--max-position-embeddings -1", "--seq-length x", "--lr 1e", "extra"]
NO_CURE += ["--seq-length --lr 1"]


def settings(**changes: Any) -> PretrainGPT2Config:
    """A small run, with each change put into the config that has such a field."""
    small = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "train_iters": 3}
    given = small | changes
    configs = {}
    for each in fields(PretrainGPT2Config):
        known = given.keys() & each.type.__dataclass_fields__
        configs[each.name] = each.type(**{name: given[name] for name in known})
    return PretrainGPT2Config(**configs)


def accept(program: str, arguments: Sequence[str], world_size: int) -> PretrainConfig:
    kind, needed = PROGRAMS[program]
    config = parse(kind, [*needed, "--max-position-embeddings=1024", *arguments], {})
    config.check(world_size)
    return config


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_refused_and_what_works_instead_is_accepted(number: int) -> None:
    """Each parser has every third row, as all have the same configs, and the rows of its kind."""
    program = list(PROGRAMS)[number]
    rows = REFUSED[number :: len(PROGRAMS)] + OF_KINDS.get(program, [])
    for text, world_size, flag in rows:
        assert refused(lambda words, n=world_size: accept(program, words, n), text) == flag, text


def error_of(text: str, processes: int = 1) -> Any:
    return refusal(lambda: accept("gpt2", text.split(), processes), kind=UsageError)


def test_what_works_is_near_what_was_given() -> None:
    for text, processes, works in (
        ("--lr-warmup-iters 400", 1, "--lr-warmup-fraction 0.1"),
        (f"{SCHEDULE} gpipe", 1, f"{SCHEDULE} 1f1b"),
        (f"{STAGES} 2 {VIRTUAL} 2 --num-layers 4 {SCHEDULE} gpipe", 2, f"{SCHEDULE} interleaved"),
        (f"{STAGES} 2 --num-layers 12 {EACH} 4", 2, f"{EACH} 3"),
        (f"{SQUARE} --ffn-hidden-size 7", 4, "--ffn-hidden-size 8"),
        ("--num-attention-heads 3", 1, "--num-attention-heads 4"),  # and not 2
        ("--seq-length 2000", 1, "--seq-length 1024"),
        (f"{CONTEXT} 2 {RING} --seq-length 254", 2, "--seq-length 256"),
    ):
        assert " ".join(error_of(text, processes).works) == works


def test_the_fewest_images_that_ranks_can_divide_work() -> None:
    """Each image has 10 tokens, the class token included."""
    words = [*SMALL, "--image-size=48", "--patch-size=16", f"{TENSOR}=4", "--sequence-parallel"]
    config = parse(PretrainViTConfig, words, {})
    error: Any = refusal(lambda: config.check(4), kind=UsageError)
    assert " ".join(error.works) == "--micro-batch-size 2"


@pytest.mark.parametrize("row", PIPELINES, ids=str)
def test_pipelines_that_cannot_be(row: tuple[int, int, str, int, str]) -> None:
    stages, layers, text, processes, flag = row
    words = [f"--num-layers={layers}", f"--pipeline-model-parallel-size={stages}", *text.split()]
    assert refused(lambda words: accept("gpt2", words, processes), words) == flag


def test_no_stages_are_suggested_that_another_flag_forbids() -> None:
    for text in (f"{VIRTUAL} 2", f"{EACH} 1", f"{TAIL} 1"):
        error = error_of(f"{STAGES} 2 {text}")
        assert (error.flag, error.works) == (STAGES, ())


@pytest.mark.parametrize(("stages", "text", "virtual"), [
    (1, f"{VIRTUAL} 1", 1), (1, "--pipeline-schedule 1f1b", 1), (2, "", 1), (4, f"{EACH} 1", 3),
    (2, f"{EACH} 2 --pipeline-schedule interleaved", 3), (2, f"{VIRTUAL} 1", 1),
    (2, f"{VIRTUAL} 5", 5),
    (3, f"{VIRTUAL} 4 --pipeline-partition uniform", 4), (2, f"{HEAD} 5 {TAIL} 7", 1),
    (4, f"{HEAD} 9", 1), (4, f"{HEAD} 5 {TAIL} 5", 1), (12, f"{TAIL} 1", 1),
    (2, "--pipeline-schedule zb-h1 --recompute-granularity selective", 1),
])  # fmt: skip
def test_pipelines(stages: int, text: str, virtual: int) -> None:
    words = ["--num-layers=12", f"--pipeline-model-parallel-size={stages}", *text.split()]
    config = accept("gpt2", [*words, "--tensor-model-parallel-size=2"], 4 * stages)
    assert config.parallel.virtual_stages(12) == virtual
    assert config.parallel.sizes == {"pipeline": stages, "context": 1, "tensor": 2}
    assert config.data_parallel_size(4 * stages) == 2


@pytest.mark.parametrize("text", NO_CURE)
def test_refused(text: str) -> None:
    words = text.split()
    assert field_of(refusal(lambda: accept("gpt2", words, 1))).startswith(words[0])


def test_what_is_missing_is_named() -> None:
    error = refusal(lambda: parse(PretrainGPT2Config, ["--num-layers", "2"], {}))
    missing = re.findall(r"^ +(--\w[\w-]+) ", str(error), re.MULTILINE)
    assert missing == ["--hidden-size", "--num-attention-heads"]


def test_a_length_is_given_once() -> None:
    kind, (*needed, _) = PROGRAMS["gpt2"]
    for text, flag in (
        ("", "--train-iters"),
        ("--epochs 0", "--epochs"),
        ("--epochs 2 --mock-data", "--epochs"),
        ("--epochs 2 --train-iters 300", "--train-iters"),
    ):
        assert refused(lambda words: parse(kind, [*needed, *words], {}).check(1), text) == flag


def test_epochs_are_whole_global_batches(tmp_path: Path) -> None:
    preset = tmp_path / "long.toml"
    preset.write_text("train_iters = 300\nglobal_batch_size = 4\n")
    words = [*PROGRAMS["gpt2"][1][:-1], "--preset", str(preset)]
    assert parse(PretrainGPT2Config, words, {}).with_steps(int, 1).training.train_iters == 300
    config = parse(PretrainGPT2Config, [*words, "--epochs=3"], {})
    assert config.with_steps((10).__mul__, 2).training.train_iters == 7
    preset.write_text("epochs = 2\n")
    assert parse(PretrainGPT2Config, [*words, "--train-iters=5"], {}).training.epochs is None
    for steps, samples, expected in ((5, 10, 10), (1, 26, 2), (1, 27, 1), (9, 50, 9)):
        after = config.with_steps((10).__mul__, 2, steps_done=steps, samples_done=samples)
        assert after.training.train_iters == expected
    for samples, changes, flag in ((1, {}, "--epochs"), (10, {"lr_warmup_iters": 8}, "--lr-warm")):
        changed = replace(config, optimizer=replace(config.optimizer, **changes))
        error = refusal(partial(changed.with_steps, samples.__mul__, 1))
        assert field_of(error).startswith(flag)
    assert [epochs_of(samples, (10).__mul__) for samples in (1, 10, 11)] == [1, 1, 2]


def test_a_warmup_may_be_a_share_of_the_steps_until_the_end_of_decay() -> None:
    for words, warmup in (
        ("--lr-warmup-fraction 0.0385", 12),
        ("--lr-warmup-fraction 1", 300),
        ("--lr-warmup-fraction 1e-9", 1),
        ("--lr-warmup-fraction 0.5 --lr-decay-iters 20 --lr-warmup-init 1e-5", 10),
    ):
        config = accept("gpt2", words.split(), 1)
        resolved = config.with_steps(int, 1).optimizer
        assert (resolved.lr_warmup_iters, resolved.lr_warmup_fraction) == (warmup, None)
        end = config.lr_decay_iters()
        for update in (1, 2, warmup, end):
            assert learning_rate(config.optimizer, update, end) == learning_rate(
                resolved, update, end
            )
    epochs = settings(train_iters=None, epochs=3, lr_warmup_fraction=0.1)
    assert epochs.with_steps((100).__mul__, 1).optimizer.lr_warmup_iters == 30


def test_sizes_of_a_run() -> None:
    words = ["--tensor-model-parallel-size", "2", "--micro-batch-size", "3"]
    config = accept("gpt2", [*words, "--global-batch-size", "12"], 4)
    assert (config.data_parallel_size(4), config.global_batch_size(4)) == (2, 12)
    assert accept("gpt2", words, 4).global_batch_size(4) == 6


def test_the_first_loss_scale_is_a_decimal_or_a_power_of_two() -> None:
    for text, scale in (("2**16", 65536.0), ("2**-3", 0.125), ("4096", 4096.0), ("0.5", 0.5)):
        config = PrecisionConfig(fp16=True, initial_loss_scale=text, min_loss_scale=0.1)
        assert config.first_scale() == scale


@pytest.mark.parametrize(("words", "device", "count"), [
    ("--optimizer-cpu-offload", "cpu", 1), ("--cpu-offload-activations", "cpu", 1),
    ("--optimizer-cpu-offload --cpu-offload-activations --attention-dropout 0", "cuda", 0),
    ("--fp16", "cpu", 1), ("--bf16", "cpu", 0), ("--save b", "cpu", 0),
    ("--fp16", "cuda", 1), ("--attention-dropout-rng kernel", "cpu", 1),
    ("--fp16 --attention-dropout 0", "cuda", 0), ("--attention-dropout-rng coordinates", "cuda", 0),
    ("--attention-dropout-rng coordinates-flex", "cpu", 1),
    ("--attention-dropout-rng coordinates-flex", "cuda", 0),
])  # fmt: skip
def test_warnings_of_settings(words: str, device: str, count: int) -> None:
    config = accept("gpt2", ["--save", "a", "--save-interval", "5", *words.split()], 1)
    assert len(config.warnings(device)) == count


def test_a_ring_warns_of_dropout() -> None:
    """Its kernels draw no dropout, on a GPU either."""
    for device, more in product(("cpu", "cuda"), ("", " --attention-dropout 0")):
        words = f"--save a --save-interval 5 {CONTEXT} 2 {RING}{more}".split()
        assert len(accept("gpt2", words, 2).warnings(device)) == (not more)


@pytest.mark.parametrize("train_iters", [2, 5, 260, 1_000_000])
def test_an_interval_is_suggested_that_the_run_reaches(train_iters: int) -> None:
    (line,) = settings(save="s", train_iters=train_iters).warnings("cpu")
    assert 0 < int(line.split("--save-interval ")[1].split()[0]) < train_iters
    assert len(settings(train_iters=train_iters).warnings("cpu")) == 1


@dataclass
class Own:
    """A config of some tool."""

    output: Path | None = None
    rate: float | None = 0.5
    workers: int | None = 1


def test_checks_of_other_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    wrong = ("", ".json"), ("no/x.json", ".json"), ("no/x.txt", ".png"), ("new.txt", ".png")
    for path, ending in wrong:
        own = Own(output=tmp_path / path)
        name, works = refusal(partial(writable, own, "output", ending), field="--output").works
        assert name == "--output"
        writable(Own(output=tmp_path / works), "output", ending)
    writable(Own(), "output")
    for path in (Path("/dev/null"), tmp_path / "file" / "below"):  # which a file would replace
        refusal(partial(writable, Own(output=path), "output"), field="--output")
    fillable("--output", tmp_path / "new" / "below")
    (tmp_path / "dangling").symlink_to(tmp_path / "none")
    for name in ("file", "file/below", "dangling"):
        refusal(partial(fillable, "--output", tmp_path / name), field="--output")
    monkeypatch.setattr("os.access", lambda path, mode: False)  # as where the disk is read-only
    refusal(partial(writable, Own(output=tmp_path / "x"), "output"), field="--output")
    refusal(partial(fillable, "--output", tmp_path), field="--output")
    for own, check in (
        (Own(rate=1.5), lambda own: share(own, "rate")),
        (Own(workers=0), lambda own: at_least(own, workers=1)),
    ):
        flag, works = refusal(partial(check, own), kind=UsageError).works
        check(Own(**{flag.removeprefix("--"): float(works)}))
    share(Own(rate=None), "rate")
    at_least(Own(workers=None), workers=1)


@pytest.mark.parametrize(("mode", "depth"), [("2d", 1), ("2.5d", 2), ("3d", 1)])
def test_a_grid_of_side_1_is_a_warning(mode: Any, depth: int) -> None:
    fields = {"tensor_parallel_mode": mode, "tensor_parallel_depth": depth}
    alone = TrainingParallelConfig(tensor_model_parallel_size=depth, **fields)
    with pytest.warns(UserWarning, match=f"{GRID} {mode}"):
        alone.check(2)


def test_a_sequence_that_nothing_shares_out_is_a_warning() -> None:
    alone = TrainingParallelConfig(sequence_parallel=True)
    assert not alone.cuts_stream
    with pytest.warns(UserWarning, match="--sequence-parallel"):
        alone.check(1)
    both = TrainingParallelConfig(sequence_parallel=True, tensor_model_parallel_size=2)
    assert both.cuts_stream
    both.check(2, seq_length=8)


@pytest.mark.parametrize(
    ("field", "value"), [("zero_stage", 3), ("use_distributed_optimizer", True)]
)
def test_zero_of_one_model_is_a_warning(field: str, value: Any) -> None:
    cut = TrainingParallelConfig(tensor_model_parallel_size=2, **{field: value})
    with pytest.warns(UserWarning, match=f"--{field.replace('_', '-')}"):
        cut.check(2)
    around = TrainingParallelConfig(context_parallel_size=2, **{field: value})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut.check(4)
        around.check(2)


def test_a_kind_that_says_nothing_of_context_takes_none() -> None:
    parallel = TrainingParallelConfig(context_parallel_size=2)
    assert field_of(refusal(lambda: parallel.check_kind(OwnConfig))) == CONTEXT
