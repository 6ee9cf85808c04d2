"""Source B: GPT-2 XL hybrid parallel, a small one here, by its example and by pretrain_gpt2.py."""

from pathlib import Path

import pytest

from examples import hybrid_gpt
from tests.data.samples import short_texts, write_texts, write_tokenizer
from tests.programs import lines_of, run_script, values_of

ROOT = Path(__file__).resolve().parents[2]
SMALL = {
    "num_layers": 4,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "seq_length": 24,
    "train_iters": 3,
}
SERIAL = "--pipeline-model-parallel-size 1 --tensor-model-parallel-size 1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizer files, and web.jsonl with documents of which some are cut and most are padded."""
    folder = tmp_path_factory.mktemp("hybrid")
    write_tokenizer(folder)
    write_texts(folder / "web.jsonl", short_texts(60, 30))
    return folder


def run(program: str, folder: Path, place: Path, words: str, *, world: int = 1) -> None:
    """place: of the logs."""
    place.mkdir(exist_ok=True)
    files = f"--data-path {folder}/web.jsonl --vocab-file {folder}/vocab.json"
    small = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in SMALL.items())
    flags = f"{files} --merge-file {folder}/merges.txt {small} {words}"
    run_script(ROOT / program, *flags.split(), world=world, folder=place)


def run_example(folder: Path, place: Path, words: str = "", *, world: int = 1) -> None:
    """Its record is in `place`."""
    words = f"--num-micro-batches 4 --log-dir {place} {words}"
    run("examples/hybrid_gpt.py", folder, place, words, world=world)


@pytest.fixture(scope="module")
def serial(folder: Path) -> list[float]:
    run_example(folder, folder / "serial", f"{SERIAL} --precision fp32")
    found = values_of(folder / "serial")
    assert len(set(found)) == 3
    return found


def test_four_processes_are_one(folder: Path, serial: list[float], tmp_path: Path) -> None:
    """By the default layout: interleaved stages 2 x tensor 2."""
    run_example(folder, tmp_path, "--precision fp32", world=4)
    found = lines_of(tmp_path)
    assert [each["loss"] for each in found] == pytest.approx(serial, rel=1e-6)
    assert all(each["tokens_per_second"] > 0 for each in found)
    assert all(each["peak_memory_bytes"] > 2**20 for each in found)
    assert list(tmp_path.glob("events.out.tfevents.*"))
    assert list(folder.glob(".web.jsonl.*.tokens"))


def test_a_toml_file_and_pretrain_gpt2_are_the_same_run(
    folder: Path, serial: list[float], tmp_path: Path
) -> None:
    """The preset of the full size, then a file with what is smaller here."""
    small = SMALL | {"global_batch_size": 4, "max_position_embeddings": SMALL["seq_length"]}
    preset = tmp_path / "small.toml"
    preset.write_text("".join(f"{key} = {value}\n" for key, value in small.items()))
    words = f"--preset gpt2_xl_colossalai --preset {preset} --pad --cache-tokens --split 1,0,0"
    words += " --no-fp16 --no-bf16 --log-interval 1 --eval-iters 0"
    words += " --num-virtual-stages-per-pipeline-rank 2"
    words += f" --metrics-file {tmp_path}/metrics.jsonl --tensorboard-dir {tmp_path}/board"
    run("pretrain_gpt2.py", folder, tmp_path, words, world=4)
    assert values_of(tmp_path) == pytest.approx(serial, rel=1e-6)
    assert values_of(tmp_path, "lr") == [hybrid_gpt.LR] * 3


def test_in_fp16_pipeline_stages_change_no_bit(folder: Path, tmp_path: Path) -> None:
    run_example(folder, tmp_path / "one", SERIAL)
    run_example(folder, tmp_path / "two", "--tensor-model-parallel-size 1", world=2)
    one, two = (lines_of(tmp_path / name) for name in ("one", "two"))
    for name in ("loss", "loss_scale", "skipped_steps"):
        assert [each[name] for each in one] == [each[name] for each in two]
    assert one[0]["loss_scale"] > 1
