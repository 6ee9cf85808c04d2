"""pretrain.py --model huggingface and huggingface-masked: a run on tokenised data that goes on at
another layout, and what is refused."""

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from megatron.checkpoint.format import Checkpoint
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainConfig
from megatron.data.tokenizer import build_tokenizer
from megatron.errors import UsageError
from megatron.huggingface.weights import layouts_of
from megatron.models.build import build_on_meta
from megatron.models.registry import find_kind
from pretrain import main
from tests.data.samples import write_data, write_data_of_tokenizer, write_sentences, write_wordpiece
from tests.huggingface import DESCRIBED, DROPOUT, HIDDEN, hf_config, write_folder
from tests.programs import finished, pretrain, refused_before_torch, values_of
from tests.refusals import field_of, refusal, refused
from tests.tiny import VOCABULARY
from tools.plan.absent import absent_mesh

SIZES = "--seq-length 16 --micro-batch-size 2 --train-iters 2 --eval-iters 0 --mock-data --no-bf16"


class Row(NamedTuple):
    """A program, what it refuses, and the flag of the refusal."""

    words: str  # beside --model KIND --hf-model FOLDER
    flag: str
    model: str | Mapping[str, Any] = "gpt2"  # of tests/huggingface.py, or config.json
    kind: str = "huggingface"
    ranks: int = 1
    plan: str | None = None  # the text of --plan's file


MIXTRAL = {**DESCRIBED["llama"], "model_type": "mixtral", "num_local_experts": 4}
T5 = {"model_type": "t5", "d_model": HIDDEN, "vocab_size": 101, "num_layers": 2, "num_heads": 4}
DATA = "--no-mock-data --split 1,1,0 --data-path {folder}/some_text_document"
WINDOWED = f"{DATA} --reset-position-ids --reset-attention-mask"
STAGES, TENSOR = "--pipeline-model-parallel-size", "--tensor-model-parallel-size"
HF, LONG, MASKED = "--hf-model", "--seq-length", "huggingface-masked"
PLAN = "--plan {folder}/plan.toml"
SOME_WINDOWS = {"layer_types": ["full_attention", "sliding_attention"]}
EARLY = {  # before torch is imported
    "stages": Row(f"{STAGES} 2", STAGES, ranks=2),
    "a grid of ranks": Row(
        f"{TENSOR} 4 --tensor-parallel-mode 2d", "--tensor-parallel-mode", ranks=4
    ),
    "tokens of a sequence": Row(f"{TENSOR} 2 --sequence-parallel", "--sequence-parallel", ranks=2),
    "parts of a sample": Row("--context-parallel-size 2", "--context-parallel-size", ranks=2),
    "attention recomputed": Row(
        "--recompute-granularity selective", "--recompute-granularity", "llama"
    ),
    "a compiler, and layers recomputed": Row(
        "--compile --recompute-granularity full", "--compile", "llama"
    ),
    "a long sequence": Row(f"{LONG} 17", LONG),
    "a long sequence of rotary positions": Row(f"{LONG} 17", LONG, "llama"),
    "a long sequence of positions that begin late": Row(f"{LONG} 17", LONG, "roberta", MASKED),
    "positions without a mask": Row(f"{DATA} --reset-position-ids", "--reset-position-ids"),
    "documents and a window": Row(WINDOWED, "--reset-attention-mask", "mistral"),
    "documents and some windows": Row(
        WINDOWED, "--reset-attention-mask", DESCRIBED["gemma2"] | SOME_WINDOWS
    ),
    "documents and ALiBi": Row(WINDOWED, "--reset-attention-mask", "bloom"),
    "heads": Row(f"{TENSOR} 3", TENSOR, ranks=3),
    "no folder": Row("--hf-model {folder}/absent", HF),
    "a file": Row("--hf-model {folder}/model/config.json", HF),
    "checkpoints": Row("--hf-model {folder}/checkpoints", HF),
    "no config.json": Row("--hf-model {folder}/..", HF),
    "config.json is none": Row("--hf-model {folder}/broken", HF),
    "no type": Row("", HF, {"vocab_size": 101}),
    "no sizes": Row("", HF, {"model_type": "gpt2"}),
    "no plan": Row("--plan {folder}/absent.toml", "--plan"),
    "a plan that cuts nothing": Row(f"{PLAN} {TENSOR} 2", "--plan", ranks=2, plan="# nothing"),
    "a plan that is no TOML": Row(PLAN, "--plan", plan="c_attn: column"),
    "experts": Row(f"{TENSOR} 2", TENSOR, MIXTRAL, ranks=2),
    "an encoder and a decoder": Row("", HF, T5),
    "masked words for the next": Row("", "--model", "bert"),
    "masked words for the next, by its class": Row(
        "", "--model", DESCRIBED["bert"] | {"architectures": ["BertForMaskedLM"]}
    ),
    "the next word for masked ones": Row("", "--model", "gpt2", MASKED),
    "the next word for masked ones, by its class": Row(
        "", "--model", DESCRIBED["qwen3"] | {"architectures": ["Qwen3ForCausalLM"]}, MASKED
    ),
}
LATE = {  # where the data are opened, and where the model is built
    "a larger vocabulary": Row(DATA, HF, DESCRIBED["gpt2"] | {"vocab_size": 90}),
    "a compiler, and no layers that it knows": Row(
        "--compile", "--compile", DESCRIBED["gpt2"] | {"model_type": "openai-gpt"}
    ),
    "a pattern that fits nothing": Row(PLAN, "--plan", plan='"*.q_proj" = "column"'),
    "an unknown word": Row(PLAN, "--plan", plan='"*.c_attn" = "columns"'),
    "a norm that is cut": Row(PLAN, "--plan", plan='"*.ln_1" = "column"'),
    "an unknown type": Row("", HF, DESCRIBED["gpt2"] | {"model_type": "nothing-such"}),
    "a type that predicts no token": Row("", HF, DESCRIBED["bert"] | {"model_type": "vit"}),
}
ROWS = EARLY | LATE


