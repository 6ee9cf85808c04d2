"""lm-evaluation-harness: its tasks on local files, what is refused before anything slow starts, and
the answers of a checkpoint, at any layout."""

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from megatron.train.evaluate import batch_of
from tests.dist import Pool
from tests.refusals import by_last_flag, field_of, refusal, refused
from tests.tiny import SEQUENCE, VOCABULARY, mesh_of_ranks, tiny_model
from tools.lm_harness import READERS, ask, find_tasks, main, write_definition

WIKI = " \n = One = \n \n Text of one . \n = = Part = = \n \n = Two = \n Text of two . \n"
LONG = "A text of more letters than the model has positions, so that windows roll."
assert len(LONG) > 3 * SEQUENCE


def program(words: list[str]) -> None:
    main(["--load", "nowhere", *words], {})


def test_missing_harness(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert "lm-eval" in str(refusal(lambda: program(["--tasks", "wikitext"])))


LAST = "--tasks wikitext --lambada-data x | --tasks ,"


@pytest.mark.parametrize(("words", "field"), by_last_flag(LAST))
def test_refusals(words: str, field: str) -> None:
    assert refused(program, words, whole=False) == field


def test_unknown_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval")
    empty = SimpleNamespace(task_index={})  # the real one reads 14,000 files
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda **_: empty)
    assert field_of(refusal(lambda: find_tasks(["no_such_task"], tmp_path))) == "--tasks"


def test_wikitext_is_read_by_article(tmp_path: Path) -> None:
    file = tmp_path / "wiki.tokens"
    file.write_text(WIKI)
    one, two = READERS["wikitext"](file, "--wikitext-data")
    assert one == " = One = \n \n Text of one . \n = = Part = = \n "
    assert two == " = Two = \n Text of two . \n"


@pytest.mark.parametrize("form", ['{{"text": "{}"}}', "{}"], ids=["json", "plain"])
def test_passages_are_kept_as_they_are(tmp_path: Path, form: str) -> None:
    file = tmp_path / "lambada"
    file.write_text("".join(form.format(text) + "\n" for text in ("a  b", " c d ")))
    assert READERS["lambada_openai"](file, "--lambada-data") == ["a  b", " c d "]


@pytest.mark.parametrize("line", ["{", '{"page": "a"}'])
def test_bad_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "lambada.jsonl"
    file.write_text('{"text": "a b"}\n' + line + "\n")
    read = partial(READERS["lambada_openai"], file, "--lambada-data")
    refusal(read, "lambada.jsonl, line 2", field="--lambada-data")


def test_definition(tmp_path: Path) -> None:
    """The harness's own, on local documents."""
    write_definition(tmp_path, Path("installed"), "wikitext", ["é", "b"])
    definition = json.loads((tmp_path / "wikitext.yaml").read_text())
    (data,) = definition["dataset_kwargs"]["data_files"].values()
    pages = [json.loads(line) for line in Path(data).read_text().splitlines()]
    assert pages == [{"page": "é"}, {"page": "b"}]
    assert definition["include"] == "installed/tasks/wikitext/wikitext.yaml"
    changed = {"dataset_path", "dataset_name", "dataset_kwargs", "training_split"}
    changed |= {"validation_split", "test_split"}
    assert definition.keys() - {"include", "task"} == changed


class Letters:
    """As much of a tokenizer as the harness asks for: a token is a letter's place."""

    eod = VOCABULARY - 1
    ends = (eod,)

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 32 for letter in text]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(each + 32) for each in ids)


def instances(kind: str, *arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, each, number) for number, each in enumerate(arguments)]


def tiny_lm(tensor_size: int | str = 1, micro_batch_size: int = 3) -> Any:
    pytest.importorskip("lm_eval")
    from tasks.language_model import CheckpointLM

    mesh = mesh_of_ranks(tensor_size)
    return CheckpointLM(tiny_model(mesh).eval(), mesh, Letters(), micro_batch_size)


def test_a_begin_mark_comes_first_unless_the_harness_leaves_it_out() -> None:
    lm = tiny_lm()
    lm._begin = [7]
    assert lm.prefix_token_id == 7
    found = [lm.tok_encode("A", add_special_tokens=each)[0] == 7 for each in (None, True, False)]
    assert found == [True, True, False]


def answers(tensor_size: int | str, micro_batch_size: int = 3) -> list[Any]:
    lm = tiny_lm(tensor_size, micro_batch_size)
    pairs = instances("loglikelihood", ("", "Begin"), ("some ", "word"), (LONG, "s"), ("a", "b"))
    texts = instances("loglikelihood_rolling", (LONG,), ("short",), ("",))
    prompts = [(context, {"until": ["e"], "max_gen_toks": 9}) for context in ("A", "", LONG)]
    written = lm.generate_until(instances("generate_until", *prompts))
    return [*lm.loglikelihood(pairs), *lm.loglikelihood_rolling(texts), *written]


def test_layouts_and_batch_sizes(gloo: Pool) -> None:
    expected = answers(1)
    numbers = [each[0] if isinstance(each, tuple) else each for each in expected[:7]]
    found = [*gloo.run(2, answers, 1), *gloo.run(2, answers, 2), answers(1, 1)]
    found += gloo.run(4, answers, "4:2d")
    for other in found:
        values = [each[0] if isinstance(each, tuple) else each for each in other[:7]]
        assert values == pytest.approx(numbers, rel=1e-12)
        assert other[7:] == expected[7:]


def test_whole_text_is_the_sum_over_its_windows() -> None:
    """Windows do not overlap, and the last reaches back to be full."""
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


def test_text_ends_before_its_stop_sequence() -> None:
    lm = tiny_lm()
    (whole,) = lm.generate_until(instances("generate_until", ("A", {"max_gen_toks": 8})))
    stop = whole[3:5]
    options = {"until": [stop, ""], "max_gen_toks": 8}
    (text,) = lm.generate_until(instances("generate_until", ("A", options)))
    assert text == whole[: whole.index(stop)]


def test_examples_of_a_prompt_are_chosen_by_the_harnesss_seed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("lm_eval")
    manager, task = MagicMock(), MagicMock()
    manager.load.return_value = {"tasks": {"a": task}}
    monkeypatch.setattr("lm_eval.evaluator.evaluate", lambda *_, **given: given)
    assert ask(MagicMock(), ["a"], manager, 7)["limit"] == 7
    task.set_fewshot_seed.assert_called_once_with(1234)


@pytest.mark.parametrize(
    ("kind", "arguments", "named"),
    [
        ("generate_until", ("A", {"max_gen_toks": SEQUENCE}), str(SEQUENCE)),
        ("loglikelihood", ("A", LONG), str(SEQUENCE)),
        ("generate_until", ("A", {"do_sample": True, "max_gen_toks": 4}), ""),
    ],
    ids=["too many tokens", "long continuation", "drawn text"],
)
def test_refused_requests(kind: str, arguments: tuple[Any, ...], named: str) -> None:
    answer = getattr(tiny_lm(), kind)
    assert named in str(refusal(lambda: answer(instances(kind, arguments))))
