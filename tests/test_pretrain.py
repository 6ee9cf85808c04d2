"""pretrain.py and pretrain_gpt2.py: kinds of models, what is refused, before torch comes or after,
and what is imported."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import pretrain
import pretrain_gpt2
from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.train.trained import open_trained
from tests import programs
from tests.data.samples import (
    change,
    forget_samples,
    write_data,
    write_data_of_tokenizer,
    write_tokenizer,
)
from tests.programs import SHAPE, lines_of, refused_before_torch, values_of
from tests.refusals import by_last_flag, field_of, refusal, refused

# Takes seconds to import, and a training step needs none of it.
HEAVY = (
    "dask datasets matplotlib numba pandas pyarrow scipy sympy tensorboard torch._dynamo "
    "torch._inductor torch.distributed.tensor transformers wandb"
)
REST = "--seq-length 16 --train-iters 2 --micro-batch-size 2 --split 1,1,0"
DOCUMENTS = [[*range(1, 40), 0]] * 4
train = partial(pretrain_gpt2.main, environ={})


def arguments(data: Path | str, words: str) -> list[str]:
    return [*SHAPE.split(), *REST.split(), "--data-path", str(data), *words.split()]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prefix = tmp_path / "some_text_document"
    write_data(prefix, DOCUMENTS)
    return prefix


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A data set whose tokenizer is beside it."""
    prefix = tmp_path / "own_text_document"
    write_data_of_tokenizer(prefix, [[*range(1, 40), 260]] * 4)
    return prefix


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], ["gpt2", "bert"]),
        (["--model", "gpt2", "--help"], ["--reset-position-ids", "--activation"]),
        (["--model=bert", "--help"], ["--mask-prob", "--untie-embeddings-and-output-weights"]),
        (["--model", "tests.models.own_kind:KIND", "--help"], ["--key-value-heads"]),
    ],
)
def test_help_names_kinds_and_flags(
    words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        pretrain.main(words, {})
    assert stop.value.code == 0
    assert set(expected) <= set(re.findall(r"[\w-]+", capsys.readouterr().out))


@pytest.mark.parametrize("kind", ["", "gpt9", "finetuned", "tests.models.own_kind:MISNAMED"])
def test_a_kind_that_cannot_be_pretrained_is_refused(data: Path, kind: str) -> None:
    """MISNAMED has the config of another, by which its checkpoints would be read."""
    model = ["--model", kind] if kind else []
    refusal(lambda: pretrain.main([*model, *arguments(data, "")], {}), field="--model")


def test_a_kind_trains_as_the_papers_program_or_as_ones_own(data: Path, tmp_path: Path) -> None:
    losses, record = dict[str, list[float]](), tmp_path / "metrics.jsonl"
    words = "--hidden-size 48 --num-attention-heads 12 --num-layers 1 --eval-iters 0"
    words += f" --log-interval 1 --no-bf16 --metrics-file {record}"
    for name, program, model in (
        ("gpt2 alone", pretrain_gpt2.main, ""),
        ("gpt2", pretrain.main, "--model gpt2"),
        ("own", pretrain.main, "--model tests.models.own_kind:KIND"),
    ):
        program([*model.split(), *arguments(data, words)], {})
        losses[name] = values_of(record)
        record.unlink()
    assert len(losses["own"]) == 2
    assert losses["gpt2"] == losses["gpt2 alone"] != losses["own"]


# Arguments, the environment and the field that is refused.
TENSOR, FILE = "--tensor-model-parallel-size", "--data-path {folder}"
SETTINGS = """
--seq-length 17 | --loss-scale 8 | --finetune | --fp16 --initial-loss-scale 2**x
--save x --keep-checkpoints 1 | --load nowhere | --preset {folder}/mine.toml
"""  # the last flag is refused
EARLY = [
    *((words, "", flag) for words, flag in by_last_flag(SETTINGS)),
    (f"{TENSOR} 3", "RANK=0 WORLD_SIZE=3", TENSOR),
    (f"{TENSOR} 2", "RANK=0 WORLD_SIZE=3", TENSOR),
    ("--global-batch-size 3", "RANK=0 WORLD_SIZE=2", "--global-batch-size"),
    ("", "WORLD_SIZE=2", "WORLD_SIZE"),
    ("", "RANK=0 WORLD_SIZE=two", "WORLD_SIZE"),
    ("--seq-length 17", "RANK=1 WORLD_SIZE=2", "--seq-length"),
]


def test_wrong_arguments_are_refused_before_torch_is_imported(data: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("num_layers = 2\nhiden_size = 32\n")
    cases = [
        (dict(each.split("=") for each in environ.split()), words.format(folder=tmp_path))
        for words, environ, _ in EARLY
    ]
    found = refused_before_torch("pretrain_gpt2", [(e, arguments(data, w)) for e, w in cases])
    assert [field_of(error) for error in found] == [field for *_, field in EARLY]
    for error, (_, environ, _) in zip(found, EARLY, strict=True):
        assert error.count("\n") == 1
        assert error.startswith("rank 1: ") == ("RANK=1" in environ)


UNSAVED = "--save {folder}/new --split 0,1,0"  # whose checkpoints would hold no tokenizer
DATA = """
--vocab-size 99 | --split 1,9999,0 | --split 0,1,0 | --tokenizer-type T5
--data-path {folder}/absent | --data-path {folder}/empty
"""  # the last flag is refused
# Arguments, the field that is refused, and how many warnings come before.
LATE = [
    *((words, flag, 0) for words, flag in by_last_flag(DATA)),
    ("--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt", "--data-path", 0),
    (f"{FILE}/own_text_document --tokenizer-type BertWordPiece", "--tokenizer-type", 0),
    (UNSAVED, "--split", 1),
]


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_wrong_data_are_refused_in_one_line(
    data: Path,
    own: Path,
    tmp_path: Path,
    environ: dict[str, str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_tokenizer(tmp_path)
    write_data(tmp_path / "empty", DOCUMENTS)
    (tmp_path / "empty.bin").write_bytes(b"")
    for words, field, warned in LATE:
        with pytest.raises(SystemExit) as stop:
            pretrain_gpt2.main(arguments(data, words.format(folder=tmp_path)), environ)
        *warnings, error = capsys.readouterr().err.splitlines()
        assert (stop.value.code, field_of(error), len(warnings)) == (2, field, warned)
    assert not (tmp_path / "new").exists()


def test_of_several_ranks_one_says_that_data_are_wrong(data: Path, tmp_path: Path) -> None:
    words = f"--train-iters 2 {UNSAVED.format(folder=tmp_path)}"
    with programs.pretrain(words, world=2, folder=tmp_path, data=data) as run:
        assert run.wait() == [2, 2], run.text()
    *warnings, error = run.text(0).splitlines()
    assert (field_of(error), len(warnings)) == ("--split", 1)
    assert run.text(1) == ""
    assert not (tmp_path / "new").exists()


def test_a_refused_checkpoint_leaves_no_folder_of_save(data: Path, tmp_path: Path) -> None:
    load, new = tmp_path / "one", tmp_path / "a" / "new"
    train(arguments(data, f"--save {load} --eval-iters 0 --no-bf16"))
    words = f"--no-bf16 --load {load} --save {new} --seed 5"
    assert field_of(refusal(lambda: train(arguments(data, words)))) == "--seed"
    assert not new.parent.exists()


def test_a_step_imports_nothing_heavy(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a GPU steps are compiled
    words = ("--no-bf16", "--bf16", "--fp16", f"--save {tmp_path / 'save'}")
    runs = [arguments(data, f"{each} --train-iters 1 --eval-iters 1") for each in words]
    program = "import json, sys; from pretrain_gpt2 import main\n"
    program += "for words in json.loads(sys.argv[1]): main(words, {})\n"
    program += f"print('imported', sorted(set({HEAVY!r}.split()) & set(sys.modules)))"
    command = [sys.executable, "-c", program, json.dumps(runs)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "imported []"


def test_checkpoints_hold_the_tokenizer(
    own: Path, tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    save, fingerprint = tmp_path / "checkpoints", json.loads(own.with_suffix(".json").read_text())
    train(arguments(own, f"--save {save} --eval-iters 0 --no-bf16"))
    # Evaluation and generation need neither the data nor a flag.
    Path(f"{own}.tokenizer").rename(tmp_path / "elsewhere")
    folders, found, manifest = open_trained(TrainedConfig(load=str(save)), ParallelConfig(), 1)
    assert found.fingerprint == manifest["tokenizer"] == fingerprint["tokenizer_fingerprint"]
    names = {"manifest.json", "merges.txt", "shard_00000.safetensors", "vocab.json"}
    assert {file.name for file in folders[0].iterdir()} == names
    train(arguments(own, f"--save {save} --load {save} --train-iters 3 --eval-iters 0 --no-bf16"))
    assert (save / "step_00000003" / "vocab.json").exists()  # that of --load goes on


def test_a_run_trains_and_resumes_only_what_fits(data: Path, tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    train(arguments(data, f"--save {save} --eval-iters 1 --log-interval 1 --no-bf16"))
    assert [line["step"] for line in lines_of(save)] == [1, 2]
    assert lines_of(save, "validation_loss")
    load = f"--no-bf16 --load {save}"
    for words, flag in (
        (f"{load} --seed 5", "--seed"),
        (f"{load} --num-layers 3", "--num-layers"),
        (f"--load {save} --fp16", "--fp16"),
        (f"--no-bf16 --save {save}", "--save"),
    ):
        assert refused(train, arguments(data, words)) == flag
    forget_samples(data)
    change(data, ".bin", 0, b"\x09")
    (kept,) = json.loads((save / "step_00000002" / "manifest.json").read_text())["data"]
    error = refusal(lambda: train(arguments(data, load)))  # the .json knows the counts alone
    assert (field_of(error), kept.rpartition(" ")[2] in str(error)) == ("--data-path", True)
    used = json.loads(data.with_name(f"{data.name}.json").read_text())["bin_sha256"]
    other = write_data(data, [[*range(2, 41), 0]] * 4).bin_sha256
    refusal(lambda: train(arguments(data, load)), used, other, field="--data-path")
    train(arguments(data, f"{load} --override-data"))
    write_data(data, DOCUMENTS, vocab_size=110)  # more ids than the model has rows
    assert "--vocab-size" in str(refusal(lambda: train(arguments(data, load))))
