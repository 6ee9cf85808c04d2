"""Parameters of the plan are those of the layouts' table, by name; FLOPs those of a formula."""

from math import prod

import pytest

from megatron.models.build import build_on_meta
from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.kernels import padded_rows, use_cpu_kernels
from megatron.parallel.sharding import sharding_specs
from tests.tools.planning.counted import fake_ranks
from tests.tools.planning.presets import NAMES, planned, preset
from tools.planning.parameters import buckets, local, table, whole
from tools.planning.products import attention, executed_flops, heads, linear, model_flops
from tools.planning.shape import FILLED, Shape
from tools.planning.software import THIS_PROJECT

PAPER = {"gpt2_355m": 355e6, "gpt2_8.3b": 8.3e9, "bert_336m": 336e6, "bert_3.9b": 3.9e9}


CASES = [*((name, ()) for name in NAMES), ("bert_336m", ("--residual-order", "post-ln"))]


@pytest.mark.parametrize(("name", "flags"), CASES)
def test_parameters_are_those_of_the_model(name: str, flags: tuple[str, ...]) -> None:
    config = preset(name, *flags)
    size = config.parallel.tensor_model_parallel_size
    shape = planned(config, size)
    with fake_ranks(size, size) as mesh:
        model = build_on_meta(config.model, mesh, shape.vocabulary)
        found = {
            key: (prod(spec.shape), prod(spec.local_shape), spec.decay)
            for key, spec in sharding_specs(model).items()
        }
        gradients = GradientBuckets(model)
    plan = table(shape)
    assert {each.name: (each.whole, each.local, each.decays) for each in plan} == found
    assert [each.name for each in plan] == list(found)
    assert whole(shape) == sum(numbers for numbers, _, _ in found.values())
    assert local(shape) == sum(parameter.numel() for parameter in model.parameters())
    names = [[view.name for view in bucket.views] for bucket in gradients.buckets]
    most = THIS_PROJECT.bucket_bytes // 4
    assert [[each.name for each in bucket] for bucket in buckets(plan, most)] == names
    assert whole(shape) == pytest.approx(PAPER.get(name, whole(shape)), rel=0.02)


@pytest.mark.parametrize("tensor", [1, 4])
def test_flops_are_those_of_the_products(tensor: int) -> None:
    """The paper's own: 4 x the layers' forward with recomputation, 3 x the logits."""
    config = preset("gpt2_scaling_4.2b", "--tensor-model-parallel-size", str(tensor),
                    "--make-vocab-size-divisible-by", str(51_200 // tensor))  # fmt: skip
    shape = planned(config, 4 * tensor)
    assert shape.padded == 51_200
    layers = sum(each.flops for each in (*linear(shape), *attention(shape)))
    logits = sum(each.flops for each in heads(shape))
    assert executed_flops(shape) == 4 * tensor * (4 * layers + 3 * logits)
    n, h, s, depth = 8 * 1024, 2304, 1024, 64
    assert layers * tensor == depth * (24 * n * h**2 + 4 * n * s * h)
    assert logits * tensor == 2 * n * h * 51_200
    useful = 4 * (6 * n * (12 * depth * h**2 + 50_257 * h) + 12 * n * s * h * depth)
    assert model_flops(shape) == useful


def test_flops_of_a_bert_are_those_of_its_products() -> None:
    shape = planned(preset("bert_336m", "--recompute-granularity", "none"), 128)
    assert shape.predicted == round(0.15 * shape.tokens)
    assert not use_cpu_kernels or shape.scored == padded_rows(shape.predicted)
    filled = shape.scored - shape.predicted
    assert 0 < filled < FILLED
    h, padding = shape.hidden, shape.padded - shape.vocabulary
    of_no_use = shape.scored * h * padding + filled * (h * shape.vocabulary + h**2)
    more = 6 * of_no_use * shape.micro_batches * shape.data
    assert executed_flops(shape) == pytest.approx(model_flops(shape) + more, rel=1e-12)


def test_39_tflops_are_23_percent_mfu() -> None:
    shape: Shape = planned(preset("gpt2_scaling_1.2b"), 1)
    seconds = executed_flops(shape) / 39e12
    assert model_flops(shape) / (seconds * 130e12) == pytest.approx(0.23, abs=0.003)
