"""Whole experiments at toy size: those of scripts/paper, on text that Python itself holds; and
those that compare runs. Their commands run in processes that have imported torch before."""

import json
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.data.samples import write_data, write_tokenizer
from tests.tasks.made import write_model
from tests.tools.corpus.lines import write_jsonl
from tests.tools.papers import fork_commands, reused_stages, shell, small_preset, write_folder
from tools.experiments import figure6, figure7, finetuning, learning_curves, lm_harness, miniature
from tools.experiments.miniature import MINUTES
from tools.experiments.stages import LAMBADA

MODEL = {"num_layers": 2, "hidden_size": 32, "seq_length": 64, "max_position_embeddings": 64}
STEPS = {"train_iters": 10, "lr_warmup_iters": 2, "eval_interval": 5, "eval_iters": 2}
SMALL = {**MODEL, **STEPS, "log_interval": 5}

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fast_start(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_commands(monkeypatch)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("papers") / "data")


def test_miniature(tmp_path: Path, data: Path) -> None:
    output = tmp_path / "out"
    presets = [small_preset(tmp_path, f"miniature_{model}", SMALL) for model in ("gpt2", "bert")]
    words = [
        "--data", data, "--output", output,
        "--gpt2-preset", presets[0], "--bert-preset", presets[1],
        "--vocab-size", 400, "--race-train", 12, "--race-dev", 6,
    ]  # fmt: skip
    planned = shell("scripts/paper/miniature.sh", *words, "--plan-only")
    assert f"[{len(MINUTES)}/{len(MINUTES)}]" in planned
    assert reused_stages(miniature, words) == 0
    report = json.loads((output / "report.json").read_text())
    assert report["results"]["race"]["questions"] == 12
    assert report["results"]["race"]["notes"]["input"]["train"]["questions"] == 24
    assert report["results"]["lambada"]["num_examples"] == 2
    assert report["results"]["wikitext103"]["word_perplexity"] > 1
    assert report["corpus"]["split"]["output"]["documents"] > 100
    assert report["training"]["bert"]["steps"] == 10
    assert "<svg" in (output / "report.html").read_text()
    (output / "report.json").unlink()
    assert reused_stages(miniature, words) == len(MINUTES)
    assert (output / "report.json").exists()


def test_figure_6(tmp_path: Path, data: Path) -> None:
    output, preset = tmp_path / "out", small_preset(tmp_path, "figure6", SMALL)
    words = ["--data", data, "--output", output, "--vocab-size", 400, "--preset", preset]
    words += ["--sizes", "1x16", "2x32"]
    assert "[7/7]" in shell("scripts/paper/figure6.sh", *words, "--plan-only")
    assert reused_stages(figure6, words) == 0
    assert "| paper, 8.3B | 10.81 | 66.5 % |" in (output / "figure6.md").read_text()
    text = (output / "figure6.json").read_text()
    assert str(tmp_path) not in text  # paths of the machine
    runs = json.loads(text)["runs"]
    sizes = [(run["name"], run["steps"], run["samples"]) for run in runs]
    assert sizes == [("1x16", 10, 40), ("2x32", 10, 40)]
    for run in runs:
        assert [step for step, _ in run["validation_curve"]] == [5, 10]
        assert run["validation_perplexity"] == exp(run["validation_curve"][-1][1])
        assert run["lambada"]["data"][0]["file"] == Path(LAMBADA).name
        assert run["wikitext103"]["word_perplexity"] > 1
        assert run["lambada"]["num_examples"] == 2
        stamp = json.loads((output / "stages" / f"{run['name']}.json").read_text())
        assert run["seconds"] == stamp["seconds"]
    assert (output / "figure6.png").stat().st_size > 10_000
    assert reused_stages(figure6, words) == 7


def test_figure_7(tmp_path: Path, data: Path) -> None:
    output, preset = tmp_path / "out", small_preset(tmp_path, "figure7_bert", SMALL)
    words = ["--data", data, "--output", output, "--vocab-size", 400, "--preset", preset]
    words += ["--depths", 1, "--rates", "1e-3", "1e30"]
    assert "[5/5]" in shell("scripts/paper/figure7.sh", *words, "--plan-only")
    assert reused_stages(figure7, words) == 0
    lines = (output / "figure7.md").read_text().splitlines()
    rows = [line.split(" | ") for line in lines if line.startswith(("| 0.001", "| 1e+30"))]
    assert [row[1] for row in rows] == ["1"] * 2
    diverged = [["diverged at step" in cell for cell in row[3:]] for row in rows]
    assert diverged == [[False] * 4, [True] * 4]
    assert (output / "figure7.png").stat().st_size > 10_000
    stamps = list((output / "stages").glob("*.json"))
    assert reused_stages(figure7, words) == len(stamps) == 5


