"""pretrain_bert.py as its users run it: layouts, resuming, precision, and what it refuses."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.config.training import BertDataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.train.inputs import open_bert_data
from tests.data.samples import (
    write_data,
    write_data_of_tokenizer,
    write_sentences,
    write_tokenizer_json,
    write_wordpiece,
)
from tests.programs import assert_equal_bits, newest, pretrain

KIND = "BertWordPieceLowerCase"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Documents of a few sentences, in which a word is often followed by the next one."""
    vocabulary = write_wordpiece(tmp_path)
    tokenizer = build_tokenizer(KIND, vocabulary, None)
    random, prefix = np.random.default_rng(0), tmp_path / "some_text_sentence"
    documents = [
        [(5 + start + np.arange(6)) % tokenizer.vocab_size for start in random.integers(60, size=7)]
        for _ in range(30)
    ]
    write_sentences(
        prefix, documents, fingerprint=tokenizer.fingerprint, vocab_size=tokenizer.vocab_size
    )
    return prefix


def run(data: Path, words: str, *, world: int = 1, code: int = 0) -> str:
    """What the program printed; fails where it ends otherwise than with `code`."""
    words = f"--vocab-file {data.with_name('vocab.txt')} {words}"
    folder = data.parent
    with pretrain(words, world=world, folder=folder, program="pretrain_bert", data=data) as each:
        codes = each.wait()
        assert codes == [code] * world, each.text()
        return each.text(0)


def losses(save: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (save / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "loss" in k} for line in lines if "mlm_loss" in line]


ONE_BY_ONE = "--train-iters 4 --log-interval 1 --lr 1e-3"


