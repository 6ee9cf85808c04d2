"""A plan is proved: right ones pass, and each way to corrupt one is caught or refused by name."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from megatron.errors import UsageError
from megatron.huggingface.config import HuggingFaceConfig, HuggingFaceMaskedConfig
from megatron.huggingface.plan import PlanError
from megatron.huggingface.proof import prove, require_proof, tiny
from tests.dist import Pool
from tests.huggingface import LITERAL, of_plan
from tests.programs import finished
from tests.refusals import field_of, refusal
from tests.tiny import mesh_of_ranks
from tools.layouts import prove as prove_plan

GPT2 = {
    "*.attn": {"style": "local", "attributes": ["num_heads", "split_size"]},
    "*.attn.c_attn": {"style": "column", "parts": 3},
    "*.attn.c_proj": "row",
    "*.mlp.c_fc": "column",
    "*.mlp.c_proj": "row",
    "*.wte": "vocabulary",
}
LLAMA = {
    "*.[qkv]_proj": "column",
    "*.o_proj": "row",
    "*.gate_proj": "column",
    "*.up_proj": "column",
    "*.down_proj": "row",
    "*.embed_tokens": "vocabulary",
}
QWEN3 = LLAMA | {"*.[qk]_norm": "summed"}
GATHER, TWO_PARTS = {"style": "column", "gather": True}, {"style": "column", "parts": 2}
RIGHT: Mapping[str, Mapping[str, Any]] = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "qwen3": QWEN3,
    "granite": LLAMA,
    "apertus": {name: style for name, style in QWEN3.items() if "gate" not in name},
    # Its activation takes a mean and a deviation over all gates.
    "gemma3n_text": QWEN3 | {"*.mlp.[gu]*_proj": GATHER},
    "gpt_neox": {
        "*.query_key_value": "column",
        "*.attention.dense": "row",
        "*.dense_h_to_4h": "column",
        "*.dense_4h_to_h": "row",
        "*.embed_in": "vocabulary",
        "lm_head": GATHER,
    },
    "phi3": {
        "*.qkv_proj": GATHER,
        "*.o_proj": "row",
        "*.gate_up_proj": TWO_PARTS,
        "*.down_proj": "row",
    },
    "gpt_bigcode": {"*.c_fc": "column", "*.mlp.c_proj": "row"},
    "modernbert-decoder": {
        "*.[qkv]_proj": "column",
        "*.attn.Wo": "row",
        "*.mlp.Wi": TWO_PARTS,
        "*.mlp.Wo": "row",
    },
}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4}
STILL = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop", "summary_first_dropout"), 0.0)
# Among them those whose plan of transformers' is mended.
AUTO = ("gpt2", "bert", "opt", "gemma2", "apertus", "doge", "gemma3n_text")
# Among them some with dropout.
DROPPING = ("gpt2", "auto gpt2", "auto bert", "gathered", "dropout of all heads")
# By the size of the tensor axis: models whose FLOPs are compared.
DIVIDED = {2: ("gpt_neox", "auto gemma2"), 4: ("gpt2",)}
AT_4_RANKS = ("gpt2", "shared heads")  # several ranks a key/value head


# Plans in which these entries are others: (model type, entries, how it is caught, what is named,
# changes of config.json). By a PlanError: "refused"; an error in the forward or backward: "fails";
# a difference: "differs".
Corrupted = tuple[str, Mapping[str, Any], str, str, Mapping[str, Any]]
CORRUPTED: Mapping[str, Corrupted] = {
    "a row for a column": ("llama", {"*.gate_proj": "row"}, "fails", "layers.0.mlp", {}),
    "parts forgotten": ("phi3", {"*.gate_up_proj": "column"}, "differs", "layers.0.mlp", {}),
    "parts of q, k, v forgotten": ("gpt2", {"*.attn.c_attn": "column"}, "refused", "c_attn", {}),
    "parts where there are none": (
        "gpt_neox", {"*.query_key_value": {"style": "column", "parts": 3}}, "differs",
        "layers.0.attention.dense", {},
    ),
    "a norm cut": ("llama", {"*.input_layernorm": "column"}, "refused", "input_layernorm", {}),
    "a tie cut differently": ("gpt2", {"lm_head": "row"}, "refused", "lm_head", {}),
    "keys whole, values not": ("llama", {"*.k_proj": "whole"}, "fails", "layers.0.self_attn", {}),
    "a norm of heads not summed": ("qwen3", {"*.[qk]_norm": "whole"}, "fails", "_norm", {}),
    "heads forgotten": ("gpt2", {"*.attn": "whole"}, "fails", "h.0.attn", {}),
    "a cut through a key/value head": (
        "gpt_bigcode", {"*.c_attn": "column", "*.attn.c_proj": "row"}, "fails", "h.0.attn", {},
    ),
    "a statistic of cut columns": (
        "gemma3n_text", {"*.mlp.[gu]*_proj": "column"}, "differs", "layers.0.mlp.act_fn", {},
    ),
    "parameters between cut layers": ("apertus", {}, "fails", "act_fn.alpha_p", {}),
    "dropout of cut columns": (
        "modernbert-decoder", {}, "fails", "layers.0.mlp.drop", {"mlp_dropout": 0.1},
    ),
    "a pattern that fits nothing": ("llama", {"*.w1": "column"}, "refused", "*.w1", {}),
    "a norm of the stream summed, of one of the layers that have numbers": (
        "llama", {"*.1.input_layernorm": "summed", "*.3.input_layernorm": "whole"}, "differs",
        "layers.1.input_layernorm", {"num_hidden_layers": 4},
    ),
}  # fmt: skip


def toml(plan: Mapping[str, Any]) -> str:
    def value(each: Any) -> str:
        if isinstance(each, Mapping):
            return "{" + ", ".join(f"{key} = {json.dumps(v)}" for key, v in each.items()) + "}"
        return json.dumps(each)

    return "".join(f"{json.dumps(key)} = {value(each)}\n" for key, each in plan.items())


def config_of(model_type: str, plan: str = "auto", **changes: Any) -> HuggingFaceConfig:
    kind = HuggingFaceMaskedConfig if model_type == "bert" else HuggingFaceConfig
    described = {"model_type": model_type, **changes}
    return kind(hf_model=model_type, **of_plan(plan), hf_config=json.dumps(described))


def proofs(configs: Mapping[str, HuggingFaceConfig], size: int) -> dict[str, tuple[str, Any]]:
    """(how the plan was caught, or "right"; the proof or the reason), on this rank."""
    mesh, found = mesh_of_ranks(size), dict[str, tuple[str, Any]]()
    for name, config in configs.items():
        try:
            proof = prove(config, mesh)
        except PlanError as error:
            found[name] = "refused", str(error)
            continue
        outcome = "fails" if proof.failure else "differs" if proof.wrong else "right"
        found[name] = outcome, proof
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_right_plans(gloo: Pool, size: int) -> None:
    """At 4 ranks of 2 key/value heads; and the work is divided."""
    plans = ("gpt2", "gpt_neox", "phi3", "gpt_bigcode", "modernbert-decoder")
    configs = {name: config_of(name, toml(RIGHT[name])) for name in plans}
    configs |= {f"auto {name}": config_of(name) for name in AUTO}
    configs |= {
        "shared heads": config_of("qwen3", toml(QWEN3), **HEADS | {"num_key_value_heads": 2}),
        "one key/value head, a window": config_of(
            "mistral", toml(LLAMA), **HEADS | {"num_key_value_heads": 1}, sliding_window=4096
        ),
        "untied": config_of("gpt2", toml(GPT2), **STILL, tie_word_embeddings=False),
        "a norm of each head": config_of("phi", qk_layernorm=True, num_key_value_heads=8),
        "a norm of all heads": config_of("cohere", use_qk_norm=True),
        "dropout of all heads": config_of("olmo2", attention_dropout=0.1),
        "granite": config_of("granite", embedding_multiplier=12.0, logits_scaling=8.0),
        # The literal plan of an issue that users know: nothing of attention is divided.
        "gathered": config_of("gpt2", LITERAL),
        "layers by their numbers, an output layer that stays cut": config_of(
            "llama",
            toml(LLAMA | {"*.layers.[23].mlp.down_proj": "row", "lm_head": "column"}),
            num_hidden_layers=3,
            vocab_size=128,
        ),
        # A weight that is tied to a cut one is cut alike, whatever the plan says or forgets.
        "tie": config_of("gpt2", toml(GPT2 | {"lm_head": "whole"}), **STILL),
        "vocabulary": config_of(
            "gpt2", toml(GPT2 | {"*.wte": "whole", "lm_head": GATHER}), **STILL
        ),
    }
    configs = {name: each for name, each in configs.items() if (name in AT_4_RANKS) == (size == 4)}
    for found in gloo.run(size, proofs, configs, size):
        for name, (outcome, proof) in found.items():
            assert outcome == "right", f"{name}: {proof}"
            assert proof.worst < 1e-12
            assert name not in DROPPING or len(proof.dropped) == len(proof.gradients) + 1
            assert len(proof.outputs) > 10, "modules are compared"
        for name in DIVIDED[size]:
            own, whole = found[name][1].flops
            assert own < 1.15 * whole / size


def test_corrupted_plans(gloo: Pool) -> None:
    configs = {
        name: config_of(kind, toml(RIGHT[kind] | entries), **changes)
        for name, (kind, entries, _, _, changes) in CORRUPTED.items()
    }
    for found in gloo.run(2, proofs, configs, 2):
        for name, (_, _, caught, where, _) in CORRUPTED.items():
            outcome, proof = found[name]
            assert outcome == caught, f"{name}: {proof}"
            assert where in str(proof), f"{name}: {proof}"


def is_wrong_where_one_rank_is(config: HuggingFaceConfig) -> bool:
    def shift(module: nn.Module, _: Any, output: Tensor) -> Tensor | None:
        is_last = getattr(module, "full_name", "") == "model.layers.1.mlp.down_proj"
        return output + 1e-3 if is_last and not torch.is_grad_enabled() else None

    with ExitStack() as stack:
        if dist.get_rank() == 1:  # after all that ranks send each other
            stack.callback(register_module_forward_hook(shift).remove)
        return bool(prove(config, mesh_of_ranks(2)).wrong)


def test_what_one_rank_finds_wrong_is_known_to_all(gloo: Pool) -> None:
    config = config_of("llama", toml(LLAMA | {"lm_head": "whole"}))
    assert gloo.run(2, is_wrong_where_one_rank_is, config) == [True, True]


NO_POSITIONS = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0]}  # of the last one


def test_tiny_model() -> None:
    """Ranks divide or share key/value heads as they do there, and there is a layer of each kind."""
    for shared, size in [(8, 4), (8, 2), (2, 4), (1, 2), (3, 2), (12, 8), (6, 3)]:
        given = {"model_type": "llama", "hidden_size": 96, "num_attention_heads": 24}
        given["num_key_value_heads"] = shared
        found = tiny(given, "auto", size)
        heads, groups = found["num_attention_heads"], found["num_key_value_heads"]
        assert (heads % size, heads % groups) == (0, 0)
        assert heads > groups
        assert groups == (size if shared % size == 0 else shared)
    found = tiny({"model_type": "smollm3", **NO_POSITIONS}, "auto", 2)
    assert {*found["no_rope_layers"]} == {0, 1}


def required(configs: Sequence[HuggingFaceConfig], size: int) -> list[str]:
    """For each, the flag of the error that it raises, or the first word of what is said."""
    mesh, found = mesh_of_ranks(size), list[str]()
    for config in configs:
        try:
            found.append(require_proof(config, mesh).partition(" ")[0])
        except UsageError as error:
            found.append(error.flag)
    return found


PROVED, NOT_PROVED, REFUSED = "the", "warning:", "--plan"
SIX = {"num_attention_heads": 6, "num_key_value_heads": 3}
EIGHT_GROUPS = {"style": "local", "attributes": ["num_heads"], "split_size": 64}
UNREACHED = HEADS | {"residual_multiplier": 1e-15}  # by a gradient: layers add next to nothing
# By the size of the tensor axis, (model type, entries of its plan or None for auto, what its
# config.json says, what comes of it).
REQUIRED: Mapping[int, Sequence[tuple[str, Mapping[str, Any] | None, Mapping[str, Any], str]]] = {
    2: [
        # A tiny model has other numbers than the plan's.
        ("gpt2", {"*.attn": EIGHT_GROUPS}, {"n_embd": 128, "n_head": 4}, NOT_PROVED),
        ("granite", {"*.input_layernorm": "summed"}, HEADS, REFUSED),
        ("granite", {"*.input_layernorm": "summed"}, UNREACHED, NOT_PROVED),
        ("phi", None, {"num_attention_heads": 4, "qk_layernorm": True}, PROVED),
    ],
    # 3 ranks can share what the whole model has, whatever the tiny one has of its own accord.
    3: [
        ("llama", {}, {"num_attention_heads": 8, "num_key_value_heads": 8}, REFUSED),
        ("qwen3", {"lm_head": "column"}, SIX | {"vocab_size": 96}, PROVED),
    ],
}


@pytest.mark.parametrize("size", REQUIRED)
def test_required_proof(gloo: Pool, size: int) -> None:
    common = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 192}
    configs = [
        config_of(
            name,
            "auto" if entries is None else toml(RIGHT[name] | entries),
            **(sizes if name == "gpt2" else common | sizes),
        )
        for name, entries, sizes, _ in REQUIRED[size]
    ]
    for found in gloo.run(size, required, configs, size):
        assert found == [wanted for *_, wanted in REQUIRED[size]]


def test_training(tmp_path: Path) -> None:
    """It proves its plan first."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    wrong = LLAMA | {"*.input_layernorm": "summed"}
    model = write(tmp_path, "llama", wrong, **sizes, num_attention_heads=4)[1:]
    words = f"--model huggingface --hf-model {' '.join(model)} --random-weights --mock-data"
    words += " --tensor-model-parallel-size 2 --train-iters 1"
    said = finished(words, world=2, code=2, folder=tmp_path, program="pretrain", shape="")
    assert field_of(said) == "--plan"


