"""Samples of a model in training: the text of generate.py, at every layout that trains."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.config.launch import Stopped
from megatron.errors import UsageError
from megatron.inference.generate import Sampling, generate
from megatron.inference.samples import TextSamples, continue_texts
from megatron.parallel.mesh import serial_mesh
from megatron.train.state import TrainState
from tests.dist import Pool, on_ranks
from tests.refusals import refusal
from tests.tiny import SEQUENCE, VOCABULARY, state_at, tiny_config
from tests.train.test_callbacks import run
from tests.train.test_loop import lines
from tools.layouts.layout import parse_layout

PROMPTS = [[5, 6], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9], [99, 100, 0, 1], [5, 6]]
SAMPLING = Sampling(SEQUENCE - 9, top_k=20, seed=5)
ENDS = range(30, 45)  # so many that some texts end early


state_of = partial(state_at, config=tiny_config(num_layers=4))


def continued(
    state: TrainState,
    prompts: list[list[int]] = PROMPTS,
    sampling: Sampling = SAMPLING,
    ends: Sequence[int] = (),
    batch: int = 1,
    **more: Any,
) -> list[list[int]]:
    sizes = {"seq_length": SEQUENCE, "micro_batch_size": batch}
    return continue_texts(state, prompts, sampling, ends=ends, **sizes, **more)


def written(name: str, batch: int = 2) -> list[list[int]]:
    state = state_of(name)
    assert state.model.training
    new = continued(state, ends=ENDS, batch=batch)
    assert state.model.training
    return new


def test_the_text_is_that_of_generation_at_every_layout(gloo: Pool) -> None:
    model = state_of("serial").model.eval()
    expected = generate(model, serial_mesh(), PROMPTS, SAMPLING, ends=ENDS)
    assert len({len(each) for each in expected}) > 2, "some end early"
    assert expected[0] != expected[4], "one prompt, two numbers"
    assert written("serial") == written("serial", 5) == expected
    for name in (
        "tensor=2,sequence",
        "data=2,zero=3",
        "context=2:p2p",
        "tensor=2,pipeline=2,virtual=2",
        "tensor=4:2d",
    ):
        for found in gloo.run(parse_layout(name).ranks, written, name):
            assert found == expected, name


@on_ranks(2)
def test_a_signal_to_one_rank_ends_the_samples_of_all() -> None:
    """It comes before the third forward."""
    state, counts = state_of("data=2"), []
    rank = state.mesh.control.rank

    def wants_stop() -> bool:
        counts.append(0)
        return rank == 1 and len(counts) == 3

    with pytest.raises(Stopped):
        continued(state, wants_stop=wants_stop)
    assert len(counts) == 3


def test_nothing_is_computed_when_all_texts_have_ended() -> None:
    calls, ends = list[int](), range(VOCABULARY)
    continued(state_of("serial"), [[1]], ends=ends, wants_stop=lambda: bool(calls.append(1)))
    assert len(calls) == 2


def test_a_text_ends_where_the_sequence_ends() -> None:
    """A long prompt takes no room of a short one."""
    prompts, sampling = [[5] * (SEQUENCE - 1), [7]], Sampling(SEQUENCE + 9, seed=5)
    new = continued(state_of("serial"), prompts, sampling, batch=2)
    assert [len(each) for each in new] == [1, SEQUENCE - 1]


def test_a_row_without_numbers_ends() -> None:
    state = state_of("serial")
    with torch.no_grad():
        state.model.final_norm.bias[3] = torch.nan
    assert continued(state, [[1], [1]], batch=2) == [[], []]


class Letters:
    """A tokenizer whose tokens are bytes."""

    ends = (0,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def token_id(self, token: str) -> int:
        return ord(token)

    def decode_after(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


def samples_of(file: Path, kind: str = "gpt2", tokenizer: Any = Letters()) -> TextSamples:  # noqa: B008
    config = SimpleNamespace(
        logging=SimpleNamespace(sample_interval=2, sample_prompts=str(file)),
        data=SimpleNamespace(seq_length=SEQUENCE, begin_token="!"),
        model=SimpleNamespace(kind=kind),
        training=SimpleNamespace(seed=1, micro_batch_size=2),
    )
    return TextSamples(config, SimpleNamespace(tokenizer=tokenizer))


def test_samples_are_logged_at_their_interval_and_change_nothing(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("ab\nc\n")
    plain, written = tmp_path / "plain", tmp_path / "written"
    assert samples_of(file).sampling == Sampling(64, top_k=40, seed=1)
    run(plain, [], train_iters=5)
    run(written, [samples_of(file)], train_iters=5)
    found = [line for line in lines(written) if "sample" in line]
    assert [(line["step"], line["sample"], line["prompt"]) for line in found] == [
        (step, number, text) for step in (2, 4, 5) for number, text in ((1, "ab"), (2, "c"))
    ]
    assert all(line["text"] for line in found)
    run(tmp_path / "left", [samples_of(file)], train_iters=5, exit_interval=3)
    steps = [line["step"] for line in lines(tmp_path / "left") if "sample" in line]
    assert steps == [2, 2, 3, 3], "also at another end"
    run(tmp_path / "even", [samples_of(file)], train_iters=4)
    steps = [line["step"] for line in lines(tmp_path / "even") if "sample" in line]
    assert steps == [2, 2, 4, 4], "once at the end"
    losses = [
        [line["loss"] for line in lines(folder) if "loss" in line] for folder in (plain, written)
    ]
    assert losses[0] == losses[1]
    after = samples_of(file)
    after.training, after.last = SimpleNamespace(state=SimpleNamespace(step=6)), 4  # type: ignore[assignment]
    after.post_train("SIGTERM")  # whose sender waits for no samples
    after.post_step(SimpleNamespace(stop=True))  # type: ignore[arg-type]
    assert after.last == 4


@pytest.mark.parametrize(
    ("content", "changes", "named"),
    [
        (b"a\n\nb\n", {}, "line 2"),
        (b"a\n" + b"b" * SEQUENCE, {}, "line 2"),
        (b"\xff\n", {}, "UTF-8"),
        (b"", {}, "empty"),
        (b"a\n", {"kind": "bert"}, "bert"),
        (b"a\n", {"tokenizer": None}, "tokenizer"),
    ],
)
def test_prompts_that_cannot_be_continued_are_refused(
    tmp_path: Path, content: bytes, changes: dict[str, Any], named: str
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(content)
    refusal(lambda: samples_of(file, **changes), named, kind=UsageError | ValueError)
