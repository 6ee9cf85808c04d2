"""Answers of a checkpoint to lm-evaluation-harness: a tiny model, at any layout."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import torch
from lm_eval.api.instance import Instance

from megatron.train.evaluate import batch_of
from tests.dist import Pool
from tests.refusals import field_of, refusal
from tests.tiny import SEQUENCE, VOCABULARY, mesh_of_ranks, tiny_model
from tools.harness.language_model import CheckpointLM
from tools.lm_harness import find_tasks


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


class Letters:
    """As much of a tokenizer as the harness asks for: a token is a letter's place."""

    eod = VOCABULARY - 1
    ends = (eod,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each + 32) for each in ids)


def tiny_lm(tensor_size: int | str = 1, micro_batch_size: int = 3) -> CheckpointLM:
    mesh = mesh_of_ranks(tensor_size)
    model = tiny_model(mesh)
    return CheckpointLM(model.eval(), mesh, Letters(), micro_batch_size)  # type: ignore[arg-type]


LONG = "A text of more letters than the model has positions, so that windows roll."
assert len(LONG) > 3 * SEQUENCE


def answers(tensor_size: int | str, micro_batch_size: int = 3) -> list[Any]:
    lm = tiny_lm(tensor_size, micro_batch_size)
    pairs = instances("loglikelihood", ("", "Begin"), ("some ", "word"), (LONG, "s"), ("a", "b"))
    texts = instances("loglikelihood_rolling", (LONG,), ("short",), ("",))
    prompts = [(context, {"until": ["e"], "max_gen_toks": 9}) for context in ("A", "", LONG)]
    written = lm.generate_until(instances("generate_until", *prompts))
    return [*lm.loglikelihood(pairs), *lm.loglikelihood_rolling(texts), *written]


def test_every_layout_and_batch_size_answers_the_same(gloo: Pool) -> None:
    expected = answers(1)
    numbers = [each[0] if isinstance(each, tuple) else each for each in expected[:7]]
    found = [*gloo.run(2, answers, 1), *gloo.run(2, answers, 2), answers(1, 1)]
    found += gloo.run(4, answers, "4:2d")
    for other in found:
        values = [each[0] if isinstance(each, tuple) else each for each in other[:7]]
        assert values == pytest.approx(numbers, rel=1e-12)
        assert other[7:] == expected[7:]


def test_a_whole_text_is_scored_as_the_plain_sum_over_its_windows() -> None:
    """Non-overlapping windows, of which the last reaches back to be full."""
    lm, model = tiny_lm(), tiny_model(mesh_of_ranks(1)).eval()
    ids = [Letters.eod, *Letters().encode(LONG)]
    expected = 0.0
    for done in range(1, len(ids), SEQUENCE):
        end = min(done + SEQUENCE, len(ids))
        start = end - SEQUENCE - 1
        logits = model(batch_of(torch.tensor([ids[start : end - 1]])))[:, :VOCABULARY]
        picked = logits.log_softmax(-1).gather(1, torch.tensor(ids[start + 1 : end])[:, None])
        expected += picked[done - end :].sum().item()
    (found,) = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (LONG,)))
    assert found == pytest.approx(expected, rel=1e-12)


def test_a_greedy_text_ends_before_its_stop_sequence() -> None:
    lm = tiny_lm()
    (whole,) = lm.generate_until(instances("generate_until", ("A", {"max_gen_toks": 8})))
    stop = whole[3:5]
    options = {"until": [stop, ""], "max_gen_toks": 8}
    (text,) = lm.generate_until(instances("generate_until", ("A", options)))
    assert text == whole[: whole.index(stop)]


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("generate_until", ("A", {"max_gen_toks": SEQUENCE}), str(SEQUENCE)),
        ("loglikelihood", ("A", LONG), str(SEQUENCE)),
        ("generate_until", ("A", {"do_sample": True, "max_gen_toks": 4}), ""),
    ],
    ids=["too many tokens", "a long continuation", "a drawn text"],
)
def test_requests_that_the_model_cannot_answer_are_refused(
    kind: str, arguments: tuple[Any, ...], named: str
) -> None:
    answer = getattr(tiny_lm(), kind)
    assert named in str(refusal(lambda: answer(instances(kind, arguments))))


def test_an_unknown_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def empty(**_: Any) -> SimpleNamespace:
        return SimpleNamespace(task_index={})

    monkeypatch.setattr("lm_eval.tasks.TaskManager", empty)  # the real one reads 14,000 files
    assert field_of(refusal(lambda: find_tasks(["no_such_task"], [tmp_path]))) == "--tasks"