def test_layouts_agree_and_resuming_is_exact(data: Path, tmp_path: Path) -> None:
    """Dropout included."""
    run(data, f"{ONE_BY_ONE} --save {tmp_path}/whole")
    run(data, f"{ONE_BY_ONE} --exit-interval 2 --save {tmp_path}/half")
    run(data, f"{ONE_BY_ONE} --save {tmp_path}/half --load {tmp_path}/half")
    assert_equal_bits(newest(tmp_path / "whole"), newest(tmp_path / "half"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "half")

    two = f"{ONE_BY_ONE} --tensor-model-parallel-size 2"
    run(data, f"{two} --save {tmp_path}/tensor", world=2)
    run(data, f"{two} --sequence-parallel --save {tmp_path}/sequence", world=2)
    run(data, f"{ONE_BY_ONE} --save {tmp_path}/data", world=2)
    expected = losses(tmp_path / "whole")
    assert len(expected) == 4
    assert set(expected[0]) == {"loss", "mlm_loss", "sop_loss"}
    for name in ("tensor", "sequence", "data"):
        for one, other in zip(losses(tmp_path / name), expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_it_learns_in_every_precision_and_order(data: Path, tmp_path: Path) -> None:
    ends = {}
    in_fp32 = [("--no-bf16", "pre-ln"), ("--no-bf16", "post-ln")]
    for precision, order in [*in_fp32, ("--bf16", "post-ln"), ("--fp16", "post-ln")]:
        save = tmp_path / f"{order}{precision}"
        run(
            data,
            f"{precision} --residual-order {order} --train-iters 60 --log-interval 10 --lr 3e-3 "
            f"--hidden-dropout 0 --attention-dropout 0 --save {save}",
        )
        curve = [line["mlm_loss"] for line in losses(save)]
        assert curve[-1] < curve[0] - 0.2
        ends[precision] = curve[-1]
    assert ends["--bf16"] == pytest.approx(ends["--no-bf16"], abs=0.2)
    assert ends["--fp16"] == pytest.approx(ends["--no-bf16"], abs=0.2)


def test_narrow_precision_resumes_exactly_over_two_ranks(data: Path, tmp_path: Path) -> None:
    words = (
        f"{ONE_BY_ONE} --bf16 --residual-order post-ln --recompute-granularity full "
        "--tensor-model-parallel-size 2 --check-replicas-interval 1"
    )
    run(data, f"{words} --save {tmp_path}/whole", world=2)
    run(data, f"{words} --exit-interval 2 --save {tmp_path}/half", world=2)
    run(data, f"{words} --save {tmp_path}/half --load {tmp_path}/half", world=2)
    assert_equal_bits(newest(tmp_path / "whole"), newest(tmp_path / "half"))


def test_the_samples_are_those_that_the_flags_ask_for(data: Path) -> None:
    vocabulary = str(data.with_name("vocab.txt"))
    section = BertDataConfig(data_path=(str(data),), vocab_file=vocabulary, seq_length=16)
    numbers = range(40)
    plain = open_bert_data(section, 1)[1].train.batch(numbers)
    for name, value in (
        ("mask_prob", 0.4),
        ("short_seq_prob", 0.9),
        ("max_ngram_size", 1),
        ("seq_length", 12),
    ):
        _, inputs = open_bert_data(replace(section, **{name: value}), 1)
        other = inputs.train.batch(numbers)
        assert other.tokens.shape != plain.tokens.shape or (other.tokens != plain.tokens).any(), (
            name
        )
    assert (open_bert_data(section, 2)[1].train.batch(numbers).tokens != plain.tokens).any()
    assert (open_bert_data(section, 1)[1].train.batch(numbers).tokens == plain.tokens).all()


def test_without_a_preset_the_rate_falls_linearly_to_nothing(data: Path, tmp_path: Path) -> None:
    words = "--train-iters 4 --log-interval 1 --lr-warmup-iters 1"
    run(data, f"{words} --save {tmp_path}/run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rates = [line["lr"] for line in map(json.loads, lines) if "lr" in line]
    assert rates == pytest.approx([1e-4, 2e-4 / 3, 1e-4 / 3, 0.0])


def test_each_program_names_the_data_that_it_reads(data: Path, tmp_path: Path) -> None:
    documents = tmp_path / "gpt2_text_document"
    write_data_of_tokenizer(documents, [[*range(1, 40), 260]] * 4)
    words = "--train-iters 1"
    with pretrain(words, folder=tmp_path, program="pretrain_bert", data=documents) as each:
        assert each.wait() == [2]
        assert str(documents) in each.text()
    with pretrain(words, folder=tmp_path, data=data) as each:
        assert each.wait() == [2]
        assert str(data) in each.text()


def test_a_run_goes_on_with_its_own_model_and_samples_alone(data: Path, tmp_path: Path) -> None:
    run(data, f"{ONE_BY_ONE} --train-iters 1 --save {tmp_path}/run")
    again = f"{ONE_BY_ONE} --load {tmp_path}/run --save {tmp_path}/run"
    for flag, value in (
        ("--residual-order", "post-ln"),
        ("--mask-prob", "0.2"),
        ("--short-seq-prob", "0"),
    ):
        assert flag in run(data, f"{again} {flag} {value}", code=2)
    gpt2 = tmp_path / "gpt2_text_document"
    write_data(gpt2, [[*range(1, 40), 0]] * 4)
    words = f"--load {tmp_path}/run --train-iters 2"
    with pretrain(words, folder=tmp_path, data=gpt2) as each:
        assert each.wait() == [2]
        assert f"{tmp_path}/run" in each.text()


def test_data_of_whole_documents_is_refused(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other_text_document"
    vocabulary = data.with_name("vocab.txt")
    tokenizer = build_tokenizer(KIND, str(vocabulary), None)
    write_sentences(other, [[[5, 6, 7]]] * 4, fingerprint=tokenizer.fingerprint)
    file = other.with_name(f"{other.name}.json")
    content = json.loads(file.read_text())
    size = tokenizer.vocab_size
    file.write_text(json.dumps({**content, "sentences": None, "vocab_size": size}))
    assert "--split-sentences" in run(other, ONE_BY_ONE, code=2)


def test_a_tokenizer_that_is_no_wordpiece_is_refused(tmp_path: Path) -> None:
    folder = write_tokenizer_json(tmp_path / "json")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", folder, None)
    facts = {"tokenizer_type": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    prefix = tmp_path / "some_text_sentence"
    write_sentences(prefix, [[[5, 6, 7]]] * 4, fingerprint=tokenizer.fingerprint, **facts)
    words = f"{ONE_BY_ONE} --tokenizer-type {tokenizer.kind} --tokenizer-model {folder}"
    assert "WordPiece" in run(prefix, words, code=2)


def test_too_short_a_sequence_is_refused(data: Path) -> None:
    said = run(data, f"{ONE_BY_ONE} --seq-length 4", code=2)
    assert "--seq-length" in said
    run(data, f"{ONE_BY_ONE} --seq-length 5")
