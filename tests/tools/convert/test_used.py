"""Models that were trained here are exported, and a Llama that was imported continues texts and is
scored as transformers does both."""

from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.checkpoint.load import verify
from megatron.config.parse import parse
from megatron.data.tokenizer import Tokenizer
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, load_newest, whole_logits
from megatron.train.trained import begin_of, open_trained
from tests.data.samples import write_data_of_tokenizer
from tests.dist import Pool
from tests.programs import SHAPE, finished, newest
from tests.tasks.program import figures_of
from tests.tools.convert import models
from tests.tools.texts import POSITIONS, TEXTS, generated, texts_of, texts_of_transformers
from tools.convert_hf import export_model
from tools.generate import Settings


@pytest.mark.parametrize(
    ("layout", "world"),
    [("--pipeline-model-parallel-size 2", 2), ("--zero-stage 3 --global-batch-size 6", 3)],
)
@torch.no_grad()
def test_trained_here(tmp_path: Path, layout: str, world: int) -> None:
    """ZeRO cuts rows of 12 anywhere: a file then has several slices of a tensor."""
    random, prefix = np.random.default_rng(0), tmp_path / "text"
    write_data_of_tokenizer(prefix, [[*random.integers(260, size=200), 260] for _ in range(8)])
    words = f"--train-iters 3 --lr 1e-2 --lr-warmup-iters 0 {layout} --save {tmp_path / 'trained'}"
    shape = f"{SHAPE} --hidden-size 12"
    finished(words, world=world, folder=tmp_path, data=prefix, shape=shape)
    export_model(str(tmp_path / "trained"), tmp_path / "back")
    checkpoint = newest(tmp_path / "trained")
    files = list(checkpoint.glob("shard_*"))
    stored = [key for file in files for key in load_file(file)]
    assert len(files) == world
    assert any("#" in key for key in stored) == ("zero" in layout)
    tokens = torch.from_numpy(np.random.default_rng(1).integers(261, size=(4, 16)))
    ours = load_model(verify(checkpoint, serial_mesh()), serial_mesh(), torch.float64)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float64)
    assert AutoTokenizer.from_pretrained(tmp_path / "back").model_max_length == 16
    expected = theirs(tokens).logits
    found = whole_logits(ours, serial_mesh(), tokens)
    assert found.shape == expected.shape == (4, 16, 261)
    assert (found - expected).abs().max() < 1e-12 * expected.abs().max()


# An imported Llama

PAIRS = [("the thing", " in"), ("in", " the thing"), ("", "wind")]
PASSAGES = ["in the inn, the thing", "the thing in", "then the wind is thin, in the inn"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its tokenizer is as in Llama 1 and 2: a mark before each text, dropped blanks."""
    folder = tmp_path_factory.mktemp("begun")
    sizes = {"vocab_size": 317, "pad_token_id": None, "max_position_embeddings": POSITIONS}
    exported = models.write_llama(folder / "hf", **sizes)
    models.write_sentencepiece(exported, 317)
    blank = {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    parts = [blank, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    models.change_json(exported / "tokenizer.json", decoder={"type": "Sequence", "decoders": parts})
    models.imported(exported)
    return exported


def test_greedy_text(gloo: Pool, begun: Path) -> None:
    """The prompts are of unequal length, so that those of a batch are padded; 2 and 4 ranks do not
    divide the key/value heads."""
    words = ["--load", str(begun.with_name("ours")), "--prompt", *TEXTS, "x", "--greedy"]
    words += ["--max-new-tokens", "12"]
    expected = texts_of_transformers(begun, [*TEXTS, "x"])
    assert len({tuple(text) for text in expected}) == 4, "only two prompts are the same"
    for size in ("1", "8"):
        assert texts_of(1, [*words, "--micro-batch-size", size]) == expected
    for world, tensor_size in ((2, 1), (4, 4)):
        for found in gloo.run(world, texts_of, tensor_size, [*words, "--micro-batch-size", "2"]):
            assert found == expected


def test_text_after_begin_mark(begun: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--prompt", "in", "--greedy", "--max-new-tokens", "2"]
    (record,) = generated(capsys, begun.with_name("ours"), *words)
    assert record["begin_token"] == "<s>"
    tokenizer = opened(begun)[0]
    assert tokenizer.decode_after(tokenizer.encode("the")) == " the"


def opened(folder: Path) -> tuple[Tokenizer, dict[str, Any], list[Path]]:
    """(tokenizer, manifest, folders) of the checkpoint beside it."""
    settings = parse(Settings, ["--load", str(folder.with_name("ours")), "--prompt", "a"], {})
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    return tokenizer, manifest, folders


@torch.no_grad()
def test_harness_after_begin_mark(begun: Path) -> None:
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from tasks.language_model import CheckpointLM

    tokenizer, manifest, folders = opened(begun)
    ours = load_newest(folders, serial_mesh())[1]
    lm = CheckpointLM(ours, serial_mesh(), tokenizer, 2, begin_of(manifest, tokenizer))
    answers = lm.loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in PAIRS])
    model = AutoModelForCausalLM.from_pretrained(begun).eval()
    for (context, rest), (found, _) in zip(PAIRS, answers, strict=True):
        first, ids = len(tokenizer.encode(context)), [1, *tokenizer.encode(context + rest)]
        rows = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        places = range(first + 1, len(ids))
        assert found == pytest.approx(sum(rows[n - 1, ids[n]].item() for n in places), rel=1e-5)


def test_lambada_after_begin_mark(begun: Path) -> None:
    """Its tokenizer gives the last word other tokens alone than after its passage."""
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    file = begun.parent / "passages"
    file.write_text("\n".join([*PASSAGES, "then  the\u00e9 th\u00efn", ""]))
    texts = file.read_text().splitlines()
    pairs = [(text[: text.rindex(" ")], text[text.rindex(" ") :]) for text in texts]
    model = AutoModelForCausalLM.from_pretrained(begun).eval()
    tokenizer = AutoTokenizer.from_pretrained(begun)
    harness = huggingface.HFLM(model, tokenizer=tokenizer, batch_size=2)
    instances = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    answers = harness.loglikelihood(instances, disable_tqdm=True)
    words = ["--valid-data", str(file), "--load", str(begun.with_name("ours"))]
    figures = figures_of("LAMBADA", 1, *words)
    mean = -sum(found for found, _ in answers) / len(answers)
    assert figures["last_word_perplexity"] == pytest.approx(exp(mean), rel=1e-5)
    assert figures["strict_accuracy"] == sum(right for _, right in answers) / len(answers)


def test_begin_token(begun: Path) -> None:
    tokenizer, manifest, _ = opened(begun)
    assert begin_of(manifest, tokenizer) == [1]
    trained_here = {name: manifest[name] for name in manifest.keys() - {"imported_from"}}
    assert begin_of(trained_here, tokenizer) == []
    trained_here["config"] = {"data": {"begin_token": "the"}}
    assert begin_of(trained_here, tokenizer) == [tokenizer.token_id("the")]
