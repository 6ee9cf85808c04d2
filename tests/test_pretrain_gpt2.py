"""Bad input ends pretrain_gpt2.py with one message that names the flag, and before torch comes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.train.trained import open_trained
from tests.data.samples import (
    change,
    forget_samples,
    write_data,
    write_data_of_tokenizer,
    write_tokenizer,
)
from tests.dist import PATIENCE

# Takes seconds to import, and a training step needs none of it.
HEAVY = (
    "dask datasets matplotlib numba pandas pyarrow scipy sympy tensorboard torch._dynamo "
    "torch._inductor torch.distributed.tensor transformers wandb"
)
# Runs the program and tells, on the last line, how it ended and whether torch had been imported, or
# else what of the above.
PROBE = f"""
import sys
from pretrain_gpt2 import main
environ = dict(word.split("=") for word in sys.argv[1].split())
try:
    main(sys.argv[2:], environ)
except SystemExit as stop:
    print(stop.code, "torch" in sys.modules)
else:
    print("imported", sorted(set("{HEAVY}".split()) & set(sys.modules)))
"""
SHAPE = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --max-position-embeddings 16"
REST = "--seq-length 16 --train-iters 2 --micro-batch-size 2 --split 1,1,0"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    prefix = tmp_path / "some_text_document"
    write_data(prefix, [[*range(1, 40), 0]] * 4)
    return prefix


def run(data: Path | str, words: str, environ: str = "") -> subprocess.CompletedProcess[str]:
    arguments = [*SHAPE.split(), *REST.split(), "--data-path", str(data), *words.split()]
    return subprocess.run(
        [sys.executable, "-c", PROBE, environ, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )


def refusal(data: Path | str, words: str, environ: str = "") -> str:
    """The message on standard error; fails unless the program refused before importing torch."""
    ended = run(data, words, environ)
    assert ended.stdout == "2 False\n", ended
    return ended.stderr


@pytest.mark.parametrize(
    ("words", "environ", "named"),
    [
        ("--tensor-model-parallel-size 3", "RANK=0 WORLD_SIZE=3", "--num-attention-heads"),
        ("--global-batch-size 3", "RANK=0 WORLD_SIZE=2", "--global-batch-size"),
        ("--tensor-model-parallel-size 2", "RANK=0 WORLD_SIZE=3", "--tensor-model-parallel-size"),
        ("", "WORLD_SIZE=2", "WORLD_SIZE"),
        ("", "RANK=0 WORLD_SIZE=two", "WORLD_SIZE"),
        ("--seq-length 17", "", "--seq-length"),
        ("--seq-length 17", "RANK=1 WORLD_SIZE=2", "rank 1: error: --seq-length"),
        ("--vocab-size 99", "", "--vocab-size"),
        ("--split 1,9999,0", "", "--split"),
        ("--split 0,1,0", "", "--split"),
        ("--loss-scale 8", "", "--loss-scale"),
        ("--fp16 --initial-loss-scale 2**x", "", "2**x"),
        ("--finetune", "", "--finetune"),
        ("--keep-checkpoints 1 --save x", "", "--keep-checkpoints"),
        ("--load nowhere", "", "--load"),
        ("--reset-attention-mask --data-path absent", "", "absent.idx"),
    ],
)
def test_one_line_names_the_flag(data: Path, words: str, environ: str, named: str) -> None:
    message = refusal(data, words, environ)
    assert "error: " in message
    assert named in message
    assert message.count("\n") == 1


def test_refuses_an_empty_data_set(data: Path) -> None:
    data.with_name(f"{data.name}.bin").write_bytes(b"")
    assert "some_text_document.bin" in refusal(data, "")


def test_refuses_the_data_of_another_tokenizer(data: Path, tmp_path: Path) -> None:
    vocabulary, merges = write_tokenizer(tmp_path)
    message = refusal(data, f"--vocab-file {vocabulary} --merge-file {merges}")
    assert "GPT2BPETokenizer" in message
    assert "test" in message


@pytest.mark.parametrize("words", ["--no-bf16", "--bf16", "--fp16", "--save {folder}"])
def test_a_step_imports_nothing_heavy_that_it_does_not_need(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # on a GPU steps are compiled
    ended = run(data, f"{words.format(folder=tmp_path / 'save')} --train-iters 1 --eval-iters 1")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1] == "imported []"


def test_checkpoints_hold_the_tokenizer_found_beside_the_data(tmp_path: Path) -> None:
    prefix = tmp_path / "own_text_document"
    tokenizer = write_data_of_tokenizer(prefix, [[*range(1, 40), 260]] * 4)
    save = tmp_path / "checkpoints"
    ended = run(prefix, f"--save {save} --eval-iters 0 --no-bf16")
    assert ended.returncode == 0, ended.stderr
    assert "no tokenizer" not in ended.stderr
    # Evaluation and generation need neither the data nor a flag.
    Path(f"{prefix}.tokenizer").rename(tmp_path / "elsewhere")
    folders, found, manifest = open_trained(TrainedConfig(load=str(save)), ParallelConfig(), 1)
    assert found.fingerprint == manifest["tokenizer"] == tokenizer.fingerprint
    assert {file.name for file in folders[0].iterdir()} == {
        "manifest.json", "merges.txt", "shard_00000.safetensors", "vocab.json",
    }  # fmt: skip
    again = run(prefix, f"--save {save} --load {save} --train-iters 3 --eval-iters 0")
    assert again.returncode == 0, again.stderr
    assert "no tokenizer" not in again.stderr  # that of --load goes on
    assert (save / "step_00000003" / "vocab.json").exists()


def test_warns_once_of_checkpoints_without_a_tokenizer(data: Path, tmp_path: Path) -> None:
    words = f"--save {tmp_path / 'new'} --split 0,1,0"
    for environ, count in (("", 1), ("RANK=0 WORLD_SIZE=1", 1), ("RANK=1 WORLD_SIZE=2", 0)):
        message = refusal(data, words, environ)  # for --split, after the warning
        assert message.count("warning: checkpoints will hold no tokenizer") == count
    assert "no tokenizer" not in refusal(data, "--split 0,1,0")  # saves none


def test_refuses_a_tokenizer_that_did_not_make_the_data_beside_it(tmp_path: Path) -> None:
    prefix = tmp_path / "own_text_document"
    write_data_of_tokenizer(prefix, [[*range(1, 40), 260]] * 4)
    other = refusal(prefix, "--tokenizer-type BertWordPiece")
    assert "--tokenizer-type" in other
    vocabulary = tmp_path / "own_text_document.tokenizer" / "vocab.json"
    vocabulary.write_text(vocabulary.read_text().replace("the", "teh"))
    assert "own_text_document.tokenizer" in refusal(prefix, "")


def test_refuses_an_unknown_key_of_a_preset(data: Path, tmp_path: Path) -> None:
    preset = tmp_path / "mine.toml"
    preset.write_text("num_layers = 2\nhiden_size = 32\n")
    message = refusal(data, f"--preset {preset}")
    assert "mine.toml: hiden_size" in message
    assert "hidden_size" in message


def test_trains_in_this_process_and_resumes_only_what_fits(data: Path, tmp_path: Path) -> None:
    save = tmp_path / "checkpoints"
    ended = run(data, f"--save {save} --eval-iters 1 --log-interval 1 --no-bf16")
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2]
    assert any("validation_loss" in line for line in lines)

    message = refusal(data, f"--load {save} --seed 5")
    assert "--seed" in message
    assert "1234" in message
    message = refusal(data, f"--load {save} --num-layers 3")
    assert "--num-layers" in message
    message = refusal(data, f"--load {save} --fp16")
    assert "--fp16" in message
    message = refusal(data, f"--save {save}")
    assert f"--save {save}" in message
    forget_samples(data)
    change(data, ".bin", 0, b"\x09")
    (kept,) = json.loads((save / "step_00000002" / "manifest.json").read_text())["data"]
    message = refusal(data, f"--load {save}")  # under a .json that knows no more than the counts
    assert kept.rpartition(" ")[2] in message
    assert "--override-data" in message
    used = json.loads(data.with_name(f"{data.name}.json").read_text())["bin_sha256"]
    other = write_data(data, [[*range(2, 41), 0]] * 4).bin_sha256
    message = refusal(data, f"--load {save}")
    assert "--data-path" in message
    assert used in message
    assert other in message
    write_data(data, [[*range(1, 40), 0]] * 4, vocab_size=110)  # more ids than the model has rows
    assert "--vocab-size" in refusal(data, f"--load {save}")
