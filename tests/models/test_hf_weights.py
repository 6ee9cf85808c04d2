"""Training starts from a folder's weights, bit for bit, each rank with its slices; without weights
from the model's own initialisation."""

import contextlib
import io
from collections.abc import Callable
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load, load_file, save_file
from torch import Tensor
from transformers import conversion_mapping
from transformers.core_model_loading import Chunk, WeightConverter

from megatron.errors import UsageError
from megatron.huggingface.config import HuggingFaceConfig, HuggingFaceMaskedConfig
from megatron.huggingface.layers import ORIGINAL_LAYOUT, WeightLayout
from megatron.huggingface.weights import layout_of
from megatron.models import hf_folder
from megatron.parallel.sharding import ShardingSpec, gather_whole
from megatron.train.state import TrainState, build_state
from tests.dist import Pool
from tests.huggingface import of_plan
from tests.refusals import refusal
from tests.tiny import SEED, VOCABULARY, mesh_of_ranks
from tests.tools.convert.models import randomise

WIDTHS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
GATED = WIDTHS | {"intermediate_size": 48, "num_key_value_heads": 2, "max_position_embeddings": 32}
ENCODER = WIDTHS | {"intermediate_size": 64, "max_position_embeddings": 32}


class Case(NamedTuple):
    model_type: str
    settings: dict[str, Any]
    auto_class: str = "AutoModelForCausalLM"
    saved_class: str | None = None  # where it is another one that saved the folder
    shard_size: str = "50GB"
    dtype: torch.dtype = torch.float32
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]] = dict  # of the files' tensors
    plan: str = "auto"


def as_older(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of TensorFlow's days, and buffers that are no longer saved."""
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    return renamed | {"bert.embeddings.position_ids": torch.arange(32)[None]}


def with_masks(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool) for layer in (0, 1)}
    return tensors | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}


GPT2 = Case("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32})
CASES = {
    "GPT-2": GPT2,
    "GPT-2 as its base model wrote it": GPT2._replace(saved_class="AutoModel", change=with_masks),
    "GPT-2 with its tied head": GPT2._replace(
        change=lambda old: old | {"lm_head.weight": old["transformer.wte.weight"].clone()}
    ),
    "Llama in several files": Case("llama", GATED, shard_size="20KB"),
    "Llama with one key/value head": Case("llama", GATED | {"num_key_value_heads": 1}),
    "Qwen3, tied, in bf16": Case(
        "qwen3", GATED | {"tie_word_embeddings": True, "head_dim": 8}, dtype=torch.bfloat16
    ),
    "NeoX": Case("gpt_neox", ENCODER),
    "RoFormer, whose positions are not trained": Case(
        "roformer",
        ENCODER | {"embedding_size": 32},
        "AutoModelForMaskedLM",
        plan='"*.intermediate.dense" = "column"\n"*.layer.*.output.dense" = "row"\n',
    ),
    "BERT": Case("bert", ENCODER, "AutoModelForMaskedLM"),
    "BERT for pretraining, older": Case(
        "bert", ENCODER, "AutoModelForMaskedLM", "AutoModelForPreTraining", change=as_older
    ),
}


def write_folder(folder: Path, case: Case) -> Path:
    """Random in every parameter."""
    config = transformers.AutoConfig.for_model(
        case.model_type, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **case.settings
    )
    places = ("resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout_prob")
    for name in (*places, "attention_probs_dropout_prob"):
        if hasattr(config, name):
            setattr(config, name, 0.0)
    model = getattr(transformers, case.saved_class or case.auto_class).from_config(config)
    randomise(model)
    with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
        model.to(case.dtype).save_pretrained(folder, max_shard_size=case.shard_size)
    if case.change is not dict:
        rewrite(folder, case.change)
    return folder


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)  # a map of the file that is written next
    changed = change({name: tensor.clone() for name, tensor in tensors.items()})
    save_file(changed, file, metadata={"format": "pt"})


def config_of(folder: Path, case: Case, **changes: Any) -> HuggingFaceConfig:
    is_masked = case.auto_class == "AutoModelForMaskedLM"
    kind = HuggingFaceMaskedConfig if is_masked else HuggingFaceConfig
    return kind(hf_model=str(folder), **(of_plan(case.plan) | changes))


