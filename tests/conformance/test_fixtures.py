"""The fixtures are what the plain trainer gives, the plain trainer is what transformers computes, and
no fault looks like another."""

import itertools
from functools import cache

import pytest
import torch
from torch import Tensor
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
from conformance.fixture import COMPARED, IGNORED, NAMES, STEPS, Figures, Fixture, read_fixture
from conformance.plain import train
from conformance.signature import signature

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
def test_the_plain_trainer_gives_the_figures_again(name: str) -> None:
    fixture, expected = read(name)
    figures = train(fixture)
    assert figures.losses == pytest.approx(expected.losses, rel=1e-11)
    assert figures.grad_norms == pytest.approx(expected.grad_norms, rel=1e-11)
    pairs = [(figures.gradients, expected.gradients)]
    pairs += [(figures.weights[step], expected.weights[step]) for step in COMPARED]
    for ours, theirs in pairs:
        assert list(ours) == list(fixture.weights())
        assert set(ours) == set(theirs)
        for key, tensor in theirs.items():
            assert (ours[key] - tensor).norm() <= 1e-11 * norm(theirs), key


@pytest.mark.parametrize("name", NAMES)
def test_transformers_computes_the_first_step_alike(name: str) -> None:
    """It has fp32 inside, in norms and rotary tables."""
    fixture, expected = read(name)
    kind, model_class = MODELS[name]
    model = model_class(kind(**fixture.facts["config"])).double()
    missing, unexpected = model.load_state_dict(fixture.weights(), strict=False)
    others = {other for _, other in fixture.facts["tied"]}
    assert set(missing) <= others
    assert not unexpected
    model.tie_weights()
    micro_batches = fixture.batches()[0]
    count = sum(int((each.labels != IGNORED).sum()) for each in micro_batches)
    samples = sum(len(each.labels) for each in micro_batches)
    total = torch.zeros((), dtype=torch.float64)
    for batch in micro_batches:
        given = {"input_ids": batch.input_ids, "attention_mask": batch.attention_mask}
        if batch.token_type_ids is not None:
            given["token_type_ids"] = batch.token_type_ids
        out = model(**given)
        logits = out["prediction_logits" if name == "bert" else "logits"].flatten(0, 1)
        total = total + F.cross_entropy(logits, batch.labels.flatten(), reduction="sum") / count
        if batch.next_sentence_label is not None:
            scores = out.seq_relationship_logits
            of_samples = F.cross_entropy(scores, batch.next_sentence_label, reduction="sum")
            total = total + of_samples / samples
    total.backward()
    assert total.item() == pytest.approx(expected.losses[0], rel=TOLERANCE[name])
    gradients = {key: each.grad for key, each in model.named_parameters()}
    assert set(gradients) == set(expected.gradients)
    for key, tensor in expected.gradients.items():
        limit = TOLERANCE[name] * max(float(tensor.norm()), 1e-3 * expected.grad_norms[0])
        assert (gradients[key] - tensor).norm() <= limit, key


TOLERANCE = {"gpt2": 1e-12, "llama": 2e-5, "bert": 1e-12}