def arguments(row: Row, folder: Path) -> list[str]:
    """With the files that they need, in a folder of this row's."""
    model = row.model if isinstance(row.model, Mapping) else DESCRIBED[row.model]
    write_folder(folder / "model", "gpt2")
    (folder / "model" / "config.json").write_text(json.dumps(model))
    (folder / "checkpoints" / "step_00000001").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000001" / "manifest.json").touch()
    (folder / "broken").mkdir()
    (folder / "broken" / "config.json").write_text("{")
    if row.plan is not None:
        (folder / "plan.toml").write_text(row.plan)
    if DATA in row.words:
        write_data(folder / "some_text_document", [[*range(1, 40), 0]] * 4)
    words = row.words.format(folder=folder).split()
    given = [] if "--hf-model" in words else ["--hf-model", str(folder / "model")]
    return ["--model", row.kind, *given, *SIZES.split(), *words]


def environment(row: Row) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": str(row.ranks)} if row.ranks > 1 else {}


def accept(words: Sequence[str], ranks: int) -> PretrainConfig:
    kind, rest = words[words.index("--model") + 1], [*words]
    del rest[(place := rest.index("--model")) : place + 2]
    config: PretrainConfig = parse(resolve_name(find_kind(kind).program or ""), rest, {})
    if config.model.kind == "huggingface" or config.model.kind == "huggingface-masked":
        config.check(ranks)
    return config


