"""A folder of transformers with everything that may lie in one: it comes back complete, and what
lies in it counts."""

import contextlib
import io
import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import pretrain
from megatron.checkpoint.format import read_manifest
from megatron.checkpoint.load import verify
from megatron.data.tokenizer import BertWordPieceLowerCase, GPT2BPETokenizer, HuggingFaceTokenizer
from megatron.errors import UsageError
from megatron.parallel.compare import KeepFP64
from megatron.parallel.mesh import serial_mesh
from megatron.train.evaluate import load_model, score, whole_logits
from tests.data.samples import write_data, write_sentences, write_tokenizer, write_wordpiece
from tests.programs import newest
from tests.refusals import refusal
from tests.tools.convert import models
from tests.tools.texts import generated
from tools.convert_hf import export_model, import_model

ROWS = {"gpt2": 268, "bert": 100, "llama": 270}  # 7 more than the tokenizers have ids
DROPOUTS = {  # what --hidden-dropout is there
    "gpt2": {"resid_pdrop", "embd_pdrop"},
    "bert": {"hidden_dropout_prob"},
    "llama": set[str](),  # transformers' has none
}

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
PROMPT, NEW = "the thing in", 12


@dataclass(frozen=True)
class Imported:
    folder: Path
    ours: Path
    said: str


def write_complete(folder: Path, kind: str) -> Path:
    """Where a model writes text, the fifth token of a greedy text is an end id, too, and one
    before it has no token."""
    positions = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    models.WRITERS[kind](folder, **{positions: 32, "vocab_size": ROWS[kind]})
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
        models.change_json(folder / "config.json", eos_token_id=ends)
        settings = {"eos_token_id": ends, "do_sample": True, "temperature": 0.7}
        GenerationConfig(**settings).save_pretrained(folder)
    options = models.json_of(folder / "config.json")
    options["torch_dtype"] = options.pop("dtype")  # as older versions call it
    options["note"] = {"of": "another program"}
    (folder / "config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Imported]:
    """That of a kind; made when it is first asked for."""

    @cache
    def find(kind: str) -> Imported:
        place = tmp_path_factory.mktemp(kind)
        folder = write_complete(place / "hf", kind)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            import_model(str(folder), place / "ours")
        return Imported(folder, place / "ours", said.getvalue())

    return find


Find = Callable[[str], Imported]


def assert_complete(folder: Path, back: Path) -> None:
    """File by file, key by key, and as transformers reads it."""
    for file in folder.iterdir():
        if file.suffix == ".json":
            assert models.json_of(back / file.name) == models.json_of(file), file.name
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


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_end_ids(imported: Find, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    made = imported(kind)
    model = AutoModelForCausalLM.from_pretrained(made.folder)
    tokenizer = AutoTokenizer.from_pretrained(made.folder)
    ids = tokenizer.encode(PROMPT, return_tensors="pt")
    whole = model.generate(ids, max_new_tokens=NEW, do_sample=False)[0, ids.shape[1] :].tolist()
    words = ["--prompt", PROMPT, "--greedy", "--max-new-tokens", str(NEW)]
    (record,) = generated(capsys, made.ours, *words)
    assert record["tokens"] == whole[:-1]
    assert whole[-1] in models.json_of(made.folder / "config.json")["eos_token_id"]
    assert max(whole[:-1]) >= len(tokenizer)
    assert record["text"] == tokenizer.decode(whole[:-1])


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@torch.no_grad()
def test_padding_rows_of_the_softmax(imported: Find, kind: str) -> None:
    """In evaluation, whose log-probabilities and hits all tasks and lm-evaluation-harness use."""
    made, mesh = imported(kind), serial_mesh()
    model = AutoModelForCausalLM.from_pretrained(made.folder, dtype=torch.float64)
    ids = torch.arange(ROWS[kind] - 32, ROWS[kind])[None]
    with KeepFP64():
        expected = model.eval().double()(ids).logits
    ours = load_model(verify(made.ours / models.STEP, mesh), mesh, torch.float64)
    logits = whole_logits(ours, mesh, ids)
    assert logits.shape == expected.shape == (1, 32, ROWS[kind])
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-12 * expected.abs().max().item())
    labels = ids.roll(-1)
    found, hits = score(ours, mesh, ids, labels, torch.ones_like(ids, dtype=torch.bool))
    wanted = expected[0].log_softmax(-1).gather(1, labels.T)[:, 0]
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)
    assert hits.equal(expected[0].argmax(-1) == labels[0])


