"""A folder of transformers with everything that may lie in one: it comes back complete, and what
lies in it counts."""

import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
)

from megatron.checkpoint.load import verify
from megatron.models.hf_layers import Wide
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, score, whole_logits
from tests.tools.convert.berts import write_bert
from tests.tools.convert.llamas import write_llama
from tests.tools.convert.models import assert_same_weights, change_json, weights_of, write_model
from tests.tools.texts import generated
from tools.convert_hf import export_model, import_model

WRITERS: dict[str, Callable[..., Path]] = {
    "gpt2": write_model,
    "bert": write_bert,
    "llama": write_llama,
}
ROWS = {"gpt2": 268, "bert": 100, "llama": 270}  # 7 more than the tokenizers have ids
KINDS = pytest.mark.parametrize("kind", WRITERS)
POSITIONS = {"gpt2": "n_positions", "bert": "max_position_embeddings"}
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT, NEW = "the thing in", 12


@dataclass(frozen=True)
class Imported:
    folder: Path
    ours: Path
    said: str


def json_of(file: Path) -> Any:
    return json.loads(file.read_bytes())


def write_complete(folder: Path, kind: str) -> Path:
    """Of a model that writes text the fifth token of a greedy text is an end id, too, and one
    before it has no token."""
    sizes = {POSITIONS.get(kind, "max_position_embeddings"): 32, "vocab_size": ROWS[kind]}
    WRITERS[kind](folder, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.model_max_length = 24
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "special_tokens_map.json").write_text(json.dumps(tokenizer.special_tokens_map))
    (folder / "README.md").write_text("A model.")
    if kind != "bert":
        ids = tokenizer.encode(PROMPT, return_tensors="pt")
        model = AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():  # so that one of these rows is the most probable
            model.get_output_embeddings().weight[ROWS[kind] - 7 :] *= 3
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder)
        whole = model.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        ends = [tokenizer.eos_token_id, whole[0, ids.shape[1] + 4].item()]
        change_json(folder / "config.json", eos_token_id=ends)
        settings = {"eos_token_id": ends, "do_sample": True, "temperature": 0.7}
        GenerationConfig(**settings).save_pretrained(folder)
    change_json(folder / "config.json", note={"of": "another program"})
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Imported]:
    """That of a kind; made when it is first asked for."""
    made: dict[str, Imported] = {}

    def find(kind: str) -> Imported:
        if kind not in made:
            place = tmp_path_factory.mktemp(kind)
            folder = write_complete(place / "hf", kind)
            with contextlib.redirect_stdout(io.StringIO()) as said:
                import_model(str(folder), place / "ours")
            made[kind] = Imported(folder, place / "ours", said.getvalue())
        return made[kind]

    return find


Find = Callable[[str], Imported]


def assert_complete(folder: Path, back: Path) -> None:
    """File by file, key by key, and as transformers reads it."""
    for file in folder.iterdir():
        if file.suffix == ".json":
            assert json_of(back / file.name) == json_of(file), file.name
        elif file.suffix == ".jinja":
            assert (back / file.name).read_bytes() == file.read_bytes()
    configs = [AutoConfig.from_pretrained(each).to_dict() for each in (folder, back)]
    for config in configs:
        del config["_name_or_path"]
    assert configs[0] == configs[1]
    one, other = (AutoTokenizer.from_pretrained(each) for each in (folder, back))
    assert type(one) is type(other)
    for name in ("model_max_length", "chat_template", "special_tokens_map"):
        assert getattr(one, name) == getattr(other, name) != None, name  # noqa: E711


@KINDS
def test_a_folder_comes_back_complete(imported: Find, tmp_path: Path, kind: str) -> None:
    made = imported(kind)
    export_model(str(made.ours), tmp_path / "back")
    assert_same_weights(made.folder, tmp_path / "back")
    assert ROWS[kind] in {len(each) for each in weights_of(tmp_path / "back").values()}
    assert_complete(made.folder, tmp_path / "back")
    assert [line for line in made.said.splitlines() if "README.md" in line]
    assert not (tmp_path / "back" / "README.md").exists()


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_a_text_ends_at_every_end_id_and_may_hold_ids_without_a_token(
    imported: Find, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = imported(kind)
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    ids = tokenizer.encode(PROMPT, return_tensors="pt")
    whole = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    words = ["--prompt", PROMPT, "--greedy", "--max-new-tokens", str(NEW)]
    (record,) = generated(capsys, made.ours, *words)
    assert record["tokens"] == whole[:-1]
    assert whole[-1] in json_of(made.folder / "config.json")["eos_token_id"]
    assert max(whole[:-1]) >= len(tokenizer)
    assert record["text"] == tokenizer.decode(whole[:-1])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_rows_without_a_token_are_in_the_softmax(imported: Find, kind: str) -> None:
    """Of evaluation, whose log-probabilities and hits all tasks and lm-evaluation-harness use."""
    made, mesh = imported(kind), serial_mesh()
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float64)
    ids = torch.arange(ROWS[kind] - 32, ROWS[kind])[None]
    with Wide():
        expected = model.eval().double()(ids).logits
    ours = load_model(verify(made.ours / "step_00000000", mesh), mesh, torch.float64)
    logits = whole_logits(ours, mesh, ids)
    assert logits.shape == expected.shape == (1, 32, ROWS[kind])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12 * expected.abs().max().item())
    labels = ids.roll(-1)
    found, hits = score(ours, mesh, ids, labels, torch.ones_like(ids, dtype=torch.bool))
    wanted = expected[0].log_softmax(-1).gather(1, labels.T)[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert hits.equal(expected[0].argmax(-1) == labels[0])
