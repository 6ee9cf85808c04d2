"""A Llama that was imported is used for text, tasks, the harness, and training that goes on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.config.parse import parse
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_newest
from megatron.train.trained import begin_of, open_trained
from tests.dist import Pool
from tests.programs import pretrain
from tests.tasks.program import figures_of
from tests.tools.convert.models import (
    SCALED,
    change_json,
    imported,
    write_llama,
    write_sentencepiece,
)
from tests.tools.texts import POSITIONS, TEXTS, texts_of
from tools.convert_hf import export_model
from tools.corpus.tokenize import step as preprocess_data
from tools.generate import Settings, main

NEW = 12
PASSAGES = ["in the inn, the thing", "the thing in", "then the wind is thin, in the inn"]


@dataclass(frozen=True)
class Llama:
    """The folder that transformers wrote, and a checkpoint of it."""

    exported: Path
    trained: Path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """It has fewer key/value heads than 2 or 4 ranks divide."""
    folder = tmp_path_factory.mktemp("llama")
    rope = SCALED | {"rope_theta": 1e4, "original_max_position_embeddings": 16}
    exported = write_llama(folder / "hf", max_position_embeddings=POSITIONS, rope_parameters=rope)
    return Llama(exported, imported(exported).parent)


def texts_of_transformers(
    folder: Path, prompts: Sequence[str], begin: Sequence[str]
) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = [*tokenizer.convert_tokens_to_ids(begin), *tokenizer.encode(prompt)]
        whole = model.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            max_new_tokens=NEW,
            do_sample=False,
        )[0]
        new = whole[len(ids) :].tolist()
        texts.append(new[:-1] if new[-1] == tokenizer.eos_token_id else new)
    return texts


@pytest.mark.parametrize("begin", [[], ["[BOT]"]])
def test_greedy_text_is_that_of_transformers_at_every_layout(
    gloo: Pool, llama: Llama, begin: list[str]
) -> None:
    """The prompts are of unequal length, so that those of a batch are padded."""
    words = ["--load", str(llama.trained), "--prompt", *TEXTS, "x", "--greedy"]
    words += ["--max-new-tokens", str(NEW), *(["--begin-token", *begin] if begin else [])]
    expected = texts_of_transformers(llama.exported, [*TEXTS, "x"], list(begin))
    assert len({tuple(text) for text in expected}) == 4, "only two prompts are the same"
    for size in ("1", "8"):
        assert texts_of(1, [*words, "--micro-batch-size", size]) == expected
    for world, tensor_size in ((2, 2), (2, 1), (4, 4)):
        for found in gloo.run(world, texts_of, tensor_size, [*words, "--micro-batch-size", "2"]):
            assert found == expected


PAIRS = [("the thing", " in"), ("in", " the thing"), ("", "wind")]


def harness_of(checkpoint: Path) -> list[tuple[float, bool]]:
    from lm_eval.api.instance import Instance

    from tools.harness.language_model import CheckpointLM

    settings = parse(Settings, ["--load", str(checkpoint), "--prompt", "a"], {})
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    model, begin = load_newest(folders, serial_mesh())[1], begin_of(manifest, tokenizer)
    lm = CheckpointLM(model, serial_mesh(), tokenizer, 2, begin)
    return lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in PAIRS])


@pytest.fixture(scope="module")
def data(llama: Llama) -> Path:
    """A data set of the Llama's tokenizer, and the text that it was made of."""
    folder = llama.exported.parent
    texts = [f"{text} {number}" for number in range(12) for text in PASSAGES]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "text.jsonl").write_text(lines)
    words = ["--input", str(folder / "text.jsonl"), "--output-prefix", str(folder / "data")]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--append-eod", "--workers", "1"]
    preprocess_data.main([*words, "--tokenizer-model", str(llama.exported)])
    return folder / "data_text_document"


@pytest.mark.parametrize("task", ["LAMBADA", "WIKITEXT103", "HELDOUT"])
def test_a_task_gives_the_same_figures_at_two_ranks(
    gloo: Pool, llama: Llama, data: Path, tmp_path: Path, task: str
) -> None:
    file = tmp_path / "passages"
    lines = [json.dumps({"text": text}) for text in PASSAGES]
    if task == "WIKITEXT103":
        lines = [" = The thing = ", *PASSAGES]
    file.write_text("\n".join([*lines, ""]))
    words = ["--valid-data", str(file)]
    if task == "HELDOUT":
        words = ["--input", str(file), "--train-data", str(data), "--cloze-words", "3"]
    words += ["--load", str(llama.trained)]
    expected = numbers_of(figures_of(task, 1, *words))
    assert len(expected) > 8
    first, _ = gloo.run(2, figures_of, task, 2, *words)  # which alone has the figures
    assert numbers_of(first) == pytest.approx(expected, rel=1e-5)


def numbers_of(figures: dict[str, Any]) -> dict[str, float]:
    return {name: each for name, each in figures.items() if type(each) in (int, float)}


