"""The fixtures are what the plain trainer gives, it computes what transformers does, and no fault
looks like another."""

from functools import cache
from itertools import combinations
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    BertConfig,
    BertForPreTraining,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from conformance.faults import FAULTS
from conformance.fixture import (
    COMPARED,
    FOLDER,
    IGNORED,
    NAMES,
    Figures,
    Fixture,
    MicroBatch,
    read_fixture,
)
from conformance.make import make

# A gradient that is zero in theory moves weights by about 1e-12, differently on each processor.
NOISE = 1e-10
# transformers has fp32 inside Llama's norms and rotary tables.
TOLERANCE = {"gpt2": 1e-10, "llama": 1e-5, "bert": 1e-10}
MODELS = {
    "gpt2": (GPT2Config, GPT2LMHeadModel),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "bert": (BertConfig, BertForPreTraining),
}


@cache
def read(name: str) -> tuple[Fixture, Figures]:
    fixture = read_fixture(name)
    return fixture, fixture.expected()


def norm(tensors: dict[str, Tensor]) -> float:
    return sum(float(each.square().sum()) for each in tensors.values()) ** 0.5


@pytest.mark.parametrize("name", NAMES)
def test_the_fixtures_can_be_made_again(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All but the signatures, which test_run.py makes again."""
    monkeypatch.setattr("conformance.make.FAULTS", {})
    monkeypatch.setattr("conformance.make.PERTURBED", 3)
    make(name, tmp_path / name)
    for kind in ("weights", "batches", "expected"):
        made, kept = (load_file(each / name / f"{kind}.safetensors") for each in (tmp_path, FOLDER))
        assert set(made) == set(kept)
        for key, tensor in kept.items():
            first, last = read(name)[0].facts["zeros"].get(key.partition(".")[2], (0, 0))
            limit = torch.full_like(tensor, 1e-12, dtype=torch.float64)
            limit[first:last] = NOISE
            assert ((made[key] - tensor).abs() <= limit).all(), key
    facts = Fixture(tmp_path / name).facts
    spread = facts["spread"]
    assert spread == pytest.approx(read(name)[0].facts["spread"], rel=0.5)
    assert spread["float64"] < 1e-13 < spread["float32"] < 1e-4 < spread["bfloat16"]
    left_out = {"spread", "loss_moves", "least_gradient_norm"}
    kept_facts = read(name)[0].facts
    assert {k: v for k, v in kept_facts.items() if k not in left_out} == {
        k: v for k, v in facts.items() if k not in left_out
    }
    assert sum(each.stat().st_size for each in FOLDER.rglob("*.*")) < 5e6


def add_gradients(model: nn.Module, micro_batches: list[MicroBatch]) -> float:
    """The loss of the global batch, from the model's logits alone."""
    count = sum(int((each.labels != IGNORED).sum()) for each in micro_batches)
    samples = sum(len(each.labels) for each in micro_batches)
    total = 0.0
    for batch in micro_batches:
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if batch.token_type_ids is not None:
            given["token_type_ids"] = batch.token_type_ids
        out = model(**given)
        logits = out["logits" if batch.token_type_ids is None else "prediction_logits"]
        labels = batch.labels.flatten()
        loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / count
        if batch.next_sentence_label is not None:
            scores = out["seq_relationship_logits"]
            of_samples = F.cross_entropy(scores, batch.next_sentence_label, reduction="sum")
            loss = loss + of_samples / samples
        loss.backward()
        total += loss.item()
    return total


@pytest.mark.parametrize("name", NAMES)
def test_transformers_and_torchs_adamw_train_alike(name: str) -> None:
    fixture, expected = read(name)
    facts, tolerance = fixture.facts, TOLERANCE[name]
    config, model_class = MODELS[name]
    model = model_class(config(**facts["config"])).double()
    missing, unexpected = model.load_state_dict(fixture.weights(), strict=False)
    assert set(missing) <= {other for _, other in facts["tied"]}
    assert not unexpected
    parameters = dict(model.named_parameters())
    assert set(parameters) == set(expected.gradients)

    def compare(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
        # A key's bias has noise for a gradient, of which AdamW makes a step.
        for key, tensor in theirs.items():
            limit = tolerance * max(float(tensor.norm()), 1e-2 * norm(theirs))
            assert (ours[key] - tensor).norm() <= limit, key

    given = facts["optimizer"]
    decayed = [each for key, each in parameters.items() if key in given["decayed"]]
    others = [each for key, each in parameters.items() if key not in given["decayed"]]
    groups = [{"params": decayed}, {"params": others, "weight_decay": 0.0}]
    known = {key: given[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW(groups, **known)
    for step, micro_batches in enumerate(fixture.batches()):
        optimizer.zero_grad()
        loss = add_gradients(model, micro_batches)
        assert loss == pytest.approx(expected.losses[step], rel=tolerance)
        if step == 0:
            compare({k: each.grad for k, each in parameters.items()}, expected.gradients)
        total = torch.nn.utils.clip_grad_norm_(parameters.values(), given["clip"])
        assert float(total) == pytest.approx(expected.grad_norms[step], rel=tolerance)
        optimizer.step()
        if step + 1 in COMPARED:
            compare({k: w.detach() for k, w in parameters.items()}, expected.weights[step + 1])


@pytest.mark.parametrize("name", NAMES)
def test_an_agreement_would_have_content(name: str) -> None:
    fixture, expected = read(name)
    facts, clip = fixture.facts, fixture.facts["optimizer"]["clip"]
    assert facts["least_gradient_norm"] == min(expected.grad_norms) > 0.1
    assert min(facts["loss_moves"]) > 1e-3
    assert min(expected.grad_norms) < clip < max(expected.grad_norms)
    model_norm = norm(expected.gradients)
    for key, tensor in expected.gradients.items():
        first, last = facts["zeros"].get(key, (0, 0))
        assert (tensor[first:last].abs() <= 1e-15 * model_norm).all(), key
        others = torch.cat([tensor[:first], tensor[last:]])
        assert not len(others) or others.abs().max() > 1e-12 * model_norm, key
    for step in fixture.batches():
        assert len({int((each.labels != IGNORED).sum()) for each in step}) == len(step)
    silent = [(each.labels == IGNORED).all(1) for step in fixture.batches() for each in step]
    assert torch.cat(silent).any()


def relative(a: Tensor, b: Tensor) -> float:
    size = b.abs().clamp(min=NOISE / 1e-6)
    return float(((a - b) / size).abs().max())


@pytest.mark.parametrize("name", NAMES)
def test_each_fault_is_seen_and_none_looks_like_another(name: str) -> None:
    fixture, expected = read(name)
    exact = torch.tensor(expected.signature(fixture.weights()), dtype=torch.float64)
    rows, faults = fixture.faults(), FAULTS.items()
    assert set(rows) == {(k, n) for k, each in faults if name in each.models for n in each.among}
    for key, row in rows.items():
        assert relative(row, exact) > 1e-6, key
    for (one, a), (other, b) in combinations(rows.items(), 2):
        assert relative(a, b) > 1e-6, (one, other)
