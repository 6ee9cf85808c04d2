"""Each question once, in miniature: all contenders have figures, those that train have the same
losses (the harness compares them), and the figures are those of the formulas."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
import torch

from benchmarks import (
    activations,
    commits,
    context,
    output_layer,
    peers,
    pipeline,
    scaling,
    steps,
    tensor_modes,
    train_step,
    useful_time,
    zero,
)
from benchmarks.harness import Flags, Rank
from benchmarks.report import Results, rows
from megatron.parallel.layers import VocabParallelHead
from tests.benchmarks.run import ROOT, as_a_rank, figures, run
from tests.programs import start_ranks
from tests.refusals import field_of, refusal

PRESET = """
num_layers = 2
hidden_size = 128
num_attention_heads = 4
seq_length = 64
max_position_embeddings = 64
vocab_size = 512
micro_batch_size = 2
global_batch_size = 2
train_iters = 10
"""
OURS = "this project"
MEGATRON_CORE = ("Megatron-Core",) if find_spec("megatron.core") else ()
ALONE = f"env RANK=0 WORLD_SIZE=1 MASTER_ADDR=localhost MASTER_PORT=0 {sys.executable}"
PLAIN_DDP = f"{useful_time.COMMANDS[useful_time.PEER]} --num-layers 1 --hidden-size 32 "
PLAIN_DDP += "--seq-length 16 --vocab-size 64"
Record = dict[str, Any]


def of_checkpoints(record: Record, folder: Path) -> None:
    h, layers = 128, 2
    parameters = layers * (12 * h**2 + 13 * h) + 2 * h + (512 + 64) * h
    for contender in record["contenders"]:
        (found,) = contender["rounds"]
        # Weights and two moments of fp32, and the header with their names.
        assert found["bytes"] == pytest.approx(12 * parameters, rel=1e-2)
        assert ("on_disk" in found) == ("save" in contender["name"])
    assert list((folder / "disk").iterdir()) == []  # everything is removed


def of_safeguards(record: Record, folder: Path) -> None:
    """A check hashes what ranks hold in common."""
    whole, common = (figures(record, "check", each) for each in ("t = 1, d = 2", "t = 2, d = 1"))
    h, layers, width = 256, 4, 14  # bytes of weight, master and moments
    weights = (4096 + 256) * h + layers * 12 * h**2
    assert whole["hashed"] == width * (weights + layers * 13 * h + 2 * h)
    # Positions, norms and the biases of row layers.
    assert common["hashed"] == width * (256 * h + layers * (4 + 2) * h + 2 * h)


def of_output_layer(record: Record, folder: Path) -> None:
    names = "logits in chunks", "all logits at once"
    chunked, at_once = (figures(record, name, "fp32, t = 1") for name in names)
    logits = 5_000 * 16_000 * 4  # bytes
    assert at_once["peak_bytes"] - at_once["held"] > logits
    assert chunked["peak_bytes"] - chunked["held"] < logits / 1.5
    assert chunked["held"] == 16_000 * 16 * (4 + 4) + 2 * 5_000 * 16 * 4


def of_compiled(record: Record, folder: Path) -> None:
    h, group = 64, "a block of gpt2"
    own, its = (figures(record, name, group) for name in (OURS, "plain torch"))
    assert own["copied"] == its["copied"] == 16 * 3 * h * 2  # gradients of q, k and v, together
    assert figures(record, OURS, "12 layers, the host")["steps"] == 2


def of_activations(record: Record, folder: Path) -> None:
    names = "selective", "selective, sequence parallel"
    whole = figures(record, names[0], "t = 1")
    cut, stream = (figures(record, name, "t = 4") for name in names)
    assert (whole["sent"], whole["formula"], stream["formula"]) == (0, 34, 34 / 4)
    assert stream["kept"] == pytest.approx(whole["kept"] / 4, rel=0.01)
    assert stream["kept"] < cut["kept"] < whole["kept"]
    # Four all-reduces in bf16; or reduce-scatters and all-gathers, with one more of each.
    assert cut["sent"] == 4 * 2 * 2 * 3 / 4
    assert stream["sent"] > 5 / 4 * cut["sent"]


def of_train_step(record: Record, folder: Path) -> None:
    group = "quickstart, fp32, t = 2"
    assert "tokens" in figures(record, OURS, group)
    assert "tokens" not in figures(record, "floor", group)
    assert "aten::mm" in (folder / "profile/quickstart_fp32_t_=_2_this_project.txt").read_text()
    row = next(each for each in rows(record) if each["contender"] == OURS)
    assert row["tokens_per_s"] == figures(record, OURS, group)["tokens"] / row["seconds"]
    assert row["peak_gib"] > 0
    assert {"matmul", "elementwise", "optimizer", "norm", "idle"} <= {*row["device_ms"]}
    assert row["device_ms"]["matmul"] > 0


def of_scaling(record: Record, folder: Path) -> None:
    """The share of linear counts tensor-parallel ranks, and no copies."""
    one, large, copies = record["contenders"]
    first, second = (each["rounds"][0] for each in (one, large))
    assert first["tokens"] == 8 * 128
    assert {*second} & {"tensor", "data"} == {"tensor"}
    assert copies["reason"] == "takes 4 ranks, there are 2"
    work = large["facts"]["parameters"] / 2
    assert large["facts"][scaling.LINEAR] == copies["facts"][scaling.LINEAR] == work
    share = Results(scaling.QUESTION, record).median("", large["name"], scaling.LINEAR)
    seconds = (median(each["wall"]) for each in (first, second))
    assert share == pytest.approx(work / one["facts"]["parameters"] * truediv(*seconds))


def of_axes(record: Record, folder: Path) -> None:
    """A rank sends as many bytes as were planned."""
    for each in record["contenders"]:
        (found,), facts = each["rounds"], each["facts"]
        assert found["tokens"] == facts["ranks"] * 8 * 32
        assert found["sent"] == facts["planned"]
        assert (found["sent"] > 0) == (facts["ranks"] > 1)
        assert facts["planned_seconds"] > 0


def of_sizes(record: Record, folder: Path) -> None:
    one, two = (each["facts"] for each in record["contenders"])
    tokens = 2 * 32
    layer = 3 * 2 * tokens * (12 * 64**2 + 32 * 64)  # half of the scores, which are causal
    assert two["work"] - one["work"] == layer
    assert all(f"| {title} |" in record["page"] for title in (scaling.TIME, scaling.MEMORY))


def of_pipeline(record: Record, folder: Path) -> None:
    """The micro-batches whose bytes are kept are those that the schedule promises."""
    bubbles = [each for each in record["contenders"] if each["x"]]
    assert len(bubbles) == 2
    for each in bubbles:
        (found,), facts = each["rounds"], each["facts"]
        promised = [5, 5] if "gpipe" in each["group"] else [2, 1]
        assert [facts["in_flight_0"], facts["in_flight_1"]] == promised
        assert [found["kept_0"], found["kept_1"]] == pytest.approx(promised, rel=0.01)


def of_tensor_modes(record: Record, folder: Path) -> None:
    # Two sums; or of each layer 6 gathers and sums, which SUMMA takes in two steps.
    calls = {tensor_modes.ONE: 2, tensor_modes.SUMMA: 24, tensor_modes.GATHERED: 12}
    for each in record["contenders"]:
        (found,) = each["rounds"]
        dtype = each["group"].partition(",")[0]
        assert found["difference"] < tensor_modes.TOLERANCES[dtype]
        assert found["sent"] == each["facts"]["formula"]
        assert found["calls"] == calls[each["name"]]


def of_context(record: Record, folder: Path) -> None:
    """A rank of two sends half of q, k, v and the result each way; or k and v, again in the
    backward, and twice their gradients: gathered or over the ring, in fp32 here."""
    stream, layers = 128 * 256 * 4, 4  # bytes of the hidden states of a sample
    names = (context.ALONE, context.A2A, context.P2P, context.GATHERED)
    alone, a2a, p2p, gathered = (figures(record, name, context.STEP) for name in names)
    assert alone["sent"] == 0
    assert p2p["sent"] - a2a["sent"] == layers * (8 - 4) * stream / 2
    assert p2p["sent"] - gathered["sent"] == layers * (8 - 6) * stream / 2
    for each in (a2a, p2p, gathered):
        assert each["kept"] < 0.6 * alone["kept"]
    group = "the busiest of 4 ranks"
    plain, zigzag = (figures(record, name, group) for name in (context.PLAIN, context.ZIGZAG))
    assert 0.5 < zigzag["scores"] / plain["scores"] < 0.6


def of_simulated(record: Record, folder: Path) -> None:
    names = [each["name"] for each in record["contenders"]]
    assert names == [context.ALONE, "a2a, 2 ranks", "p2p, 2 ranks", "p2p, 4 ranks"]


def of_useful_time(record: Record, folder: Path) -> None:
    """No fault comes: both runs of plain torch end, and their checkpoints have the same weights."""
    found = figures(record, useful_time.PEER, "a rank killed")
    assert (found["equal"], found["faults"], found["unnamed"]) == (100, 0, 0)
    assert 0 < found["useful"] < 100


def of_planned(record: Record, folder: Path) -> None:
    """Predictions are there before anything runs, and the page has the errors of them all."""
    written = json.loads((folder / "record.json.predicted").read_text())
    facts = [each["facts"]["predicted"] for each in record["contenders"]]
    assert [each["predicted"] for each in written] == facts
    assert all(each["is_measured"] for each in written)
    assert "Mean error of 2 predicted steps" in record["page"]


class Small(NamedTuple):
    """A question, with --small if it has a miniature: further words, the contenders to run (all by
    default), and what is known of their figures."""

    words: str = ""
    contenders: tuple[str, ...] = ()
    check: Callable[[Record, Path], None] | None = None
    warm_up: int | None = None  # turns; by default the question's own number
    patches: Record | None = None  # names of the question's module


QUESTIONS = {  # the file's name, and after a blank the case
    "checkpoints": Small(
        "--preset {preset} --directory {folder}/disk",
        ("synchronous save", "asynchronous save", "verify and load"),
        of_checkpoints,
        warm_up=0,
    ),
    "safeguards": Small("", ("check",), of_safeguards, warm_up=0),
    "output_layer": Small(
        "--vocab-size 16000 --hidden-size 16 --tokens 5000 --tensor-model-parallel-size 1",
        check=of_output_layer,
        warm_up=0,
    ),
    "compiled": Small("", (OURS, "plain torch"), of_compiled, warm_up=0),
    "activations": Small(
        "--tensor-model-parallel-size 1 4",
        ("selective", "selective, sequence parallel", "host reads"),
        of_activations,
    ),
    "train_step": Small(
        "--presets quickstart --dtypes fp32 --tensor-model-parallel-size 2 "
        "--profile {folder}/profile",
        (OURS, "DTensor", *MEGATRON_CORE, "floor"),
        of_train_step,
        warm_up=2,
    ),
    "train_step with offload": Small(
        "", ("this project, not compiled", "this project, optimizer and activations on the host")
    ),
    "commits": Small(f"--against {ROOT} --groups 'quickstart, fp32, t = 1'", warm_up=0),
    "scaling": Small(
        "",
        (
            "1.2B, 8 heads, t x d = 1 x 1",
            "2.5B, 10 heads, t x d = 2 x 1",
            "2.5B, 10 heads, t x d = 2 x 2",
        ),
        of_scaling,
        warm_up=0,
        patches={
            "MODELS": scaling.MODELS[:2],
            "STRONG": {},
            "HEADS": {},
            "PRECISIONS": dict.fromkeys(scaling.PRECISIONS, "--no-bf16 --num-layers 2"),
        },
    ),
    "scaling of axes": Small(
        "--axes zero-3 interleaved --hardware cpu",
        ("one rank", "zero-3, 2 ranks", "interleaved, 2 ranks"),
        of_axes,
        warm_up=0,
    ),
    "scaling of sizes": Small(
        "--axes layers",
        check=of_sizes,
        warm_up=0,
        patches={
            "ORIGINAL": "--preset quickstart --no-bf16",
            "SIZES": {"layers": ("--num-layers {n}", (1, 2))},
        },
    ),
    "planned": Small(
        check=of_planned,
        warm_up=1,
        patches={"MEASURED": {1: "--micro-batches 2 --recomputations none full"}},
    ),
    "pipeline": Small(check=of_pipeline),
    "tensor_modes": Small(check=of_tensor_modes, warm_up=0),
    "context": Small(check=of_context, warm_up=0),
    "context simulated": Small("--simulated 2 4 --dtype fp32", check=of_simulated),
    "zero": Small("--stages 1 3", (zero.OURS, zero.REDUNDANCY, zero.FULLY_SHARD)),
    "models": Small("--models llama_tutorial llama vit_small"),
    "generation": Small(warm_up=0),
    "useful_time without a fault": Small(  # 1e6 s are too late; one process needs no launcher
        "--faults 'a rank killed' --seconds 1e6 --steps 2 --interval 1",
        (useful_time.PEER,),
        of_useful_time,
        patches={"TORCHRUN": ALONE, "COMMANDS": dict.fromkeys(useful_time.COMMANDS, PLAIN_DDP)},
    ),
}


@pytest.mark.parametrize("case", QUESTIONS)
def test_question(case: str, tmp_path: Path) -> None:
    small = QUESTIONS[case]
    preset = tmp_path / "preset.toml"
    preset.write_text(PRESET)
    words = shlex.split(small.words.format(folder=tmp_path, preset=preset))
    if small.contenders:
        words += ["--contenders", *small.contenders]
    changes: dict[str, Any] = {} if small.warm_up is None else {"warm_up": small.warm_up}
    question = case.partition(" ")[0]
    if case != "scaling" and import_module(f"benchmarks.{question}").QUESTION.small is not None:
        words.append("--small")
    patches = patch.multiple(f"benchmarks.{question}", **small.patches) if small.patches else None
    with patches or nullcontext():
        record = run(tmp_path, question, *words, **changes)
    measured = [each for each in record["contenders"] if not each["reason"]]
    assert case == "scaling" or measured == record["contenders"]
    assert {each["name"] for each in record["contenders"]} >= {*small.contenders}
    assert [len(each["rounds"]) for each in measured] == [1] * len(measured)
    assert record["page"].startswith("# ")
    if small.check is not None:
        small.check(record, tmp_path)


def test_every_question_is_asked() -> None:
    """In a row, or by a test of these files."""
    files = [file.read_text() for file in Path(__file__).parent.glob("test_*.py")]
    asked = {*re.findall(r'(?:\brun\(tmp_path, |as_a_rank, )"(\w+)', "".join(files))}
    asked |= {case.split()[0] for case in QUESTIONS}
    modules = [*(ROOT / "benchmarks").glob("*.py")]
    assert {each.stem for each in modules if "\nQUESTION = " in each.read_text()} <= asked


def test_the_table_marks_questions_with_a_miniature() -> None:
    table = (ROOT / "benchmarks" / "README.md").read_text()
    found = {each.stem: each.read_text() for each in (ROOT / "benchmarks").glob("*.py")}
    small = {name for name, text in found.items() if re.search(r"\n[^#\n]*\bsmall=", text)}
    assert {*re.findall(r"^\| \[(\w+)\]\(\w+\.py\) \* \|", table, re.MULTILINE)} == small


def test_axis_by_torchrun(tmp_path: Path) -> None:
    """Each launched process is one rank of every contender."""
    file = tmp_path / "record.json"
    words = f"--axes tensor --small --rounds 1 --turns 1 --json {file}".split()
    target = partial(as_a_rank, "scaling", words)
    with start_ranks(target, range(2), 2, tmp_path, agent=True) as ranks:
        assert ranks.wait() == [0, 0], ranks.text()
        assert ranks.text().count(scaling.OF_ONE) == 2  # only the first process reports
    (record,) = json.loads(file.read_text())
    assert record["command"].startswith("torchrun --nproc-per-node 2 ")
    alone, pair, missing = record["contenders"]
    for each in (alone, pair):
        assert each["rounds"][0]["rank_bytes"] > 2**18
        assert each["rounds"][0]["sent"] == each["facts"]["planned"]
    assert (bool(missing["reason"]), missing["rounds"]) == (True, [])


@pytest.mark.parametrize(
    ("preset", "peer"),
    [("gpt2_124m", "plain torch, compiled"), ("llama_1b", "transformers, compiled")],
)
def test_peers_that_compile(preset: str, peer: str) -> None:
    """They are the same model, drawn on the device; not compiled here, which takes minutes."""
    flags = Flags(contenders=(OURS, peer), small=True)
    found = train_step.contenders(flags, (preset,), ("fp32",), (1,), fast_weights=True)
    with torch.compiler.set_stance("force_eager"):
        turns = [each.run(Rank(), **each.arguments) for each in found]
        ours, its = ([float((turn() or {})["loss"]) for _ in range(3)] for turn in turns)
    assert its == pytest.approx(ours, rel=1e-5)


def test_output_layer_is_compiled_as_in_a_run() -> None:
    with (
        patch.object(output_layer, "choose_compile", Mock(return_value=(True, []))),
        patch.object(output_layer, "compile_layers") as compiled,
    ):
        output_layer.contender(Rank(), output_layer.CHUNKED, "fp32", 64, 8, 16)
    (layers,) = compiled.call_args.args
    assert VocabParallelHead in map(type, layers.modules())


@pytest.mark.parametrize("reads", [1, 2])
def test_more_than_one_read_of_a_step_is_a_failure(reads: int) -> None:
    only = {"group": "step", "name": "host reads", "first": "host reads", "reason": "", "facts": {}}
    found = Results(activations.QUESTION, {"contenders": [only | {"rounds": [{"reads": reads}]}]})
    assert bool(activations.QUESTION.failure(found)) is (reads > 1)


def test_other_weights_than_the_undisturbed_ones_are_not_equal(tmp_path: Path) -> None:
    report = {"faults": [], "unnamed": [], "failure": None, "weights": {"equal": False}}
    report |= {"useful_share": 0.5, "cold_start_seconds": 1.0}
    file = tmp_path / "round_0" / "report.json"
    file.parent.mkdir()
    file.write_text(json.dumps(report))
    given = (Rank(), OURS, [], "", str(tmp_path), "")
    with patch.object(useful_time.subprocess, "Popen") as started:
        started.return_value.communicate.return_value = ("", None)
        found = useful_time.disturbed(*given)() or {}
    assert (found["useful"], found["equal"]) == (50, 0)


@pytest.mark.parametrize("wrong", [{}, {"equal": 0.0}, {"equal": 100.0, "unnamed": 1}])
def test_other_weights_or_a_cause_without_a_name_are_a_failure(wrong: dict[str, Any]) -> None:
    found = Mock(rounds={("a rank killed", OURS): [{"equal": 100.0, "unnamed": 0}, wrong]})
    assert ("a rank killed" in useful_time.failure(found)) is bool(wrong)


def test_memory_of_a_rank_under_zero() -> None:
    (column,) = (each for each in zero.COLUMNS if each.title == "peak MiB of a rank")
    assert column.value({"peak_bytes": 2 * 3 * 2**20}, {}) == 3


def test_ranks_read_different_samples() -> None:
    config = steps.read(f"{steps.SMALL} --train-iters 9".split())
    for count, wanted in ((1, [[[0, 1]], [[2, 3]]]), (2, [[[0, 1], [4, 5]], [[2, 3], [6, 7]]])):
        for rank in (0, 1):
            found, stride = steps.step_batches(config, rank, 2, count), 4 * count
            for first in (0, stride):
                numbers = [each.numbers - first for each in next(found)]
                assert [each.tolist() for each in numbers] == wanted[rank]
            found.close()
    assert steps.batch_of(config, 1, 1, 2).numbers.tolist() == [6, 7]


def test_the_norm_counts_what_is_whole_on_the_first_rank() -> None:
    own = Mock(rank=Rank(), parameters=[None], is_cut=lambda parameter: False)
    assert peers.MasterTraining.norm(own, [torch.tensor([3.0, 4.0])]) == 5


STARTING = """import json, sys, time
while time.process_time() < 0.4: pass
for step in range(1, 10**4):
    with open(sys.argv[-1], "a") as record:
        print(json.dumps({"step": step, "loss": 1.0}), file=record)
    print(f"step {step} | loss 1", flush=True)
    time.sleep(0.01)
