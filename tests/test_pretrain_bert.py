"""pretrain_bert.py as its users run it: layouts, resuming, precision, and what it refuses."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import pretrain_bert
import pretrain_gpt2
from megatron.config.training import BertDataConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.train.inputs import open_bert_data
from tests.data.samples import (
    write_data_of_tokenizer,
    write_sentences,
    write_tokenizer_json,
    write_wordpiece,
)
from tests.programs import arguments_of, assert_equal_bits, finished, lines_of, newest, values_of
from tests.refusals import refusal

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


def run(data: Path, words: str, *, world: int = 1) -> str:
    words = f"--vocab-file {data.with_name('vocab.txt')} {words}"
    return finished(words, world=world, folder=data.parent, program="pretrain_bert", data=data)


def losses(save: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in line.items() if "loss" in k} for line in lines_of(save, "mlm_loss")]


ONE_BY_ONE = "--train-iters 4 --log-interval 1"


def test_layouts_agree_and_resuming_is_exact(data: Path, tmp_path: Path) -> None:
    """Dropout included; without a preset the rate falls linearly to nothing."""
    words = f"{ONE_BY_ONE} --lr-warmup-iters 1"
    run(data, f"{words} --save {tmp_path}/whole")
    assert values_of(tmp_path / "whole", "lr") == pytest.approx([1e-4, 2e-4 / 3, 1e-4 / 3, 0.0])
    run(data, f"{words} --exit-interval 2 --save {tmp_path}/half")
    run(data, f"{words} --save {tmp_path}/half --load {tmp_path}/half")
    assert_equal_bits(newest(tmp_path / "whole"), newest(tmp_path / "half"))
    assert losses(tmp_path / "whole") == losses(tmp_path / "half")

    two = f"{words} --tensor-model-parallel-size 2"
    run(data, f"{two} --sequence-parallel --save {tmp_path}/sequence", world=2)
    run(data, f"{words} --save {tmp_path}/data", world=2)
    ring, save = "--context-parallel-size 2 --cp-comm-type p2p", f"--save {tmp_path}/ring"
    run(data, f"{words} {ring} --exit-interval 2 {save}", world=2)
    run(data, f"{words} {save} --load {tmp_path}/ring")  # and on at one process
    expected = losses(tmp_path / "whole")
    assert len(expected) == 4
    assert set(expected[0]) == {"loss", "mlm_loss", "sop_loss"}
    for name in ("sequence", "data", "ring"):
        for one, other in zip(losses(tmp_path / name), expected, strict=True):
            assert one == pytest.approx(other, rel=1e-5)


def test_the_samples_are_those_that_the_flags_ask_for(data: Path) -> None:
    vocabulary = str(data.with_name("vocab.txt"))
    config = BertDataConfig(data_path=(str(data),), vocab_file=vocabulary, seq_length=16)
    plain = open_bert_data(config, 1)[1].train.batch(range(40)).tokens
    settings = {"mask_prob": 0.4, "short_seq_prob": 0.9, "max_ngram_size": 1, "seq_length": 12}
    for name, value in settings.items():
        other = open_bert_data(replace(config, **{name: value}), 1)[1].train.batch(range(40)).tokens
        assert other.shape != plain.shape or (other != plain).any(), name
    for seed in (1, 2):
        again = open_bert_data(config, seed)[1].train.batch(range(40)).tokens
        assert (again == plain).all() == (seed == 1)


def test_data_and_settings_that_do_not_fit_are_refused(data: Path, tmp_path: Path) -> None:
    """The data of the other program and of another tokenizer, and another model and samples."""
    vocabulary = str(data.with_name("vocab.txt"))
    run(data, f"{ONE_BY_ONE} --train-iters 1 --save {tmp_path}/run")
    gpt2, other = (tmp_path / name for name in ("gpt2", "other"))
    write_data_of_tokenizer(gpt2, [[*range(1, 40), 260]] * 4)
    model = write_tokenizer_json(tmp_path / "json")
    tokenizer = build_tokenizer("HuggingFaceTokenizer", model, None)
    own = {"tokenizer_type": tokenizer.kind, "vocab_size": tokenizer.vocab_size}
    write_sentences(other, [[[5, 6, 7]]] * 4, fingerprint=tokenizer.fingerprint, **own)
    load = f"--load {tmp_path}/run --save {tmp_path}/run"
    for program, prefix, words, field in (
        (pretrain_bert.main, gpt2, "", "--data-path"),
        (pretrain_gpt2.main, data, "", "--data-path"),
        (pretrain_bert.main, data, f"{load} --residual-order post-ln", "--residual-order"),
        (pretrain_bert.main, data, f"{load} --mask-prob 0.2", "--mask-prob"),
        (pretrain_bert.main, data, f"{load} --short-seq-prob 0", "--short-seq-prob"),
        (pretrain_bert.main, data, "--seq-length 4", "--seq-length"),
        (pretrain_gpt2.main, gpt2, f"--load {tmp_path}/run", "--load"),
    ):
        arguments = arguments_of(f"--train-iters 1 {words}", prefix)
        if program is pretrain_bert.main and prefix is not gpt2:
            arguments += ["--vocab-file", vocabulary]
        refusal(partial(program, arguments, {}), field=field)
    words = f"--train-iters 1 --tokenizer-type {tokenizer.kind} --tokenizer-model {model}"
    refusal(lambda: pretrain_bert.main(arguments_of(words, other), {}), field="--vocab-file")
    run(data, f"{ONE_BY_ONE} --seq-length 5")