def write(folder: Path, model_type: str, plan: Mapping[str, Any], **changes: Any) -> list[str]:
    described = {"model_type": model_type, "num_attention_heads": 6, **changes}
    (folder / "config.json").write_text(json.dumps(described))
    (folder / "plan.toml").write_text(toml(plan))
    return ["--model", str(folder), "--plan", str(folder / "plan.toml")]


def test_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has 6 heads, which 4 ranks cannot share. Its ranks come from the tests' fork server
    in no time, and the signals of this process stay pytest's."""
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # which the program sets
    file, picture = tmp_path / "found.json", tmp_path / "plan.png"
    changes = {"hidden_size": 96, "num_key_value_heads": 6}
    words = write(tmp_path, "qwen3", QWEN3 | {"*.input_layernorm": "summed"}, **changes)
    words += ["--show", "--json", str(file), "--picture", str(picture)]
    assert prove_plan.main(words, {}) == 1
    printed, said = capsys.readouterr()
    assert not said
    at_2, at_4 = sorted(json.loads(file.read_text()), key=lambda each: each["tensor"])
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "input_layernorm" in " ".join(at_2["wrong"])
    assert at_2["gradients"]["model.layers.0.input_layernorm.weight"] == pytest.approx(1)
    assert "heads" in at_4["refused"]
    rows = {each["module"].partition(" ")[0]: each for each in at_2["modules"]}
    assert rows["model.layers.*.mlp.down_proj"]["communication"] == "g"
    assert rows["model.layers.*.mlp.down_proj"]["local"] in printed


