"""Matrix products by oneDNN are those by torch, and only where oneDNN is quick."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.profiler import profile

from megatron.parallel.buckets import GradientBuckets
from megatron.parallel.cpu import onednn
from megatron.parallel.cpu.onednn import is_faster_by_onednn
from megatron.parallel.kernels import add_matmul_, matmul, padded_rows
from megatron.parallel.mesh import Mesh
from tests.dist import Pool
from tests.tiny import (
    assert_gradients,
    assert_relative,
    mesh_of_ranks,
    micro_batches,
    samples,
    summed_loss,
    tiny_model,
    whole_gradients,
)

N, IN, OUT = 96, 128, 192  # more than SMALL multiplications
ONEDNN = "mkldnn::_linear_pointwise"


@pytest.fixture(autouse=True)
def _whatever_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onednn, "is_faster_by_onednn", lambda: True)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


def operators(*arguments: Tensor) -> set[str]:
    with profile() as profiler:
        matmul(*arguments)
    return {event.key for event in profiler.key_averages()}


@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matmul_is_torchs(by_columns: bool, turned: bool, biased: bool) -> None:
    x, weight = draw(N, IN), draw(OUT, IN)
    if turned:
        x = x.T.contiguous().T
    if by_columns:
        weight = weight.T.contiguous().T
    bias = draw(OUT) if biased else None
    assert ONEDNN in operators(x, weight)
    exact = torch.nn.functional.linear(
        x.double(), weight.double(), None if bias is None else bias.double()
    )
    torch.testing.assert_close(matmul(x, weight, bias).double(), exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [False, True])
def test_what_the_processor_cannot_multiply_is_exact_but_for_one_rounding(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, accumulate: bool
) -> None:
    monkeypatch.setattr(onednn, "EMULATED", {dtype})
    x, weight, bias, out = (
        draw(*shape, dtype=dtype) for shape in ((N, IN), (OUT, IN), (OUT,), (N, OUT))
    )
    exact = torch.nn.functional.linear(x.double(), weight.double())
    half_a_step = {"rtol": 0.501 * torch.finfo(dtype).eps, "atol": 1e-5}
    found = matmul(x, weight, bias).double()
    torch.testing.assert_close(found, exact + bias.double(), **half_a_step)
    exact = exact + out.double() if accumulate else exact
    add_matmul_(out, x.T, weight.T, accumulate=accumulate)
    torch.testing.assert_close(out.double(), exact, **half_a_step)


def test_what_onednn_would_be_slow_at_stays_with_torch() -> None:
    x, weight = draw(N, IN), draw(OUT, IN)
    assert ONEDNN not in operators(x, draw(OUT, 2 * IN)[:, :IN])  # neither by rows nor by columns
    assert ONEDNN not in operators(x[:1], weight)
    assert ONEDNN not in operators(x[: N - 1], weight)  # it would keep code for every such size
    assert ONEDNN not in operators(x[:, : IN - 1], weight[:, : IN - 1].contiguous())
    for dtype in torch.float64, torch.bfloat16:
        assert ONEDNN not in operators(x.to(dtype), weight.to(dtype))


def test_sizes_that_are_padded_go_to_onednn() -> None:
    assert [padded_rows(each) for each in (0, 1, 16, 17)] == [0, 16, 16, 32]
    assert ONEDNN in operators(draw(padded_rows(N - 1), IN), draw(OUT, IN))


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_few_rows_of_a_tall_weight_are_torchs(rows: int) -> None:
    x, weight = draw(rows, 32), draw(onednn.TALL, 32)
    found, seen = matmul(x, weight), operators(x, weight)
    assert found.shape == (rows, onednn.TALL)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)
    assert ("aten::linear" in seen) == (rows > onednn.FEW_ROWS)


@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize("chunk_bytes", [2**22, 7 * 4 * OUT])
@pytest.mark.parametrize("columns", [IN, 2 * OUT])
@pytest.mark.parametrize("tokens", [1, 16, N])
def test_a_gradient_is_added_or_written(
    is_filled: bool, chunk_bytes: int, columns: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(onednn, "SMALL", 1000)
    monkeypatch.setattr(onednn, "CHUNK_BYTES", chunk_bytes)
    x, dy, out = draw(tokens, columns), draw(tokens, OUT), draw(OUT, columns)
    expected = dy.double().T @ x.double() + (out if is_filled else 0)
    add_matmul_(out, dy, x, accumulate=is_filled)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("vendor", "capability", "expected"),
    [
        ("AuthenticAMD\ncpu family\t: 26", "AVX512", True),
        ("AuthenticAMD\ncpu family\t: 25", "AVX512", False),
        ("AuthenticAMD\ncpu family\t: 26", "AVX2", False),
        ("GenuineIntel\ncpu family\t: 6", "AVX512", False),
        (None, "AVX512", False),
    ],
)
def test_onednn_is_taken_where_mkl_leaves_half_the_processor_idle(
    vendor: str | None, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_text(path: Path) -> str:
        assert path == Path("/proc/cpuinfo")
        if vendor is None:
            raise FileNotFoundError(path)
        return f"processor\t: 0\nvendor_id\t: {vendor}\nmodel\t\t: 1\n"

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    for library in torch.backends.mkl, torch.backends.mkldnn:
        monkeypatch.setattr(library, "is_available", lambda: True)
    assert is_faster_by_onednn.__wrapped__() is expected


def of_two_micro_batches(mesh: Mesh, dtype: torch.dtype) -> tuple[Tensor, dict[str, Tensor]]:
    """(sum of the losses, whole gradients) of the tiny model."""
    model = tiny_model(mesh, dtype=dtype)
    buckets, total = GradientBuckets(model), torch.zeros((), dtype=dtype)
    buckets.start()
    batches = micro_batches(samples(4), mesh, 2)
    for each in batches:
        with buckets.accumulate(is_last=each is batches[-1]):
            loss = summed_loss(model, each, torch.device("cpu"))[0]
            loss.backward()
        total += loss.detach()
    return total, whole_gradients(buckets)


def check_a_model(ranks: int) -> None:
    mesh = mesh_of_ranks(ranks)
    expected = of_two_micro_batches(mesh, torch.float64)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(onednn, "SMALL", 0)
        patched.setattr(onednn, "ROW_MULTIPLE", 1)
        patched.setattr(onednn, "CHUNK_BYTES", 1000)
        patched.setattr(onednn, "is_faster_by_onednn", lambda: True)
        with profile() as profiler:
            loss, gradients = of_two_micro_batches(mesh, torch.float32)
    calls = {event.key: event.count for event in profiler.key_averages()}
    assert calls[ONEDNN] > 100
    assert not calls.keys() & {"aten::addmm", "aten::mm"}
    assert_relative(loss.double(), expected[0], 1e-6)
    wide = {name: gradient.double() for name, gradient in gradients.items()}
    assert_gradients(wide, expected[1], 1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_by_onednn_is_that_in_fp64(gloo: Pool, ranks: int) -> None:
    gloo.run(ranks, check_a_model, ranks)
