"""Fine-tuned tasks: models and settings that are refused, told or recorded."""

import json
import string
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.format import step_folders
from tasks.checks import ChecksConfig
from tasks.finetune import dtype_of
from tasks.hyper_parameters import checks_of, hyper_parameters
from tasks.main import main
from tests.data.samples import write_wordpiece
from tests.tasks import made
from tests.tasks.made import write_files, write_model
from tests.tasks.program import FEW, TASK, Capture, evaluating, refusal, result, told
from tests.tiny import tiny_section


def test_a_model_of_another_kind_or_task_is_refused(
    tuned: tuple[Path, Any],
    pretrained: Path,
    tmp_path: Path,
    capsys: Capture,
) -> None:
    save, _ = tuned
    files, fine = write_files(tmp_path), str(save / "seed_1234")
    valid, pre = files[2:], str(pretrained)
    (tmp_path / "empty").write_text("0 1", encoding="utf-8")
    empty = str(tmp_path / "empty")
    gpt2 = str(write_model(tmp_path / "gpt2", tiny_section()))
    other = str(write_model(tmp_path / "other", made.small_section(), words=["word"]))
    cases = [
        (["--load", gpt2, *files], "a model of the kind gpt2; a checkpoint of the kind bert or fi"),
        (["--load", pre, *valid], "is pretrained alone, so its head would be random; --train-d"),
        (["--load", fine, *files], "is fine-tuned already; without --train-data it is evaluated"),
        (["--load", fine, *valid, "--head", "span"], "its head is a classifier (key, alike), and"),
        (["--load", fine, *valid, "--names", "more"], "of this task a classifier (alike, key); a"),
        (["--load", pre, *files, "--seq-length", "25"], "--seq-length 24 would work"),
        (["--load", pre, "--ensemble", fine, *valid], "are both given; one of them, not both, wo"),
        (files, "--ensemble, several of fine-tuned models, is needed\n"),
        (valid, "several of fine-tuned models, is needed, or --answers, answers in a file\n"),
        (["--load", pre, "--train-data", empty, *valid], f"--train-data {empty} leaves no example"),
        (["--load", fine, *valid, empty], f"--valid-data {' '.join(valid[1:])} {empty} leaves no"),
        (["--ensemble", fine, *files], "--ensemble evaluates fine-tuned models and --train-data"),
        (["--ensemble", fine, pre, *valid], "is pretrained alone"),
        (["--load", fine, *valid, "--save", "x"], "--save is about training, which takes --tr"),
        (["--load", fine, *valid, "--seeds", "2"], "--seeds is about training"),
        (["--load", fine, *valid, "--seed", "2"], "--seed is about training"),
        (
            ["--load", fine, *valid, "--clip-grad", "2", "--hidden-dropout", "0.5", "--lr", "1"],
            "--clip-grad and --hidden-dropout are about training, which takes --train-data; that, "
            "or leaving them out, would work",
        ),
        (["--load", str(save), *valid], f"seed_1235: --load {save / 'seed_1234'} would work"),
        (
            ["--ensemble", fine, str(save), *valid],
            f"--ensemble {save}: no checkpoint there; it holds seed_1234, seed_1235: "
            f"--ensemble {save / 'seed_1234'} would work",
        ),
        (["--load", pre, *files, "--compare-paper"], "the paper's tables have no tests.tasks.ma"),
        (["--load", pre, *files, "--lr-warmup-fraction", "1.5"], "should be in [0, 1)"),
        (["--load", pre, *files, "--epochs", "0"], "--epochs 0 should be above 0"),
        (["--load", str(tmp_path / "none"), *files], "no checkpoint there"),
    ]
    for words, message in cases:
        said = refusal(words, capsys)
        assert message in said, words
        assert "warning: nothing of the models" not in said
    alien = ["--load", other, *files, *FEW, "--epochs", "1", "--save", str(tmp_path / "alien")]
    result(alien, capsys)
    both = ["--ensemble", fine, str(tmp_path / "alien" / "seed_1234"), *valid]
    assert "with another tokenizer than" in refusal(both, capsys)
    for task in ("WIKITEXT103", "LAMBADA"):
        error = refusal(["--load", pre, "--valid-data", str(tmp_path / "near")], capsys, task)
        assert "holds a model of the kind bert; a checkpoint of the kind gpt2 would work" in error


def test_other_settings_than_those_of_training_are_told(
    tuned: tuple[Path, Any], capsys: Capture
) -> None:
    save, _ = tuned
    words = ["--load", str(save / "seed_1234"), *evaluating(save), "--seq-length", "20"]
    main(["--task", TASK, *words, "--micro-batch-size", "3", "--dtype", "bf16"], {})
    warned = [line for line in capsys.readouterr().err.splitlines() if "warning: " in line]
    assert len(warned) == 1
    assert "--seq-length is 20, but" in warned[0]
    assert "was fine-tuned with 24; --seq-length 24 would give the figures" in warned[0]