@pytest.mark.parametrize("name", ROWS)
def test_settings_that_do_not_fit_are_refused_by_flag(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    words = arguments(row, tmp_path)

    def program(given: list[str]) -> None:
        main(given, environment(row))

    assert refused(program, words, retry=lambda given: accept(given, row.ranks)) == row.flag


def test_settings_that_do_not_fit_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    cases = [
        (environment(row), arguments(row, tmp_path / f"{number}" / "files"))
        for number, row in enumerate(EARLY.values())
    ]
    said = refused_before_torch("pretrain", cases)
    assert [field_of(each) for each in said] == [row.flag for row in EARLY.values()]
    assert {each.count("\n") for each in said} == {1}


KINDS = {"gpt2": "huggingface", "bert": "huggingface-masked"}
OTHER = """
"*.attn" = { style = "local", attributes = ["num_heads", "split_size"] }
"*.attn.c_attn" = { style = "column", parts = 3 }
"*.attn.c_proj" = "row"
"*.mlp.c_fc" = "column"
"*.mlp.c_proj" = "row"
"""
SIZE = 270  # of the models' vocabularies, which is larger than those of the tokenizers


def of_run(model: str, folder: Path) -> dict[str, Any]:
    """Settings with which `pretrain` runs the program on the folder's model, and on documents in
    which a token is often followed by the next one."""
    random = np.random.default_rng(0)
    texts = [(5 + start + np.arange(40)) % 90 for start in random.integers(60, size=30)]
    prefix = folder / "some_text_document"
    shape = f"--model {KINDS[model]} --hf-model {folder / 'model'}"
    if model == "bert":
        file = write_wordpiece(folder)
        tokenizer = build_tokenizer("BertWordPieceLowerCase", file, None)
        facts = {"fingerprint": tokenizer.fingerprint, "vocab_size": tokenizer.vocab_size}
        write_sentences(prefix, [np.split(text, 5) for text in texts], **facts)
        shape += f" --vocab-file {file}"
    else:
        write_data_of_tokenizer(prefix, [[*text, 260] for text in texts])
    return {"program": "pretrain", "shape": shape, "folder": folder, "data": prefix}


@pytest.mark.parametrize("model", KINDS)
def test_a_run_goes_on_at_another_layout(model: str, tmp_path: Path) -> None:
    """Two steps on 2 tensor-parallel ranks and two more on 2 data-parallel ones, with ZeRO, or the
    other way round, with dropout, are four steps of one process."""
    write_folder(tmp_path / "model", model, vocab_size=SIZE, **DROPOUT[model])
    given, save = of_run(model, tmp_path), tmp_path / "checkpoints"
    other = tmp_path / "plan.toml"
    other.write_text(f"# The same styles but of the embedding\n{OTHER}")
    full = "--random-weights --zero-stage 3 --recompute-granularity full"
    first, last = {
        "gpt2": (full, f"{TENSOR} 2 --plan {other}"),
        "bert": (f"{TENSOR} 2", "--zero-stage 2"),
    }[model]
    every = "--train-iters 4 --eval-iters 2 --eval-interval 4 --log-interval 1"
    alone, halves = tmp_path / "alone.jsonl", save / "metrics.jsonl"
    runs = [
        (f"{every} --metrics-file {alone}", 1),
        (f"{every} --save {save} --exit-interval 2 {first}", 2),
        (f"{every} --save {save} --load {save} {last}", 2),
    ]
    for words, world in runs:
        finished(words, world=world, **given)
    for key, number in (("loss", 4), ("validation_loss", 1)):
        expected = values_of(alone, key)
        assert len(expected) == number
        assert values_of(halves, key)[-number:] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "are_alike"),
    [
        ({"layer_types": ["full_attention"] * 4}, True),
        ({"layer_types": ["sliding_attention", "full_attention"] * 2}, False),
        ({"num_kv_shared_layers": 2}, False),
        ({"num_kv_shared_layers": 0}, True),
    ],
)
def test_a_few_layers_stand_for_alike_ones(changes: dict[str, Any], are_alike: bool) -> None:
    config = hf_config("gemma2", {"layer_types": [], "num_hidden_layers": 4, **changes})
    assert config.with_num_layers(4).described == config.described
    with nullcontext() if are_alike else pytest.raises(UsageError):
        found = config.with_num_layers(3)
        assert found.num_layers == 3
        assert len(found.described["layer_types"]) in (0, 3)


def test_a_run_goes_on_by_its_plan_or_one_of_the_same_forms(tmp_path: Path) -> None:
    """A square matrix that is held transposed has the same shape."""
    saved = hf_config("gpt2", plan=OTHER)
    assert hf_config("gpt2").completed(asdict(saved)) == saved
    checkpoint = Checkpoint(tmp_path, {"config": {"model": asdict(saved)}, "forms": layouts(saved)})
    hf_config("gpt2").check_layouts(layouts(hf_config("gpt2")), checkpoint)
    whole = hf_config("gpt2", plan='"*.c_fc" = "column"\n"*.mlp.c_proj" = "row"\n')
    refusal(lambda: whole.check_layouts(layouts(whole), checkpoint), field="--plan")


@pytest.mark.parametrize("model", ["bloom", "mixtral"])
def test_several_ranks_ask_for_a_plan(model: str) -> None:
    config, device = hf_config(model), torch.device("meta")
    build_on_meta(config, absent_mesh({}, device), VOCABULARY)
    two = absent_mesh({"tensor": 2}, device)
    refusal(lambda: build_on_meta(config, two, VOCABULARY), field="--hf-model")


def layouts(config: Any) -> dict[str, list[int]]:
    mesh = absent_mesh({}, torch.device("meta"))
    return layouts_of(build_on_meta(config, mesh, VOCABULARY))


def test_every_rank_refuses_alike(tmp_path: Path) -> None:
    """A plan that would mix the heads of queries, keys and values."""
    write_folder(tmp_path / "model", "gpt2", vocab_size=SIZE)
    (tmp_path / "plan.toml").write_text('"*.c_attn" = "column"\n"*.attn.c_proj" = "row"\n')
    words = f"--train-iters 1 --tensor-model-parallel-size 2 --plan {tmp_path / 'plan.toml'}"
    with pretrain(words, world=2, **of_run("gpt2", tmp_path)) as run:
        assert run.wait() == [2, 2]
    assert run.text(0).count("error: --plan") == 1
    assert "c_attn" in run.text(0)
    assert "error" not in run.text(1)
