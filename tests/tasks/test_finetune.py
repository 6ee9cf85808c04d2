"""Fine-tuned tasks through tasks/main.py: seeds, epochs, what is kept, reused and stopped."""

import json
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from shutil import copy, copytree
from statistics import median
from typing import Any, get_args

import numpy as np
import pytest
import torch

from megatron.checkpoint.format import read_manifest, step_folders
from megatron.config.model import ResidualOrder
from megatron.config.parse import parse
from megatron.train.metrics import read_metrics
from tasks import finetune
from tasks.finetune import evaluate_models, fine_tune, mean_logits
from tasks.job import dtype_of, make_job
from tasks.protocol import FinetuneSettings, Head
from tests.dist import Pool
from tests.refusals import refusal, refused
from tests.tasks import made
from tests.tasks.made import COUNT, small_section, write_files, write_model
from tests.tasks.program import FEW, TASK, Capture, evaluating, result, run, told
from tests.tiny import mesh_of_ranks
from tests.tools.convert.models import load_and_save

HEADS: tuple[Head, ...] = get_args(Head)
TRAIN = 64  # examples, in steps of 16
Tuned = tuple[Path, Any]


@pytest.mark.parametrize(
    ("head", "order"), [*((head, "pre-ln") for head in HEADS), ("classifier", "post-ln")]
)
def test_every_head_learns_its_task(
    tmp_path: Path, capsys: Capture, head: Head, order: ResidualOrder
) -> None:
    # With smaller random weights [CLS] of post-LN is its own embedding almost, and learns nothing.
    model = write_model(tmp_path, small_section(residual_order=order, init_method_std=0.1))
    words = ["--load", str(model), *write_files(tmp_path, 400), *FEW, "--head", head]
    record = result([*words, "--epochs", "4"], capsys)
    losses = [epoch["train_loss"] for epoch in record["seeds"][0]["epochs"]]
    assert losses[-1] < 0.4 * losses[0]
    assert record["accuracy"] > 0.85, "by chance a half, a third and less"
    assert (record["model"]["head"], record["model"]["residual_order"]) == (head, order)


def test_the_record_says_what_was_trained_and_how(tuned: Tuned, pretrained: Path) -> None:
    save, record = tuned
    assert [*record][:4] == ["task", "conventions", "protocol", "labels"]
    assert (record["task"], record["labels"], record["dtype"]) == (TASK, ["key", "alike"], "fp32")
    assert (record["notes"], record["layout"]) == ({"made": True}, {"data": 1, "tensor": 1})
    assert record["checkpoint_hash"] == read_manifest(pretrained)["checksum"]
    assert record["checkpoint"] == str(pretrained)
    tensors = read_manifest(step_folders(save / "seed_1234")[0])["tensors"]
    assert record["model"]["parameters"] == sum(
        int(np.prod(each["shape"])) for each in tensors.values()
    )
    assert [Path(each["file"]).name for each in record["data"]] == ["train", "near", "far"]
    chosen = {"lr": 1e-2, "epochs": 3, "head": "classifier"}
    assert record["hyper_parameters"] | chosen == record["hyper_parameters"]
    beside = {"load", "seed", "seeds", "save", "train_data", "recompute_granularity", "output"}
    assert not (beside | record["checks"].keys()) & record["hyper_parameters"].keys()
    allowed = {"max_truncated": 0.25, "max_unknown": 0.05, "allow_lower_case": False}
    assert record["checks"] == allowed
    assert [each["seed"] for each in record["seeds"]] == [1234, 1235]
    assert all(len(each["epochs"]) == 3 for each in record["seeds"])


def test_median_and_spread_are_of_the_seeds_and_the_best_epoch_is_the_highest(
    tuned: Tuned,
) -> None:
    _, record = tuned
    runs = [[epoch["figures"] for epoch in each["epochs"]] for each in record["seeds"]]
    losses = [[epoch["train_loss"] for epoch in each["epochs"]] for each in record["seeds"]]
    assert losses[0] != losses[1], "each seed has examples and a head of its own"
    for each, epochs in zip(record["seeds"], runs, strict=True):
        values = [figures["accuracy"] for figures in epochs]
        assert each["best_epoch"] == 1 + values.index(max(values))
    for name, rows in {
        "last_epoch": [epochs[-1] for epochs in runs],
        "best_epoch": [max(epochs, key=lambda each: each["accuracy"]) for epochs in runs],
    }.items():
        values = [row["near_accuracy"] for row in rows]
        spread = {"median": median(values), "min": min(values), "max": max(values)}
        assert record[name]["near_accuracy"] == spread
    assert record["accuracy"] == record["last_epoch"]["accuracy"]["median"]
    near, far = record["near_accuracy"], record["far_accuracy"]
    assert record["accuracy"] == pytest.approx((2 * near + far) / 3)
    assert record["near_examples"] == COUNT
    assert "near_examples" not in record["last_epoch"], "all seeds agree on it"
    right = [epochs[-1]["near_parts"]["right"] for epochs in runs]
    assert record["near_parts"]["right"] == median(right)