def state_of(
    config: HuggingFaceConfig, tensor_size: int, dtype: torch.dtype, *, draws: bool, **others: Any
) -> TrainState:
    mesh = mesh_of_ranks(tensor_size)
    return build_state(config, mesh, VOCABULARY, seed=SEED, dtype=dtype, draws=draws, **others)


def whole(state: TrainState, shards: list[tuple[str, ShardingSpec, Tensor]]) -> dict[str, Tensor]:
    """Whole parameters of these shards, by the names and in the layout of transformers."""
    return {
        name.removeprefix("model."): layout_of(state.model, name).to_original(
            gather_whole(shard, spec)
        )
        for name, spec, shard in shards
    }


def masters_of(state: TrainState) -> dict[str, Tensor]:
    """The masters of trained parameters, and the other parameters as they are."""
    return whole(state, [(name, *shard) for name, shard in state.shards().items()])


counted: list[int] = []


class Counting:
    """A file of safetensors, or a tensor of it; `counted` has how many numbers are read."""

    def __init__(self, *given: Any, of: Any = None) -> None:
        self.of = safe_open(*given) if of is None else of

    def __enter__(self) -> "Counting":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.note(self.of[index])

    def get_tensor(self, key: str) -> Tensor:
        return self.note(self.of.get_tensor(key))

    def get_slice(self, key: str) -> "Counting":
        return Counting(of=self.of.get_slice(key))

    def note(self, found: Tensor) -> Tensor:
        counted.append(found.numel())
        return found


def numbers_of(spec: ShardingSpec, local: Tensor, layout: WeightLayout) -> int:
    if spec.flat is not None and layout != ORIGINAL_LAYOUT:
        rows = spec.of_shard.local_slices
        is_some = spec.flat.start < spec.flat.stop
        return is_some * prod(each.stop - each.start for each in rows)
    return sum(part.numel() for part, _ in spec.boxes(local))


def read(
    folders: dict[str, str], tensor_size: int, precision: str, zero_stage: int
) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor], list[str], int, int]]:
    """For each case: masters, the parameters that are computed with (both as transformers writes
    them), the messages, and how many numbers were read and are needed: those that are held, but
    the whole shard of a parameter in another layout."""
    found = {}
    hf_folder.safe_open = Counting  # type: ignore[assignment]
    try:
        for name, folder in folders.items():
            counted.clear()
            config = config_of(Path(folder), CASES[name])
            dtype = getattr(torch, precision)
            state = state_of(config, tensor_size, dtype, draws=False, zero_stage=zero_stage)
            said = state.load_folder(folder)
            weights = [(each.key[6:], each.spec, each.local) for each in state.weights()]
            own = [(layout_of(state.model, n), *shard) for n, shard in state.shards().items()]
            needed = sum(numbers_of(spec, local, layout) for layout, spec, local in own)
            found[name] = masters_of(state), whole(state, weights), said, sum(counted), needed
    finally:
        hf_folder.safe_open = safe_open
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("folders")
    return {
        name: str(write_folder(place / str(number), case))
        for number, (name, case) in enumerate(CASES.items())
    }