def write_text_of(folder: Path, kind: str, prefix: Path) -> None:
    """Data whose sidecar names the folder's tokenizer, without the tokenizer's files beside it; for
    the Llama no sidecar does."""
    numbers, size = np.random.default_rng(0), ROWS[kind] - 7
    if kind == "bert":
        known = BertWordPieceLowerCase(write_wordpiece(prefix.parent))
        sentences = [[list(numbers.integers(7, size, 9)) for _ in range(4)] for _ in range(20)]
        write_sentences(prefix, sentences, fingerprint=known.fingerprint, vocab_size=size)
        return
    made = HuggingFaceTokenizer(str(folder))
    if kind == "gpt2":
        made = GPT2BPETokenizer(*write_tokenizer(prefix.parent))
    documents = [[*numbers.integers(3, size - 1, 60), made.eod] for _ in range(20)]
    described = write_data(prefix, documents, vocab_size=size, eod=made.eod)
    facts = {"tokenizer_type": made.kind, "tokenizer_fingerprint": made.fingerprint}
    replace(described, **facts).write(str(prefix))
    if kind == "llama":
        prefix.with_name(f"{prefix.name}.json").unlink()


@pytest.mark.parametrize("kind", models.WRITERS)
def test_printed_command(
    imported: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Word by word, for a step that changes nothing: it is exported as complete as it came."""
    made = imported(kind)
    assert [line for line in made.said.splitlines() if "README.md" in line]  # is left behind
    monkeypatch.chdir(tmp_path)
    (line,) = (each for each in made.said.splitlines() if "pretrain.py" in each)
    python, program, *words = shlex.split(line[line.index("python") :])
    assert (python, program) == ("python", "pretrain.py")
    data = "P_text_sentence" if kind == "bert" else "P_text_document"  # as preprocess_data.py does
    assert words[words.index("--data-path") + 1] == data
    write_text_of(made.folder, kind, tmp_path / data)
    fewer = "--train-iters 1 --eval-iters 0 --no-bf16 --save trained"
    still = "--lr 1e-30 --min-lr 0 --weight-decay 0"
    agreeing = f"--num-layers 2 --vocab-size {ROWS[kind]} --hidden-dropout 0.25"
    pretrain.main([*words, *fewer.split(), *still.split(), *agreeing.split()], {})
    before, after = map(read_manifest, (made.ours / models.STEP, newest(Path("trained"))))
    model = before["config"]["model"] | {"vocab_size": ROWS[kind], "hidden_dropout": 0.25}
    assert after["config"]["model"] == model
    assert after["tokenizer"] == before["tokenizer"] != ""
    assert after["weights_of"] == before["run"]
    back = tmp_path / "back"
    export_model("trained", back)
    models.assert_same_weights(made.folder, back)
    assert ROWS[kind] in {len(each) for each in models.weights_of(back).values()}
    theirs, ours = (models.json_of(each / "config.json") for each in (made.folder, back))
    assert {name for name in theirs if theirs[name] != ours[name]} == DROPOUTS[kind]
    assert {ours[name] for name in DROPOUTS[kind]} <= {0.25}
    models.change_json(back / "config.json", **{name: theirs[name] for name in DROPOUTS[kind]})
    assert_complete(made.folder, back)


@pytest.mark.parametrize(
    ("kind", "words", "saved"),
    [
        ("gpt2", "--vocab-size 269", "268"),
        ("gpt2", "--tokenizer-type HuggingFaceTokenizer", "GPT2BPETokenizer"),
        ("llama", "--rotary-base 5000.0 --preset llama.toml", "2"),
        ("bert", "--residual-order pre-ln", "post-ln"),
    ],
)
def test_contradicting_flags(
    imported: Find, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, words: str,
    saved: str,
) -> None:  # fmt: skip
    """A preset's value is one; that of --rotary-base is none, as fine-tuning may change it."""
    made = imported(kind)
    monkeypatch.chdir(tmp_path)
    write_text_of(made.folder, kind, tmp_path / "data")
    (tmp_path / "llama.toml").write_text("num_layers = 4")
    given = f"--model {kind} --finetune --load {made.ours} --data-path data --seq-length 16"
    error = refusal(lambda: pretrain.main([*f"{given} --train-iters 1 {words}".split()], {}))
    assert isinstance(error, UsageError)
    assert error.flag == ("--num-layers" if "--preset" in words else words.split()[0])
    assert saved in error.allowed