def test_checkpoints_of_the_last_and_the_best_epoch_give_the_figures_of_that_time(
    tuned: Tuned, capsys: Capture
) -> None:
    save, record = tuned
    for each in record["seeds"]:
        paths = each["checkpoints"]
        kept = step_folders(save / f"seed_{each['seed']}")
        assert {str(path) for path in kept} == {*paths.values()}
        for which, epoch in (("last", 3), ("best", each["best_epoch"])):
            found = result(["--load", paths[which], *evaluating(save)], capsys)
            figures = each["epochs"][epoch - 1]["figures"]
            assert {name: found[name] for name in figures} == figures
            assert (found["finetuned"]["epoch"], found["finetuned"]["task"]) == (epoch, TASK)
            assert "lr" not in found["hyper_parameters"], "nothing is trained"
            assert found["finetuned"]["hyper_parameters"]["lr"] == 1e-2


def test_an_ensemble_is_the_mean_of_the_logits(tuned: Tuned, capsys: Capture) -> None:
    save, trained = tuned
    loads = [str(save / "seed_1234"), str(save / "seed_1235")]
    record = result(["--ensemble", *loads, *evaluating(save)], capsys)
    figures = [each["epochs"][-1]["figures"] for each in trained["seeds"]]
    assert [each["figures"] for each in record["models"]] == figures
    assert [each["finetuned"]["seed"] for each in record["models"]] == [1234, 1235]
    assert [each["dtype"] for each in record["models"]] == ["fp32", "fp32"]
    twice = result(["--ensemble", loads[0], loads[0], *evaluating(save)], capsys)
    assert twice["accuracy"] == figures[0]["accuracy"]
    rows: Any = [
        {"a": [np.array([0.0, 1.0]), np.array([[4.0]])]},
        {"a": [np.array([4.0, 2.0]), np.array([[0.0]])]},
    ]
    assert [each.tolist() for each in mean_logits(rows)["a"]] == [[2.0, 1.5], [[2.0]]]


def test_metrics_come_a_few_times_an_epoch(tuned: Tuned) -> None:
    save, record = tuned
    lines = read_metrics(save / "seed_1235" / "metrics.jsonl")
    steps = [line for line in lines if "lr" in line]
    assert [line["step"] for line in steps] == list(range(1, 13)), "four an epoch, all are logged"
    assert [(line["seed"], line["epoch"]) for line in steps] == [
        (1235, epoch) for epoch in (1, 2, 3) for _ in range(4)
    ]
    ends = [line for line in lines if "train_loss" in line]
    for line, epoch in zip(ends, record["seeds"][1]["epochs"], strict=True):
        assert line["near_accuracy"] == epoch["figures"]["near_accuracy"]
        own = [each["loss"] for each in steps if each["epoch"] == line["epoch"]]
        # Examples weigh alike, and those of the last step are fewer.
        mean = np.average(own, weights=[16, 16, 16, 12])
        assert line["train_loss"] == pytest.approx(mean, rel=1e-12)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_narrow_formats_train_and_are_evaluated_as_they_were(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """bf16 without a flag, on a processor that multiplies in it."""
    save = tmp_path / "save"
    words = [*words[: words.index("--dtype")], "--save", str(save)]
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})
    more = [] if dtype == "bf16" else ["--dtype", dtype]
    record = result([*words, *more], capsys)
    assert record["dtype"] == record["hyper_parameters"]["dtype"] == dtype
    manifest = read_manifest(Path(record["seeds"][0]["checkpoints"]["last"]))
    assert manifest["precision"] == dtype
    evaluated = ["--load", str(save / "seed_1234"), *evaluating(save)]
    again = result(evaluated, capsys)
    assert (again["accuracy"], again["dtype"]) == (record["accuracy"], dtype)
    assert result([*evaluated, "--dtype", "fp32"], capsys)["dtype"] == "fp32"
    assert refused(run, [TASK, *words, "--dtype", "fp32"]) == "--save"