"""


def test_cpu_seconds_of_a_commit_are_those_of_a_turn(tmp_path: Path) -> None:
    """A start takes 0.4 of them, and no step does."""
    (tmp_path / "pretrain_gpt2.py").write_text(STARTING)
    with patch.object(commits, "Finalize") as ending:
        turn = commits.run(Rank(), str(tmp_path), [], 1, str(tmp_path))
    program, send, numbers = ending.call_args.args
    try:
        first, second = ((turn() or {})["cpu"] for _ in range(2))
    finally:
        send(*numbers)
        with program:  # which is waited for
            pass
    assert second < 0.2 < first


def test_losses_of_commits_are_compared_without_dropout() -> None:
    for dropout, same in ((0.0, {"losses": 0}), (0.1, {})):
        found = commits.contenders(Flags(), str(ROOT), commits.GROUPS[:1], dropout)
        assert [each.same for each in found] == [same, same]


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "commit": (lambda: next(commits.contenders(Flags(), "no-such-commit")), "--against"),
    "group": (lambda: next(commits.contenders(Flags(), str(ROOT), ("x",))), "--groups"),
    "micro-batches": (
        lambda: next(pipeline.contenders(Flags(), bubble_micro_batches=(2, 4))),
        "--bubble-micro-batches",
    ),
    "contender": (lambda: next(train_step.contenders(Flags(contenders=("x",)))), "--contenders"),
    "fast weights": (
        lambda: next(train_step.contenders(Flags(), fast_weights=True)),
        "--fast-weights",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    call, field = REFUSED[case]
    assert field_of(refusal(call)) == field
