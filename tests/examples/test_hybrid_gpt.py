"""Source B: GPT-2 XL hybrid parallel, a small one here, by its example and by pretrain_gpt2.py."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

import pretrain_gpt2
from examples import hybrid_gpt
from tests.data.samples import write_tokenizer
from tests.programs import start_ranks

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "--num-layers": 4,
    "--hidden-size": 32,
    "--num-attention-heads": 4,
    "--seq-length": 24,
    "--train-iters": 3,
}
SERIAL = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files, and web.jsonl with documents of which some are cut and most are padded."""
    folder, random = tmp_path_factory.mktemp("hybrid"), Random(0)
    write_tokenizer(folder)
    texts = ["".join(random.choices("abcdefg ", k=random.randint(1, 30))) + "x" for _ in range(60)]
    (folder / "web.jsonl").write_text("".join(f"{json.dumps({'text': t})}\n" for t in texts))
    return folder


def flags_of(folder: Path, **more: Any) -> list[str]:
    given = {
        "--data-path": folder / "web.jsonl",
        "--vocab-file": folder / "vocab.json",
        "--merge-file": folder / "merges.txt",
        **SMALL,
    }
    return [str(word) for pair in given.items() for word in pair]


def lines(file: Path) -> list[dict[str, Any]]:
    found = map(json.loads, file.read_text().splitlines())
    return [each for each in found if "loss" in each]


def losses(file: Path) -> list[float]:
    return [each["loss"] for each in lines(file)]


def example(flags: list[str]) -> None:
    sys.argv = ["hybrid_gpt.py", *flags]
    hybrid_gpt.main()


def run_example(folder: Path, place: Path, words: str, world: int = 1) -> None:
    """Its record is in `place`."""
    flags = [*flags_of(folder), "--num-micro-batches", "12", "--log-dir", str(place)]
    place.mkdir()
    target = partial(example, [*flags, *words.split()])
    with start_ranks(target, range(world), world, place) as started:
        assert started.wait() == [0] * world, started.text()


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    run_example(folder, folder / "serial", f"{SERIAL} --precision fp32")
    return losses(folder / "serial" / "metrics.jsonl")


def test_four_processes_are_one(folder: Path, serial: list[float], tmp_path: Path) -> None:
    """By torchrun and the default layout: interleaved stages 2 x tensor 2."""
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    command += ["examples/hybrid_gpt.py", *flags_of(folder), "--log-dir", str(tmp_path)]
    command += ["--num-micro-batches", "12", "--precision", "fp32"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    found = lines(tmp_path / "metrics.jsonl")
    assert [each["loss"] for each in found] == pytest.approx(serial, rel=1e-6)
    assert len(set(serial)) == 3
    assert all(each["tokens_per_second"] > 0 for each in found)
    assert all(each["peak_memory_bytes"] > 2**20 for each in found)
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert list(folder.glob(".web.jsonl.*.tokens"))


def test_a_toml_file_and_pretrain_gpt2_are_the_same_run(
    folder: Path, serial: list[float], tmp_path: Path
) -> None:
    """The preset of the full size, then a file with what is smaller here."""
    small = {name[2:].replace("-", "_"): value for name, value in SMALL.items()}
    small |= {"global_batch_size": 12, "max_position_embeddings": SMALL["--seq-length"]}
    preset = tmp_path / "small.toml"
    preset.write_text("".join(f"{key} = {value}\n" for key, value in small.items()))
    words = f"--preset gpt2_xl_colossalai --preset {preset} --pad --cache-tokens --split 1,0,0"
    words += " --no-fp16 --no-bf16 --log-interval 1 --eval-iters 0"
    words += " --num-virtual-stages-per-pipeline-rank 2"
    words += f" --metrics-file {tmp_path}/metrics.jsonl --tensorboard-dir {tmp_path}/board"
    flags = [*words.split(), *flags_of(folder)]
    with start_ranks(partial(program, flags), range(4), 4, tmp_path) as started:
        assert started.wait() == [0] * 4, started.text()
    found = lines(tmp_path / "metrics.jsonl")
    assert [each["loss"] for each in found] == pytest.approx(serial, rel=1e-6)
    assert [each["lr"] for each in found] == [hybrid_gpt.LR] * 3


def program(flags: list[str]) -> None:
    pretrain_gpt2.main(flags, os.environ)


def test_in_fp16_pipeline_stages_change_no_bit(folder: Path, tmp_path: Path) -> None:
    run_example(folder, tmp_path / "one", SERIAL)
    run_example(folder, tmp_path / "two", "--tensor-model-parallel-size 1", world=2)
    one, two = (lines(tmp_path / name / "metrics.jsonl") for name in ("one", "two"))
    for name in ("loss", "loss_scale", "skipped_steps"):
        assert [each[name] for each in one] == [each[name] for each in two]
    assert one[0]["loss_scale"] > 1
