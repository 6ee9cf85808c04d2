"""Questions whose turn is a whole run of a program: what they conclude, and each in miniature."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from benchmarks import dropout_training, finetuning, learning_curves, lm_harness
from benchmarks.harness import Flags, Question, Rank
from benchmarks.program import training
from benchmarks.report import Results
from megatron.config.model import GPT2Config
from megatron.models.build import build_model
from megatron.parallel.dropout import Dropout
from megatron.parallel.mesh import serial_mesh
from tests.benchmarks.run import figures, run
from tests.data.samples import write_data, write_tokenizer
from tests.tasks.made import write_model
from tests.tiny import VOCABULARY, samples, summed_loss


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of 60 ids, each followed by the next."""
    prefix = tmp_path_factory.mktemp("data") / "text_document"
    starts = np.random.default_rng(0).integers(0, 60, 60)
    write_data(prefix, [[*((start + np.arange(300)) % 60 + 1), 0] for start in starts])
    return prefix


def results(question: Question, found: Mapping[tuple[str, str], Any], **facts: Any) -> Results:
    """Of a question with these figures, by group and name."""
    first = dict(reversed(list(found)))
    contenders = [
        {"group": group, "name": name, "first": first[group], "reason": "", "facts": {}}
        | {"rounds": [each]}
        for (group, name), each in found.items()
    ]
    return Results(question, {"contenders": contenders, **facts})


PROGRAM = """
import json, sys
from pathlib import Path
option = dict(zip(sys.argv, sys.argv[1:]))
file, last = Path(option["--save"], "metrics.jsonl"), int(option["--stop"])
step = len(file.read_text().splitlines()) if file.exists() else 0
with file.open("a") as stream:
    for number in range(step + 1, last + 1):
        ended = {"ended": "train_iters"} if number == 4 else {}
        line = {"step": number, "loss": 8.0 - number, "lr": 0.1, "seed": option.get("--seed")}
        print(json.dumps(line | ended), file=stream)
"""


def test_a_run_of_two_starts_is_one_record(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    turn = training(Rank(), [(1, ["--stop", "2"]), (1, ["--stop", "4"])], str(file))
    last = {"step": 4, "loss": 4, "lr": 0.1, "seed": None, "ended": "train_iters"}
    assert turn() == {"losses": [7, 6, 5, 4], "rates": [0.1] * 4, **last}
    with pytest.raises(RuntimeError, match="not complete"):
        training(Rank(), [(1, ["--stop", "3"])], str(file))()


def test_gaps_are_to_the_first_run_at_the_same_step() -> None:
    serial = [8.0 - 0.01 * step for step in range(200)]
    cut = [loss + (0.5 if step == 49 else 0.001) for step, loss in enumerate(serial)]
    runs = {("", "serial"): {"losses": serial}, ("", "t = 2"): {"losses": cut}}
    found = results(learning_curves.QUESTION, runs, steps=200)
    row = [found.median("", "t = 2", title) for title in found.columns]
    np.testing.assert_allclose(row, [8.001, 6.011, 0.5, 50, (199 * 0.001 + 0.5) / 200])
    assert found.cell("", "serial", "largest gap") is None
    assert "5.0e-01 where it is cut" in learning_curves.QUESTION.result(found)


@pytest.mark.parametrize(
    ("gaps", "outside"),
    [((0.015, 0.002), False), ((0.017, 0.0), True), ((0.005, 0.005), True)],
    ids=["within", "largest", "mean"],
)
def test_tolerance_is_of_the_largest_and_of_the_mean_gap(
    gaps: tuple[float, float], outside: bool
) -> None:
    """gaps: of one step in 100, and of the others; in bf16."""
    bf16 = [5.0 + gaps[0]] + [5.0 + gaps[1]] * 99
    runs = {("", "fp32, t = 1"): {"losses": [5.0] * 100}, ("", "bf16, t = 1"): {"losses": bf16}}
    question = learning_curves.QUESTION
    assert bool(question.failure(results(question, runs))) is outside


def test_a_round_has_a_seed_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    turns = [
        dropout_training.contender(Rank(round=number), ["--stop", "4"], str(file))
        for number in range(2)
    ]
    assert [turn()["seed"] for turn in turns] == ["1", "2"]


def test_torchs_dropout_is_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Dropout, "forward", Dropout.forward)  # which is put back
    monkeypatch.setattr("runpy.run_path", lambda *_, **__: None)
    exec(dropout_training.TORCHS.removeprefix("-c"), {})
    shape = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 4}
    config = GPT2Config(
        **shape, max_position_embeddings=16, attention_dropout=0.0, hidden_dropout=0.5
    )
    model = build_model(config, serial_mesh(), VOCABULARY, seed=1, dtype=torch.float64)
    losses = {summed_loss(model, samples(2), torch.device("cpu"))[0].item() for _ in range(3)}
    assert len(losses) == 3


