"""Each question once, in miniature, as its users run it: all contenders have figures, and what is
known of these beforehand is so."""

import json
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import (
    activations,
    commits,
    data,
    huggingface,
    llama,
    pipeline,
    tensor_modes,
    zero,
)
from benchmarks.data_path import CACHE, DISK, DOCUMENT, SPARSE, SPLIT, configure, write_sparse
from benchmarks.harness import Flags
from benchmarks.report import Results
from megatron.data.indexed import IndexedDataset
from tests.benchmarks.run import ROOT, figures, run
from tools.layouts.job import open_samples

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
SIZES = "--num-layers 2 --hidden-size 96 --num-attention-heads 4 --seq-length 32 --vocab-size 512"
GPT2 = f"{SIZES} --max-position-embeddings 32"
STAGES = GPT2.replace("layers 2", "layers 4")
LLAMA = "--num-layers 1 --hidden-size 96 --ffn-hidden-size 192 --seq-length 32 --vocab-size 512"
ONE_RANK = "quickstart, fp32, t = 1"
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
    logits = 8_000 * 16_000 * 4  # bytes
    assert at_once["peak_bytes"] - at_once["held"] > logits
    assert chunked["peak_bytes"] - chunked["held"] < logits / 1.5
    assert chunked["held"] == 16_000 * 16 * (4 + 4) + 2 * 8_000 * 16 * 4


def of_compiled(record: Record, folder: Path) -> None:
    h, group = 64, "a block of gpt2"
    own, its = (figures(record, name, group) for name in (OURS, "plain torch"))
    assert own["copied"] == its["copied"] == 16 * 3 * h * 2  # gradients of q, k and v, together
    assert figures(record, OURS, "12 layers, the host")["steps"] == 10


def of_activations(record: Record, folder: Path) -> None:
    names = "selective", "selective, sequence parallel"
    whole = figures(record, names[0], "t = 1")
    cut, stream = (figures(record, name, "t = 4") for name in names)
    assert (whole["sent"], whole["formula"], stream["formula"]) == (0, 34, 34 / 4)
    assert stream["kept"] == pytest.approx(whole["kept"] / 4, rel=0.01)
    assert stream["kept"] < cut["kept"] < whole["kept"]
    # Four all-reduces of the stream in bf16; or reduce-scatters and gathers, one more each way.
    assert cut["sent"] == 4 * 2 * 2 * 3 / 4
    assert stream["sent"] > 5 / 4 * cut["sent"]


def of_train_step(record: Record, folder: Path) -> None:
    for size in (1, 2):
        group = f"quickstart, fp32, t = {size}"
        assert "tokens" in figures(record, OURS, group)
        assert "tokens" not in figures(record, "floor", group)
        profile = folder / "profile" / f"quickstart_fp32_t_=_{size}_this_project.txt"
        assert "aten::mm" in profile.read_text()


def of_growth(record: Record, folder: Path) -> None:
    alone, pair = record["contenders"]
    assert alone["facts"]["flops"] == pytest.approx(2 * pair["facts"]["flops"], rel=0.01)
    for each in (alone, pair):
        assert each["rounds"][0]["rank_bytes"] > 2**20


def of_scaling(record: Record, folder: Path) -> None:
    one, model = (each["rounds"][0] for each in record["contenders"][:2])
    assert one["tokens"] == 8 * 128
    assert {*model} & {"tensor", "data"} == {"tensor"}
    assert record["contenders"][2]["reason"] == "takes 4 ranks, there are 2"


def of_data_path(record: Record, folder: Path) -> None:
    for name in (CACHE, DISK, SPARSE):
        found = figures(record, name)
        assert 0.5 < found["tokens"] / (32 * 64 * 1024) <= 1
        assert found["opened"] < 2**25 > found["peak_bytes"]
    assert found["index"] > 10**10


# Of each question words, names of contenders that run, and what is known of their figures.
QUESTIONS: dict[str, tuple[Sequence[object], Sequence[str], Callable[..., None] | None]] = {
    "checkpoints": (
        ["--preset", "{preset}", "--directory", "{folder}/disk"],
        ["synchronous save", "asynchronous save", "verify and load"], of_checkpoints,
    ),
    "safeguards": ([], ["check"], of_safeguards),
    "output_layer": (
        ["--vocab-size", 16_000, "--hidden-size", 16, "--tokens", 8_000, "--tensor-parallel", 1],
        [], of_output_layer,
    ),
    "compiled": (
        ["--hidden-size", 64, "--tokens", 16, "--groups", "gpt2", "host", "--backend", "aot_eager"],
        ["this project", "plain torch"], of_compiled,
    ),
    "activations": (
        ["--tensor-parallel", 1, 4],
        ["selective", "selective, sequence parallel", "host reads"], of_activations,
    ),
    "train_step": (
        ["--presets", "quickstart", "--dtypes", "fp32", "--tensor-parallel", 1, 2,
         "--program-flags", GPT2, "--profile", "{folder}/profile"],
        [OURS, "plain torch", "DTensor", "floor"], of_train_step,
    ),
    "growth": (["--preset", "{preset}", "--axes", "ranks"], ["1", "2"], of_growth),
    "commits": (["--against", ROOT, "--groups", ONE_RANK, "--turns", 2], [], None),
    "scaling": (
        [], [f"{size}, t x d = {t} x 1" for size, t in
             (("1.2B, 8 heads", 1), ("2.5B, 10 heads", 2), ("4.2B, 12 heads", 4))], of_scaling,
    ),
    "pipeline": (
        ["--micro-batches", 2, "--dtypes", "fp32", "--program-flags", STAGES,
         "--schedules", "interleaved", "--scopes", pipeline.UPDATE,
         "--bubble-schedules", "gpipe", "--bubble-micro-batches", 2, 1],
        [], None,
    ),
    "tensor_modes": (
        ["--hidden-sizes", 64, "--tokens", 128, "--dtypes", "fp32"],
        [tensor_modes.ONE, tensor_modes.SUMMA], None,
    ),
    "zero": (
        ["--dtypes", "fp32", "--stages", 3, "--program-flags", SIZES],
        [zero.OURS, zero.FULLY_SHARD], None,
    ),
    "llama": (
        ["--dtypes", "fp32", "--program-flags", LLAMA],
        [llama.OURS, llama.TRANSFORMERS, llama.OWN_HEADS], None,
    ),
    "huggingface": (
        ["--models", "llama", "--dtypes", "fp32", "--program-flags", LLAMA],
        [huggingface.BY_PLAN, huggingface.TRANSFORMERS, huggingface.TORCH], None,
    ),
    "data_path": (["--tokens", 3_000_000], [], of_data_path),
}  # fmt: skip


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_is_answered_in_miniature(question: str, tmp_path: Path) -> None:
    words, names, check = QUESTIONS[question]
    places = {"folder": tmp_path, "preset": tmp_path / "preset.toml"}
    places["preset"].write_text(PRESET)
    given = [str(word).format(**places) for word in words]
    if "--program-flags" in given:  # whose value begins with dashes
        at = given.index("--program-flags")
        given[at : at + 2] = ["=".join(given[at : at + 2])]
    record = run(tmp_path, question, *given, *(["--contenders", *names] if names else []))
    found = [each for each in record["contenders"] if not each["reason"]]
    left = {each["name"] for each in record["contenders"]} - {each["name"] for each in found}
    assert not left or question == "scaling"
    assert {each["name"] for each in found} | left >= {*names}
    assert all(len(each["rounds"]) == 1 for each in found)
    assert record["page"].startswith("# ")
    if check is not None:
        check(record, tmp_path)