@pytest.mark.parametrize(
    ("size", "plan", "flag"),
    [
        (96, {"*.w1": "column"}, "--plan"),
        (96, {"*.q_proj": "across"}, "--plan"),
        (96, None, "--plan"),
        (95, LLAMA, "--model"),
        (None, LLAMA, "--model"),
    ],
    ids=["fits nothing", "no style", "no file", "no model", "no config.json"],
)
def test_refusals(
    tmp_path: Path, size: int | None, plan: Mapping[str, Any] | None, flag: str
) -> None:
    """A plan or a model that is wrong at every size."""
    words = write(tmp_path, "llama", plan or {}, hidden_size=size or 96)
    if plan is None:
        (tmp_path / "plan.toml").unlink()
    if size is None:
        (tmp_path / "config.json").unlink()
    assert field_of(refusal(lambda: prove_plan.main(words, {}))) == flag


def test_indivisible_model(tmp_path: Path) -> None:
    words = write(tmp_path, "llama", LLAMA, num_attention_heads=3, hidden_size=96)
    assert prove_plan.main(words, {}) == 2


ENCODER = {"model_type": "bert", "hidden_size": 96, "num_hidden_layers": 1}
# (config.json, flags, the kind by which it is proved; None: the flag is refused)
PREDICTED: Sequence[tuple[Mapping[str, Any], bool | None, str | None]] = [
    (ENCODER, None, "huggingface-masked"),
    (ENCODER | {"architectures": ["BertModel"]}, None, "huggingface-masked"),
    (ENCODER | {"architectures": ["BertModel"]}, True, "huggingface-masked"),
    (ENCODER, False, None),
    (ENCODER | {"is_decoder": True}, None, "huggingface"),
    ({"model_type": "llama"}, None, "huggingface"),
    ({"model_type": "llama"}, True, None),
    ({"model_type": "albert"}, None, "huggingface-masked"),
    ({"model_type": "xlnet"}, True, "huggingface-masked"),  # nothing says what it predicts
]


@pytest.mark.parametrize(("described", "masked", "kind"), PREDICTED)
def test_kinds(
    tmp_path: Path, described: Mapping[str, Any], masked: bool | None, kind: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(described))
    if kind is None:
        error = refusal(lambda: prove_plan.read(str(tmp_path), "auto", masked))
        assert field_of(error) == ("--masked" if masked else "--no-masked")
    else:
        config = prove_plan.read(str(tmp_path), "auto", masked)
        assert config.kind == kind
        if masked is None:
            config.check()