def test_learning_curves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a text of 60 ids, each followed by the next."""
    preset = small_preset(tmp_path, "quickstart", {**MODEL, "hidden_size": 64})
    for name, old, new in (
        ("COMMON", "-iters 50", "-iters 5"),
        ("LAYOUTS", "--num-layers 4", "--num-layers 2"),
        ("DROPOUT", "quickstart", str(preset)),
    ):
        monkeypatch.setattr(learning_curves, name, getattr(learning_curves, name).replace(old, new))
    prefix = tmp_path / "text_document"
    starts = np.random.default_rng(0).integers(0, 60, 60)
    write_data(prefix, [[*((start + np.arange(300)) % 60 + 1), 0] for start in starts])

    def runs_of(steps: int, *runs: str) -> list[dict[str, Any]]:
        output = tmp_path / str(steps)
        given = {"data_path": prefix, "output": output, "steps": steps, "runs": runs}
        learning_curves.run(learning_curves.Settings(**given))
        return json.loads((output / "learning_curves.json").read_text())["runs"]

    serial, theirs = runs_of(12, "serial", "transformers")
    assert serial["losses"][-1] < serial["losses"][0]
    np.testing.assert_allclose(theirs["losses"], serial["losses"], atol=2e-5)
    assert max(theirs["gaps"]) < 2e-5
    first, second = runs_of(10, *learning_curves.MASKS)
    assert first["losses"][0] != second["losses"][0]  # other elements are dropped
    # They have the same weights and samples.
    assert first["losses"][0] == pytest.approx(second["losses"][0], rel=0.02)
    assert second["ratio"] == second["validation_loss"] / first["validation_loss"]


def test_finetuning(tmp_path: Path) -> None:
    labels = {"alpha": "entailment", "beta": "neutral", "gamma": "contradiction"}
    pretrained = write_model(tmp_path / "model", words=[*labels]).parent
    rows = [
        {"text_a": f"the {word}", "text_b": "the", "label": label} for word, label in labels.items()
    ]
    train = write_jsonl(tmp_path / "train", rows * 20)
    dev = write_jsonl(tmp_path / "dev", rows * 8)
    flags = "--task MNLI --seeds 2 --epochs 1 --lr 3e-3 --seq-length 16 --micro-batch-size 8"
    flags += " --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0"
    output, texts = tmp_path / "out", {"train_data": train, "valid_data": dev}
    given = {"pretrained": pretrained, **texts, "settings": flags, "output": output}
    finetuning.run(finetuning.Settings(**given))
    facts = json.loads((output / "finetuning.json").read_text())
    last = {name: facts[name]["last_epoch"] for name in ("pretrained", "random")}
    assert {"command", "commit", "torch"} <= facts["machine"].keys()
    assert last["pretrained"]["majority_accuracy"]["median"] == pytest.approx(1 / 3)
    loaded = {"pretrained": pretrained, "random": output / "initial"}
    for name, weights in loaded.items():
        stamp = json.loads((output / "stages" / f"{name}.json").read_text())
        assert f" --load {weights} " in stamp["commands"][0]
    theirs, initial = (
        load_file(next(each.glob("step_*/*.safetensors"))) for each in loaded.values()
    )
    assert theirs.keys() == initial.keys()
    assert not all(torch.equal(theirs[key], initial[key]) for key in theirs)


def test_lm_harness(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")  # which the harness's own model imports
    write_tokenizer(tmp_path)
    passages = [f"In the {word} there is a thing in the {word}" for word in ("inn", "tin", "bin")]
    lambada, wikitext = tmp_path / "lambada", tmp_path / "wiki"
    lambada.write_text("".join(f"{text}\n" for text in passages))
    article = " = {0} = \n \n the {0} in the inn . \n the thing . \n \n"
    wikitext.write_text(" \n" + article.format("One") + article.format("Two"))
    output, texts = tmp_path / "out", {"lambada_data": lambada, "wikitext_data": wikitext}
    lm_harness.run(lm_harness.Settings(**texts, tokenizer=tmp_path, output=output))
    facts = json.loads((output / "lm_harness.json").read_text())
    reference, *others = facts["figures"].values()
    assert 0 < reference["LAMBADA, accuracy"] < 1, "says little"
    for own in others:
        assert own == pytest.approx(reference, rel=1e-5)
    record = json.loads((output / "harness.json").read_text())
    assert record["documents"]["wikitext"] == {"original": 2, "effective": 2}