@pytest.mark.parametrize("reads", [1, 2])
def test_a_step_that_reads_more_than_once_is_a_failure(reads: int) -> None:
    only = {"group": "step", "name": "host reads", "first": "host reads", "reason": "", "facts": {}}
    found = Results(activations.QUESTION, {"contenders": [only | {"rounds": [{"reads": reads}]}]})
    assert bool(activations.QUESTION.failure(found)) is (reads > 1)


@pytest.mark.skipif(find_spec("megatron.core") is None, reason="megatron-core is not installed")
def test_megatron_core_trains_the_same_model(tmp_path: Path) -> None:
    words = ["--presets", "quickstart", "--dtypes", "fp32", "--tensor-parallel", 1, 2]
    words += [f"--program-flags={GPT2}", "--contenders", OURS, "Megatron-Core"]
    record = run(tmp_path, "train_step", *words)
    for size in (1, 2):
        assert figures(record, "Megatron-Core", f"quickstart, fp32, t = {size}")["peak_bytes"] > 0


def test_losses_of_a_commit_are_compared_unless_elements_are_dropped() -> None:
    for dropout, same in ((0.0, {"losses": 0}), (0.1, {})):
        found = commits.contenders(Flags(), str(ROOT), commits.GROUPS[:1], dropout)
        assert [each.same for each in found] == [same, same]
    with pytest.raises(ValueError, match="^--against no-such-commit"):
        next(commits.contenders(Flags(), "no-such-commit"))


def test_sources_of_data_are_read_and_trained_on(tmp_path: Path) -> None:
    documents, words, samples, steps_of_run, batch = 900, 40, 32 * 64, 2, 4
    text = tmp_path / "text.jsonl"
    text.write_text(f"{json.dumps({'text': ' word' * words})}\n" * documents)
    rows = {data.threads(name, 2): True for name in (data.LINES, data.SAVED, data.PARQUET)}
    rows |= {data.threads(name, 1): False for name in (data.PACKED, "mock")}
    flags = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16"
    flags += " --max-position-embeddings 16"
    given = ["--text", text, "--vocab-size", 270, "--steps", steps_of_run]
    record = run(tmp_path, "data", *given, f"--program-flags={flags}", "--contenders", *rows)
    for row, is_padded in rows.items():
        found = figures(record, row, data.READING)
        assert found["tokens"] == samples * (words + 1 if is_padded else 1024)
        assert found["places"] == samples * 1024
        step = figures(record, row, data.TRAINING)
        assert step["tokens"] == step["places"] == steps_of_run * batch * 16
        assert step.get("cut") == (steps_of_run * batch if is_padded else None)


def test_a_text_is_evaluated_once_and_again_by_article(tmp_path: Path, test_data: Path) -> None:
    files = ["--wikitext-data", test_data / "wikitext103" / "wiki.valid.tokens"]
    files += ["--tokenizer", test_data / "gpt2"]
    record = run(tmp_path, "evaluation", "--characters", 2000, *files)
    found = [each["rounds"][0] for each in record["contenders"]]
    assert len(found) == 3  # and equal sums, which the question itself compares
    assert len({each["tokens"] for each in found}) == 1


def test_the_sparse_data_set_opens_as_a_whole_one(tmp_path: Path) -> None:
    write_sparse(tmp_path / "p", 909_090_909)
    data = IndexedDataset(str(tmp_path / "p"))
    assert data.num_tokens == data.num_documents * DOCUMENT == 999_999_999_900
    assert sum(512 * file.stat().st_blocks for file in tmp_path.iterdir()) < 2**20
    train, _ = open_samples(configure("--split", SPLIT, "--data-path", f"{tmp_path}/p"))
    assert train.samples_per_epoch == pytest.approx(0.949e12 / 1024)
    assert not train.batch(range(10**8, 10**8 + 4)).tokens.any()