def test_training_goes_on_in_a_pipeline_too(llama: Llama, data: Path, tmp_path: Path) -> None:
    """With no flags of the shape."""
    words = f"--model llama --finetune --load {llama.trained} --data-path {data} --lr 1e-2"
    words += " --lr-warmup-iters 0 --train-iters 3 --log-interval 1 --eval-iters 0"
    losses = []
    for world in (1, 2):
        to = tmp_path / str(world)
        more = f" --pipeline-model-parallel-size {world} --save {to}"
        with pretrain(words + more, world=world, folder=tmp_path, program="pretrain",
                      shape="") as run:  # fmt: skip
            assert run.wait() == [0] * world, run.text()
        lines = map(json.loads, (to / "metrics.jsonl").read_text().splitlines())
        losses.append([line["loss"] for line in lines if "loss" in line])
        export_model(str(to), tmp_path / f"back{world}")
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Llama:
    """Its tokenizer is as in Llama 1 and 2: a mark before each text, dropped blanks."""
    folder = tmp_path_factory.mktemp("begun")
    exported = write_llama(
        folder / "hf", vocab_size=317, pad_token_id=None, max_position_embeddings=POSITIONS
    )
    write_sentencepiece(exported, 317)
    blank = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    parts = [blank, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    change_json(exported / "tokenizer.json", decoder={"type": "Sequence", "decoders": parts})
    return Llama(exported, imported(exported).parent)


def test_a_text_begins_with_the_mark_of_its_tokenizer_and_keeps_its_first_blank(
    begun: Llama, capsys: pytest.CaptureFixture[str]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(begun.exported)
    words = ["--load", str(begun.trained), "--prompt", *TEXTS, "--greedy", "--max-new-tokens", "6"]
    capsys.readouterr()
    main(words, {})
    records = json.loads(capsys.readouterr().out)
    settings = parse(Settings, words, {})
    tokenizer = open_trained(settings.trained, settings.parallel, 1)[1]
    for text, record in zip(TEXTS, records, strict=True):
        ids = [1, *tokenizer.encode(text)]
        whole = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0].tolist()
        assert record["tokens"] == [each for each in whole[len(ids) :] if each != 2]
        assert record["begin_token"] == "<s>"
    assert tokenizer.decode_after(tokenizer.encode("the")) == " the"


@torch.no_grad()
def test_the_harness_scores_what_transformers_scores_behind_the_begin_mark(begun: Llama) -> None:
    pytest.importorskip("lm_eval")
    settings = parse(Settings, ["--load", str(begun.trained), "--prompt", "a"], {})
    tokenizer = open_trained(settings.trained, settings.parallel, 1)[1]
    model = AutoModelForCausalLM.from_pretrained(begun.exported).eval()
    for (context, rest), (found, _) in zip(PAIRS, harness_of(begun.trained), strict=True):
        first, ids = len(tokenizer.encode(context)), [1, *tokenizer.encode(context + rest)]
        rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        places = range(first + 1, len(ids))
        assert found == pytest.approx(sum(rows[n - 1, ids[n]].item() for n in places), rel=1e-5)


def test_lambada_scores_what_the_harness_scores_of_transformers(begun: Llama) -> None:
    """Its tokenizer gives the last word other tokens alone than behind its passage."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    file = begun.trained.parent / "passages"
    file.write_text("\n".join([*PASSAGES, "then  the\u00e9 th\u00efn", ""]))
    words = file.read_text().splitlines()
    pairs = [(text[: text.rindex(" ")], text[text.rindex(" ") :]) for text in words]
    model = AutoModelForCausalLM.from_pretrained(begun.exported).eval()
    tokenizer = AutoTokenizer.from_pretrained(begun.exported)
    harness = huggingface.HFLM(model, tokenizer=tokenizer, batch_size=2)
    answers = harness.loglikelihood(
        [Instance("loglikelihood", {}, pair, 0) for pair in pairs], disable_tqdm=True
    )
    figures = figures_of("LAMBADA", 1, "--valid-data", str(file), "--load", str(begun.trained))
    mean = -sum(found for found, _ in answers) / len(answers)
    assert figures["last_word_perplexity"] == pytest.approx(exp(mean), rel=1e-5)
    assert figures["strict_accuracy"] == sum(right for _, right in answers) / len(answers)


def test_a_begin_token_of_training_goes_before_that_of_the_tokenizer(begun: Llama) -> None:
    settings = parse(Settings, ["--load", str(begun.trained), "--prompt", "a"], {})
    _, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    assert begin_of(manifest, tokenizer) == [1]
    trained_here = {name: manifest[name] for name in manifest.keys() - {"imported_from"}}
    assert begin_of(trained_here, tokenizer) == []
    trained_here["config"] = {"data": {"begin_token": "the"}}
    assert begin_of(trained_here, tokenizer) == [tokenizer.token_id("the")]