def theirs(folder: str, case: Case) -> dict[str, Tensor]:
    """The weights as transformers writes them; tied ones once."""
    with contextlib.redirect_stderr(io.StringIO()):
        model = getattr(transformers, case.auto_class).from_pretrained(folder)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def expected_of(folders: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    return {name: theirs(folder, CASES[name]) for name, folder in folders.items()}


@pytest.mark.parametrize(
    ("world", "tensor_size", "precision", "zero_stage", "names"),
    [(2, 2, "float64", 0, [*CASES]),
     (4, 4, "float32", 0, ["Llama in several files", "NeoX"]),
     (3, 1, "float32", 2, ["GPT-2", "BERT"]),
     (4, 2, "bfloat16", 3, ["GPT-2 with its tied head", "Llama with one key/value head"])],
)  # fmt: skip
def test_weights_are_those_of_the_folder(
    gloo: Pool,
    folders: dict[str, str],
    expected_of: dict[str, dict[str, Tensor]],
    world: int,
    tensor_size: int,
    precision: str,
    zero_stage: int,
    names: list[str],
) -> None:
    some = {name: folders[name] for name in names}
    for of_rank in gloo.run(world, read, some, tensor_size, precision, zero_stage):
        for name, folder in some.items():
            masters, weights, said, count, needed = of_rank[name]
            expected = expected_of[name]
            assert masters.keys() == expected.keys()
            for key, tensor in expected.items():
                assert masters[key].equal(tensor.to(masters[key].dtype)), f"{name}: {key}"
                assert weights[key].equal(tensor.to(getattr(torch, precision))), f"{name}: {key}"
            assert folder in said[0]
            assert len(said) == (2 if "pretraining" in name else 1)
            assert all("bert.pooler.dense.bias" in line for line in said[1:])
            # A tied head that the file has, too, is compared with what it is tied to.
            twice = 2 * VOCABULARY * 32 if name == "GPT-2 with its tied head" else 0
            assert count == needed + twice, name


def test_tensors_that_transformers_splits_are_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case("llama", GATED | {"num_key_value_heads": 4})
    parts = ("q_proj", "k_proj", "v_proj")

    def fuse(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for layer in range(2):
            names = [f"model.layers.{layer}.self_attn.{part}.weight" for part in parts]
            fused = torch.cat([tensors.pop(name) for name in names])
            tensors[f"model.layers.{layer}.self_attn.qkv.weight"] = fused
        return tensors

    folder = write_folder(tmp_path / "hf", case)
    expected = theirs(str(folder), case)
    rewrite(folder, fuse)
    targets = [f"self_attn.{part}.weight" for part in parts]
    mapping = [WeightConverter("self_attn.qkv.weight", targets, operations=[Chunk(dim=0)])]
    known = conversion_mapping.get_checkpoint_conversion_mapping

    def also(name: str) -> Any:
        return mapping if name == "llama" else known(name)

    monkeypatch.setattr(conversion_mapping, "get_checkpoint_conversion_mapping", also)
    state = state_of(config_of(folder, case), 1, torch.float32, draws=False)
    state.load_folder(str(folder))
    found = masters_of(state)
    assert all(found[key].equal(tensor) for key, tensor in expected.items())


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {key: each for key, each in tensors.items() if name not in key}


C_FC = "transformer.h.0.mlp.c_fc.bias"
WRONG = {
    "a weight is missing": (without("ln_f.weight"), "transformer.ln_f.weight"),
    "a weight is unknown": (lambda old: old | {"transformer.extra": torch.zeros(3)}, "extra"),
    "a head is unknown": (lambda old: old | {"score.weight": torch.zeros(2, 32)}, "score.weight"),
    "a shape is another": (lambda old: old | {C_FC: torch.zeros(64)}, "mlp.c_fc.bias"),
    "no floating point": (lambda old: old | {C_FC: torch.zeros(128, dtype=torch.int8)}, "c_fc"),
    "a tied head is another": (
        lambda old: old | {"lm_head.weight": torch.zeros(VOCABULARY, 32)},
        "lm_head.weight",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_folder_of_another_model_refused(tmp_path: Path, what: str) -> None:
    change, named = WRONG[what]
    folder = write_folder(tmp_path / "hf", GPT2._replace(change=change))
    state = state_of(config_of(folder, GPT2), 1, torch.float32, draws=False)
    assert named in str(refusal(lambda: state.load_folder(str(folder))))


def test_files_that_are_damaged_or_missing_are_named(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", CASES["Llama in several files"])
    state = state_of(config_of(folder, GPT2), 1, torch.float32, draws=False)
    file, other, *_ = sorted(folder.glob("*.safetensors"))
    content, rest = file.read_bytes(), load(other.read_bytes())
    key, tensor = next(iter(load(content).items()))
    save_file(rest | {key: tensor}, other, metadata={"format": "pt"})
    assert key in str(refusal(lambda: state.load_folder(str(folder))))
    file.write_bytes(content[:100])
    assert file.name in str(refusal(lambda: state.load_folder(str(folder))))
    file.unlink()
    refusal(lambda: state.load_folder(str(folder)), file.name, kind=UsageError)


def test_weights_that_a_run_starts_from(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf", GPT2)
    assert config_of(folder, GPT2).starts_from() == str(folder)
    assert config_of(folder, GPT2, random_weights=True).starts_from() is None
    file = folder / "model.safetensors"
    for name in ("adapter.safetensors", "pytorch_model.bin"):
        file = file.rename(folder / name)
        error = refusal(config_of(folder, GPT2).starts_from, field="--hf-model", kind=UsageError)
        assert "--random-weights" in error.works
    file.unlink()
    assert config_of(folder, GPT2).starts_from() is None


def drawn(
    folders: dict[str, str], tensor_size: int, zero_stage: int = 0
) -> dict[str, dict[str, Tensor]]:
    found, settings = {}, {"draws": True, "zero_stage": zero_stage}
    for name in ("GPT-2", "Llama with one key/value head", "BERT"):
        config = config_of(Path(folders[name]), CASES[name], random_weights=True)
        found[name] = masters_of(state_of(config, tensor_size, torch.float32, **settings))
    return found


def test_random_weights_are_the_same_at_every_layout(gloo: Pool, folders: dict[str, str]) -> None:
    wanted = drawn(folders, 1)
    for of_rank in gloo.run(4, drawn, folders, 2, 3):
        for name, tensors in wanted.items():
            assert all(of_rank[name][key].equal(tensor) for key, tensor in tensors.items())


def test_random_weights_are_distributed_as_transformers(tmp_path: Path) -> None:
    settings = {"n_embd": 64, "n_layer": 8, "n_head": 4, "n_positions": 64}
    others = [CASES[name] for name in ("BERT", "NeoX", "Llama with one key/value head")]
    for case in (GPT2._replace(settings=settings), *others):
        folder = write_folder(tmp_path / case.model_type, case)
        config = config_of(folder, case, random_weights=True)
        found = masters_of(state_of(config, 1, torch.float32, draws=True))
        theirs = transformers.AutoConfig.from_pretrained(folder)
        transformers.set_seed(1)
        model = getattr(transformers, case.auto_class).from_config(theirs)
        assert found.keys() == dict(model.named_parameters()).keys()
        for name, other in model.named_parameters():
            own, other = found[name], other.detach()
            assert (own == 0).all(-1).equal((other == 0).all(-1)), name  # biases, a padding row
            assert own.mean().item() == pytest.approx(other.mean().item(), abs=0.02), name
            # The deviation of n numbers is known to 1 / sqrt(2 n).
            width = 6 / (2 * other.numel()) ** 0.5 if other.numel() > 1 else 1.0
            assert own.std().item() == pytest.approx(other.std().item(), rel=width), name
        if case.model_type == "gpt2":
            scaled = found["transformer.h.3.mlp.c_proj.weight"].std().item()
            assert scaled == pytest.approx(0.02 / 16**0.5, rel=0.05)
            one, other = (found[f"transformer.h.{number}.mlp.c_fc.weight"] for number in (0, 1))
            assert not one.equal(other), "layers draw numbers of their own"


def test_weights_of_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = write_folder(tmp_path / "hf", GPT2)
    text = (folder / "config.json").read_text()
    config = HuggingFaceConfig(hf_model="some/model", hf_config=text)
    assert config.starts_from() == "some/model"
    asked: list[str] = []

    def snapshot(name: str, allow_patterns: list[str]) -> str:
        asked.extend([name, *allow_patterns])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    state = state_of(config, 1, torch.float32, draws=False)
    assert "some/model" in state.load_folder("some/model")[0]
    norm = load_file(folder / "model.safetensors")["transformer.ln_f.weight"]
    assert masters_of(state)["transformer.ln_f.weight"].equal(norm)
    assert asked[0] == "some/model"
    assert not any(fnmatchcase("pytorch_model.bin", pattern) for pattern in asked)
    assert set(config.files(None)) == {"hf_generation_config.json"}
    (folder / "model.safetensors").unlink()
    assert isinstance(refusal(lambda: state.load_folder("some/model")), UsageError)

    def unreachable(name: str, **_: Any) -> str:
        raise ConnectionError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    assert isinstance(refusal(lambda: state.load_folder("some/model")), UsageError)