def test_answers_in_a_file_are_judged_without_a_model(tmp_path: Path, capsys: Capture) -> None:
    files = write_files(tmp_path)
    (tmp_path / "answers").write_text("four", encoding="utf-8")
    words = [*files[2:], "--answers", str(tmp_path / "answers")]
    record = result(words, capsys)
    assert record["answers"] == 4
    assert [Path(each["file"]).name for each in record["data"]] == ["near", "far", "answers"]
    assert record["conventions"] == {"answers": "in the file"}
    assert "--compare-paper compares models" in refusal([*words, "--compare-paper"], capsys)


def test_a_preset_may_be_left_in_an_evaluation_and_is_told_once(
    tuned: tuple[Path, Any], tmp_path: Path, capsys: Capture
) -> None:
    save, _ = tuned
    preset = tmp_path / "preset.toml"
    preset.write_text("lr = 1e-3\nepochs = 7\nglobal_batch_size = 9\n", encoding="utf-8")
    words = ["--preset", str(preset), "--load", str(save / "seed_1234"), *evaluating(save)]
    assert told(words, capsys) == [
        "warning: --epochs and --lr and --global-batch-size do nothing here, where nothing is "
        "trained"
    ]


def test_settings_of_models_are_refused_where_answers_are_judged(
    tmp_path: Path, capsys: Capture
) -> None:
    files = write_files(tmp_path)
    (tmp_path / "answers").write_text("four", encoding="utf-8")
    words = [*files[2:], "--answers", str(tmp_path / "answers")]
    for more, what in [
        (["--seeds", "5", "--save", "x", "--lr", "3"], "--seeds and --save are of models"),
        (["--seq-length", "20"], "--seq-length is of models"),
        (["--dtype", "bf16"], "--dtype is of models, and answers in a file are judged without"),
    ]:
        assert what in refusal([*words, *more], capsys)
    assert "do nothing here" in told([*words, "--lr", "3", "--epochs", "9"], capsys)[0]


@dataclass(frozen=True, kw_only=True)
class Further:
    more: int = 3


@dataclass(frozen=True, kw_only=True)
class Checked(made.Settings):
    checks: ChecksConfig = field(default_factory=ChecksConfig)
    further: Further = field(default_factory=Further)


def test_hyper_parameters_are_what_decides_and_no_place_of_a_file() -> None:
    places: dict[str, Any] = {
        "valid_data": (Path("v"),), "answers": Path("a"), "save": Path("s"), "load": "l",
        "vocab_file": "w", "seeds": 2, "seed": 3,
    }  # fmt: skip
    checks = ChecksConfig(max_truncated=0.75)
    places["recompute_granularity"] = "full"  # by which no number changes
    trained = Checked(**places, train_data=(Path("t"),), checks=checks, lr=0.25, dtype="bf16")
    found = hyper_parameters(trained)
    assert not {*places, "train_data", "ensemble", "output", "checks"} & found.keys()
    assert found | {"lr": 0.25, "dtype": "bf16", "more": 3} == found
    assert checks_of(trained) == {
        "max_truncated": 0.75, "max_unknown": 0.05, "allow_lower_case": False,
    }  # fmt: skip
    assert not checks_of(trained).keys() & found.keys(), "they say nothing of the figures"
    assert json.loads(json.dumps(found)) == found
    alone = hyper_parameters(Checked(**places, checks=checks))
    assert found.keys() - alone.keys() == {
        "epochs", "lr", "lr_warmup_fraction", "weight_decay", "clip_grad", "hidden_dropout",
        "attention_dropout", "global_batch_size", "dtype",
    }  # fmt: skip


def test_an_imported_model_is_evaluated_in_fp32() -> None:
    assert dtype_of({"precision": "bf16"}) == "bf16"
    assert dtype_of({"precision": "bf16", "imported_from": "elsewhere"}) == "fp32"


def test_one_model_twice_in_an_ensemble_is_told(
    tuned: tuple[Path, Any], tmp_path: Path, capsys: Capture
) -> None:
    save, _ = tuned
    one, two = str(save / "seed_1234"), str(save / "seed_1235")
    assert told(["--ensemble", one, two, *evaluating(save)], capsys) == []
    step = str(step_folders(save / "seed_1234")[0])
    (line,) = told(["--ensemble", one, two, step, *evaluating(save)], capsys)
    assert f"--ensemble {step} is the same model as one before it, so that it counts twice" in line


def test_the_cure_of_a_vocabulary_of_the_other_case_is_one_that_this_program_has(
    pretrained: Path, tmp_path: Path, capsys: Capture
) -> None:
    upper = string.ascii_uppercase
    file = write_wordpiece(tmp_path, *upper, *(f"##{each}" for each in upper))
    words = ["--load", str(pretrained), *write_files(tmp_path), "--vocab-file", file]
    assert "where data is made, and a vocabulary without capitals elsewhere" in refusal(
        words, capsys
    )


def test_labels_are_told_before_training(pretrained: Path, tmp_path: Path, capsys: Capture) -> None:
    words = ["--load", str(pretrained), *write_files(tmp_path, 16), *FEW, "--epochs", "1"]
    main(["--task", TASK, *words], {})
    said = capsys.readouterr().err
    assert said.index("labels: 0 key, 1 alike\n") < said.index("seed 1234 |")