def test_an_independent_loop_follows_the_program(tmp_path: Path, data: Path) -> None:
    names = ["serial", "transformers"]
    words = ["--data-path", data, "--steps", 52, "--contenders", *names]
    record = run(tmp_path, "learning_curves", *words)
    serial, theirs = (figures(record, name, "layouts") for name in names)
    assert serial["losses"][-1] < 0.9 * serial["losses"][0]
    np.testing.assert_allclose(theirs["losses"], serial["losses"], atol=2e-5)
    assert "![Learning curves](page.png)" in record["page"]


def test_fp16_follows_fp32_with_dropout_and_without(tmp_path: Path, data: Path) -> None:
    names = ["fp32, t = 1", "fp16, t = 1"]
    words = ["--data-path", data, "--steps", 52, "--contenders", *names]
    record = run(tmp_path, "learning_curves", *words)
    plain, dropped = (figures(record, names[1], f"dropout {p}") for p in ("0", "0.1"))
    assert plain["losses"] != dropped["losses"]
    assert (plain["skipped_steps"], plain["loss_scale"]) == (0, 2**16)
    fp32 = figures(record, names[0], "dropout 0")
    assert plain["losses"] != fp32["losses"]
    np.testing.assert_allclose(plain["losses"], fp32["losses"], atol=2**-9)


def test_both_dropouts_train_the_same_model(tmp_path: Path, data: Path) -> None:
    record = run(tmp_path, "dropout_training", "--data-path", data, "--steps", 10)
    theirs, ours = (figures(record, name) for name in ("torch's", "by coordinates"))
    assert theirs["losses"][0] != ours["losses"][0]  # other elements are dropped
    # Of the same weights and samples.
    assert theirs["losses"][0] == pytest.approx(ours["losses"][0], rel=0.02)
    ratio = ours["validation_loss"] / theirs["validation_loss"]
    assert f"loss is {ratio:.4f} times" in record["page"]


def test_fine_tuning_from_initial_weights(tmp_path: Path) -> None:
    words = ["alpha", "beta", "gamma"]
    pretrained = write_model(tmp_path / "model", words=words).parent
    rows = [
        {"text_a": f"the {word}", "text_b": "the", "label": label}
        for word, label in zip(words, ("entailment", "neutral", "contradiction"), strict=True)
    ]
    for name, count in (("train", 20), ("dev", 8)):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows * count))
    settings = "--task MNLI --seeds 2 --epochs 1 --lr 3e-3 --seq-length 16 --micro-batch-size 8"
    settings += " --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0"
    flags = ["--pretrained", pretrained, f"--settings={settings}"]
    flags += ["--train-data", tmp_path / "train", "--valid-data", tmp_path / "dev"]
    record = run(tmp_path, "finetuning", *flags)
    ours = figures(record, "pretrained")
    assert ours["majority_accuracy"]["median"] == pytest.approx(1 / 3)
    accuracy = ours["accuracy"]
    assert accuracy["min"] <= accuracy["median"] <= accuracy["max"]
    assert f"accuracy {accuracy['median']:.4f} (pretrained)" in record["page"]
    begun = finetuning.contenders(Flags(), pretrained, tmp_path / "train", tmp_path / "dev")
    theirs, initial = (
        load_file(next(Path(each.arguments["words"][-1]).glob("step_*/*.safetensors")))
        for each in begun
    )
    assert theirs.keys() == initial.keys()
    assert not all(torch.equal(theirs[key], initial[key]) for key in theirs)


@pytest.mark.slow
def test_three_ways_to_score_one_model(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    write_tokenizer(tmp_path)
    passages = [f"In the {word} there is a thing in the {word}" for word in ("inn", "tin", "bin")]
    (tmp_path / "lambada").write_text("".join(f"{text}\n" for text in passages))
    article = " = {0} = \n \n the {0} in the inn . \n the thing . \n \n"
    (tmp_path / "wiki").write_text(" \n" + article.format("One") + article.format("Two"))
    words = ["--lambada-data", tmp_path / "lambada", "--wikitext-data", tmp_path / "wiki"]
    record = run(tmp_path, "lm_harness", *words, "--tokenizer", tmp_path)
    reference = figures(record, "harness, exported folder")
    assert 0 < reference["LAMBADA, accuracy"] < 1
    for name in ("tasks/main.py", "harness, checkpoint"):
        own = figures(record, name)
        for title in lm_harness.FIGURES:
            assert own[title] == pytest.approx(reference[title], rel=1e-5)
