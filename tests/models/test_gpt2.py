"""GPT-2 against plain torch modules with the same weights; test_huggingface.py compares it with
transformers."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron.data.gpt2 import GPT2Batch
from megatron.models.gpt import document_mask
from megatron.parallel.mesh import serial_mesh
from megatron.train.executor import on_device
from tests import plain
from tests.tiny import (
    GRANULARITIES,
    SEQUENCE,
    assert_gradients,
    samples,
    summed_loss,
    tiny_model,
    tiny_section,
    tiny_weights,
)

CPU = torch.device("cpu")


def with_documents(batch: GPT2Batch) -> GPT2Batch:
    """The samples cut into documents, differently for each; attention and positions reset."""
    starts = np.zeros_like(batch.tokens)
    for number, sample in enumerate(starts):
        for bound in (3 + number, 9, 10 + number):
            sample[bound:] = bound
    positions = np.arange(SEQUENCE) - starts
    return replace(batch, document_starts=starts, positions=positions)


@pytest.mark.parametrize("prepare", [lambda batch: batch, with_documents])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_gpt2_equals_plain_torch(
    prepare: Callable[[GPT2Batch], GPT2Batch], granularity: str
) -> None:
    section, batch = tiny_section(recompute_granularity=granularity), prepare(samples(3))
    model = tiny_model(serial_mesh(), section)
    dense = plain.GPT2(tiny_weights(model), section.num_attention_heads)
    loss, count = summed_loss(model, batch, CPU)
    expected = plain.summed_loss(dense(batch), batch)
    assert count == batch.loss_mask.sum()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    loss.backward()
    expected.backward()
    wanted = {name: each.grad for name, each in dense.named_parameters()}
    gradients = {n: each.grad[: len(wanted[n])] for n, each in model.named_parameters()}
    assert_gradients(gradients, wanted, 1e-11)


def test_a_document_is_read_as_if_it_were_alone() -> None:
    model = tiny_model(serial_mesh())
    batch = with_documents(samples(2))
    starts, whole = batch.document_starts, on_device(batch, CPU)
    together = model(whole).view(*starts.shape, -1)
    documents = 0
    for sample in range(2):
        bounds = [*np.unique(starts[sample]).tolist(), SEQUENCE]
        for start, stop in pairwise(bounds):
            own = slice(sample, sample + 1), slice(start, stop)
            positions = torch.arange(stop - start)[None]
            alone = model(GPT2Batch(tokens=whole.tokens[own], positions=positions))
            torch.testing.assert_close(together[own][0], alone, rtol=1e-12, atol=1e-12)
            documents += 1
    assert documents == 8
    across = model(replace(whole, document_starts=None)).view(*starts.shape, -1)
    assert not torch.allclose(together, across)


def test_the_mask_is_causal_and_within_documents() -> None:
    mask = document_mask(torch.tensor([[0, 0, 2, 2]]))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask.tolist() == [[[[bool(each) for each in row] for row in expected]]]
