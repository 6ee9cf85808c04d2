"""lm-evaluation-harness on a checkpoint: its figures beside tasks/, and beside its own model."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")  # which the harness's own model imports

from lm_eval.models.huggingface import HFLM

from megatron.config.checkpoint import TrainedConfig
from megatron.config.parallel import ParallelConfig
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tasks import lambada, wikitext103
from tasks.score import score_task
from tests.tasks.peer import Peer, lessons, make_peer, passages, some_articles
from tools.harness.definitions import find_harness
from tools.lm_harness import ask, find_tasks, main, write_local

TASKS = ("lambada_openai", "wikitext")


@pytest.fixture(scope="module")
def made_peer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    @cache
    def make(data: Path) -> Peer:
        return make_peer(tmp_path_factory.mktemp("peer"), data / "gpt2", lessons(data))

    return make


@pytest.fixture
def peer(made_peer: Any, test_data: Path) -> Peer:
    return made_peer(test_data)


@pytest.fixture
def files(tmp_path: Path, test_data: Path) -> dict[str, Path]:
    texts = {
        "lambada_openai": "".join(json.dumps({"text": t}) + "\n" for t in passages(test_data)),
        "wikitext": some_articles(test_data),
    }
    for task, text in texts.items():
        (tmp_path / task).write_text(text, encoding="utf-8")
    return {task: tmp_path / task for task in texts}


def our_records(peer: Peer, files: dict[str, Path]) -> dict[str, Any]:
    """The records of tasks/ for both files."""
    trained = TrainedConfig(load=str(peer.checkpoint))
    folders, tokenizer, manifest = open_trained(trained, ParallelConfig(), 1)
    mesh = serial_mesh()
    _, model = load_newest(folders, mesh)
    records = {}
    for name, module in zip(TASKS, (lambada, wikitext103), strict=True):
        more = {"per_document": True} if module is wikitext103 else {}
        settings = module.Settings(trained=trained, valid_data=files[name], **more)
        task = module.prepare(settings, manifest, tokenizer)
        records[name] = score_task(task, model, mesh, 8, name)
    return records


def check_equal(found: dict[str, Any], ours: dict[str, Any]) -> None:
    words, pages = found["lambada_openai"], found["wikitext"]
    assert 0 < words["acc,none"] < 1, "says little"
    assert words["acc,none"] == ours["lambada_openai"]["strict_accuracy"]
    perplexity = ours["lambada_openai"]["last_word_perplexity"]
    assert words["perplexity,none"] == pytest.approx(perplexity, rel=1e-5)
    perplexity = ours["wikitext"]["word_perplexity_per_document"]
    assert pages["word_perplexity,none"] == pytest.approx(perplexity, rel=1e-5)
    bits = ours["wikitext"]["bits_per_byte_per_document"]
    assert pages["bits_per_byte,none"] == pytest.approx(bits, rel=1e-6)


def test_the_harness_finds_what_the_tasks_find(
    peer: Peer, files: dict[str, Path], tmp_path: Path
) -> None:
    ours, output = our_records(peer, files), tmp_path / "result.json"
    arguments = ["--load", peer.checkpoint, "--tasks", ",".join(TASKS), "--output", output]
    arguments += ["--lambada-data", files["lambada_openai"], "--wikitext-data", files["wikitext"]]
    main([*map(str, arguments)], {})
    record = json.loads(output.read_text())
    check_equal(record["results"], ours)
    assert record["documents"]["wikitext"] == {"original": 3, "effective": 3}

    definitions = tmp_path / "definitions"
    definitions.mkdir()
    write_local(definitions, find_harness(), files)
    own = HFLM(peer.model, tokenizer=peer.tokenizer, batch_size=8)
    check_equal(ask(own, TASKS, find_tasks(TASKS, [definitions]), None)["results"], ours)