def test_every_seed_has_a_head_an_order_and_dropout_of_its_own(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads, masks, orders = [], [], []

    def looks(state: Any, loop: Any) -> str:
        heads.append(state.model.head.weight.detach().clone())
        batch = next(loop.batches)[0]
        masks.append(state.model.dropout(torch.ones(4, 32), torch.arange(4)))
        orders.append(torch.from_numpy(batch.tokens))
        assert loop.training.check_replicas_interval == 4, "after every epoch"
        loop.evaluate(state)
        return "train_iters"

    monkeypatch.setattr(finetune, "train", looks)
    result([*words, "--epochs", "1", "--seeds", "3"], capsys)
    for each in (heads, masks, orders):
        pairs = [(one, other) for one in range(3) for other in range(one)]
        assert not any(torch.equal(each[one], each[other]) for one, other in pairs)


def ranks(words: list[str]) -> dict[str, Any]:
    settings = parse(made.Settings, words, {})
    parallel = settings.parallel
    mesh = mesh_of_ranks(
        parallel.tensor_model_parallel_size, sequence_parallel=parallel.cuts_stream
    )
    job = make_job(TASK, made, settings, ["a test"], mesh.size())
    act = fine_tune if job.settings.train_data else evaluate_models
    return act(job, mesh, {})[0]


@pytest.mark.filterwarnings("ignore:nothing of the models")
def test_several_processes_train_keep_and_evaluate(
    gloo: Pool, words: list[str], tmp_path: Path
) -> None:
    words = [*words, "--seeds", "2"]
    alone = ranks(words)
    for number, layout in enumerate([
        "", "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 2 --sequence-parallel",
        "--use-distributed-optimizer", "--zero-stage 3",
    ]):  # fmt: skip
        save = tmp_path / str(number)
        training = [*words, *layout.split(), "--save", str(save)]
        record, nothing = gloo.run(2, ranks, training)
        assert nothing == {}
        for one, other in zip(record["seeds"], alone["seeds"], strict=True):
            for epoch, expected in zip(one["epochs"], other["epochs"], strict=True):
                assert epoch["train_loss"] == pytest.approx(expected["train_loss"], rel=1e-4)
        again, _ = gloo.run(2, ranks, training)
        assert again["seeds"] == record["seeds"]
        models = ["--ensemble", str(save / "seed_1234"), str(save / "seed_1235")]
        models += evaluating(save)
        both, _ = gloo.run(2, ranks, [*models, *layout.split()[: 2 * ("tensor" in layout)]])
        assert [each["figures"] for each in both["models"]] == [
            each["epochs"][-1]["figures"] for each in record["seeds"]
        ]
        assert both["accuracy"] == ranks(models)["accuracy"]
    searched = [*words, "--search", "lr=1e-9,1e-2"]
    both, other = gloo.run(2, ranks, searched)
    assert both["search"]["chosen"] == ranks(searched)["search"]["chosen"]
    assert (len(both["seeds"]), other) == (2, {})


def test_a_run_that_diverges_ends_with_one_message(words: list[str], tmp_path: Path) -> None:
    wild = [*words, "--seed", "1235", "--clip-grad", "0", "--lr-warmup-fraction", "0"]
    wild += ["--lr", "1e30", "--save", str(tmp_path / "wild")]
    message = str(refusal(lambda: run([TASK, *wild])))
    assert re.findall(r"\d+", message)[:3] == ["1235", "1", "2"], "seed, epoch and step"
    assert "--lr-warmup-fraction" in message
    assert "--dtype" not in message


def test_logits_that_are_no_numbers_are_one_message(tuned: Tuned, tmp_path: Path) -> None:
    save, _ = tuned
    (step, *_) = step_folders(save / "seed_1234")
    load_and_save(step, tmp_path, 1, factor=float("nan"))
    error = refusal(lambda: run([TASK, "--load", str(tmp_path), *evaluating(save)]))
    assert str(error).startswith(f"{TASK} near: ")


def at_epoch(number: int, act: Callable[[], None]) -> Callable[[], None]:
    """A function that acts when the first example of an epoch is read; epochs of all seeds count,
    from 0."""
    reads = iter(range(10**9))
    return lambda: act() if next(reads) == number * TRAIN else None


def test_a_seed_that_fails_loses_no_other(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "save"
    words = [*words, "--save", str(save)]
    whole = result([*words[:-1], str(tmp_path / "whole"), "--seeds", "2"], capsys)

    with monkeypatch.context() as patch:  # it fails in the second epoch of the second seed
        patch.setattr(made, "on_read", at_epoch(3, lambda: print(1 // 0)))
        with pytest.raises(ZeroDivisionError):
            run([TASK, *words, "--seeds", "2"])
    (first,) = step_folders(save / "seed_1235")  # its first epoch, the best so far
    copytree(first, first.with_name("step_00000099"))
    before = (save / "seed_1234" / "metrics.jsonl").stat().st_mtime_ns
    record = result([*words, "--seeds", "2"], capsys)
    assert (save / "seed_1234" / "metrics.jsonl").stat().st_mtime_ns == before
    assert record["last_epoch"] == whole["last_epoch"]
    one, other = ([{**seed, "checkpoints": 0} for seed in x["seeds"]] for x in (record, whole))
    assert one == other
    kept = {path for path in (save / "seed_1235").iterdir() if path.is_dir()}
    assert kept == {Path(path) for path in record["seeds"][1]["checkpoints"].values()}

    result([*words, "--seeds", "1", "--seed", "1235"], capsys)
    near, renamed = str(tmp_path / "near"), str(copy(tmp_path / "far", tmp_path / "farther"))
    for more, differs in [
        (["--lr", "1e-3"], "--lr 0.003"),
        (["--head", "span"], "--head classifier"),
        (["--valid-data", near], "--valid-data: far"),
        (["--train-data", near], "--train-data: near, train"),
        (["--valid-data", near, renamed], "farther"),
    ]:
        error = refusal(partial(run, [TASK, *words, *more]))
        assert str(error).startswith(f"--save {save}")
        assert differs in str(error)
    (tmp_path / "far").write_text("7 9", encoding="utf-8")
    assert "--valid-data: far" in str(refusal(lambda: run([TASK, *words])))
    (save / "seed_1234" / "result.json").write_text("{", encoding="utf-8")
    assert "result.json" in str(refusal(lambda: run([TASK, *words])))


def test_a_search_chooses_on_one_seed_and_goes_on_with_five(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, save = [*words, "--epochs", "1"], tmp_path / "save"
    alone, scores = {}, {}
    for lr in (1e-9, 1e-2):
        more = ["--lr", str(lr), "--save", str(tmp_path / str(lr)), "--seeds", "5"]
        alone[lr] = result([*words, *more], capsys)
        scores[lr] = alone[lr]["seeds"][0]["epochs"][0]["figures"]["accuracy"]
    worse, best = sorted(scores, key=lambda lr: scores[lr])
    assert scores[worse] < scores[best]
    searched = [*words, "--save", str(save), "--search", f"lr={worse},{best}", "batch=16"]
    with monkeypatch.context() as patch:  # it fails in the second combination
        patch.setattr(made, "on_read", at_epoch(1, lambda: print(1 // 0)))
        with pytest.raises(ZeroDivisionError):
            run([TASK, *searched])
    (finished,) = save.glob("lr=*/seed_1234/result.json")
    before = finished.stat().st_mtime_ns
    record = result(searched, capsys)
    assert finished.stat().st_mtime_ns == before, "a finished combination is not trained again"
    tries = [{"lr": lr, "global_batch_size": 16} for lr in (worse, best)]
    assert record["search"] == {
        "seed": 1234,
        "tries": [{**each, "accuracy": scores[each["lr"]]} for each in tries],
        "chosen": tries[1],
    }
    assert record["hyper_parameters"] == alone[best]["hyper_parameters"]
    assert record["last_epoch"] == alone[best]["last_epoch"], "of the seeds 1234 to 1238"
    place = Path(record["seeds"][4]["checkpoints"]["last"])
    assert place.parents[2] == save
    monkeypatch.setattr(made, "on_read", lambda: print(1 // 0))  # nothing is trained again
    assert result(searched, capsys) == record


def test_a_search_goes_on_where_a_combination_diverges(
    words: list[str], tmp_path: Path, capsys: Capture
) -> None:
    words = [*words, "--epochs", "1", "--seeds", "1"]
    found = result([*words, "--search", "lr=1e30,1e-2"], capsys)["search"]
    assert [each["accuracy"] is None for each in found["tries"]] == [True, False]
    assert found["chosen"]["lr"] == 1e-2
    with pytest.raises(SystemExit) as ended:
        run([TASK, *words, "--search", "lr=1e30"])
    assert ended.value.code == 2


def test_a_setting_of_a_task_that_is_nowhere_named_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a finished seed would be reused although the setting has changed."""
    monkeypatch.setattr(made.Settings, "hyper_parameters", FinetuneSettings.hyper_parameters)
    assert "head" in str(refusal(lambda: run([TASK, *words])))


def stop(
    words: list[str],
    number: signal.Signals,
    epoch: int,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[object, list[str]]:
    """The status of a run that a signal reaches at an epoch's start, and the numbers in its last
    line: the seed, its epoch, and the seeds that have ended."""
    capsys.readouterr()
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(made, "on_read", at_epoch(epoch, lambda: signal.raise_signal(number)))
        with pytest.raises(SystemExit) as ended:
            run([TASK, *words])
    assert signal.getsignal(number) is before
    return ended.value.code, re.findall(r"\d+", capsys.readouterr().err.splitlines()[-1])


def test_a_stopped_seed_is_told_of_when_it_stops_is_loaded_and_begins_anew(
    words: list[str], tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = tmp_path / "save"
    words = [*words, "--epochs", "3", "--seeds", "2", "--save", str(save)]
    stopped = stop(words, signal.SIGTERM, 4, capsys, monkeypatch)
    assert stopped == (75, ["1235", "2", "1234"])
    seed = save / "seed_1235"
    assert read_metrics(seed / "metrics.jsonl")[-1]["exit_code"] == 75
    (step,) = step_folders(seed)
    for flag in ("--load", "--ensemble"):
        line = told([flag, str(seed), *evaluating(save)], capsys)[-1]
        assert f"{flag} {seed}" in line
        assert f"{flag} {step}" in line
    assert told(["--load", str(step), *evaluating(save)], capsys) == []
    assert told(["--load", str(save / "seed_1234"), *evaluating(save)], capsys) == []
    before = (save / "seed_1234" / "metrics.jsonl").read_bytes()
    capsys.readouterr()
    run([TASK, *words])
    record, printed = capsys.readouterr()
    assert "%|" not in printed, "no progress bar in a log"
    assert re.findall(r"(\d) (key|alike)\b", printed) == [("0", "key"), ("1", "alike")]
    losses = [f"{each['train_loss']:.4g}" for each in json.loads(record)["seeds"][1]["epochs"]]
    assert re.findall(r"\btrain_loss (\S+)", printed) == losses
    assert (save / "seed_1234" / "metrics.jsonl").read_bytes() == before
    assert told(["--load", str(seed), *evaluating(save)], capsys) == []


def test_without_save_a_stopped_run_keeps_nothing(
    words: list[str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert stop(words, signal.SIGINT, 0, capsys, monkeypatch) == (130, ["1234", "1"])


def test_one_model_alone_or_twice_in_an_ensemble_is_told(tuned: Tuned, capsys: Capture) -> None:
    save, _ = tuned
    one, two = str(save / "seed_1234"), str(save / "seed_1235")
    assert told(["--ensemble", one, two, *evaluating(save)], capsys) == []
    (line,) = told(["--ensemble", one, *evaluating(save)], capsys)
    assert f"--ensemble {one}" in line
    step = str(step_folders(save / "seed_1234")[0])
    (line,) = told(["--ensemble", one, two, step, *evaluating(save)], capsys)
    assert f"--ensemble {step}" in line


def test_other_settings_than_those_of_training_are_told(
    tuned: Tuned, tmp_path: Path, capsys: Capture
) -> None:
    save, _ = tuned
    words = ["--load", str(save / "seed_1234"), *evaluating(save)]
    changed = ["--seq-length", "20", "--micro-batch-size", "3", "--dtype", "bf16"]
    (line,) = told([*words, *changed], capsys)
    assert "--seq-length 24" in line
    preset = tmp_path / "preset.toml"
    preset.write_text("lr = 1e-3\nepochs = 7\nglobal_batch_size = 9\n", encoding="utf-8")
    (line,) = told(["--preset", str(preset), *words], capsys)
    assert "--epochs and --lr and --global-batch-size" in line


def test_an_imported_model_is_evaluated_in_fp32() -> None:
    assert dtype_of({"precision": "bf16"}) == "bf16"
    assert dtype_of({"precision": "bf16", "imported_from": "elsewhere"}) == "fp32"
