"""The kernels of megatron/parallel/cpu: matmuls by oneDNN are those by torch, and only
where oneDNN is quick. Without that folder all runs in plain torch, and the equalities still hold.
"""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.parallel.kernels import add_matmul_, matmul, padded_rows

onednn = pytest.importorskip("megatron.parallel.cpu.onednn")
N, IN, OUT = 96, 128, 192  # more than SMALL multiplications
by_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="torch is built without oneDNN"
)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@by_onednn
@pytest.mark.parametrize("by_columns", [False, True])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_a_matmul_by_onednn_is_exact(by_columns: bool, turned: bool, biased: bool) -> None:
    x, weight, bias = draw(N, IN), draw(OUT, IN), draw(OUT) if biased else None
    x = x.T.contiguous().T if turned else x
    weight = weight.T.contiguous().T if by_columns else weight
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for multiply in (matmul, onednn.matmul):
        found = multiply(x, weight, bias).double()
        torch.testing.assert_close(found, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_widened_matmul_is_exact_but_for_one_rounding(dtype: torch.dtype) -> None:
    """The dtypes are half ones that the processor cannot multiply."""
    x, weight, bias = (draw(*shape, dtype=dtype) for shape in ((N, IN), (OUT, IN), (OUT,)))
    exact = F.linear(x.double(), weight.double(), bias.double())
    found = onednn.matmul_widened(x, weight, bias).double()
    torch.testing.assert_close(found, exact, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-5)


def test_rows_are_padded_to_multiples_of_sixteen() -> None:
    assert [padded_rows(each) for each in (0, 1, 16, 17)] == [0, 16, 16, 32]


@pytest.mark.parametrize("rows", [1, 2, 8, 9])
def test_few_rows_of_a_tall_weight_are_torchs(rows: int) -> None:
    x, weight = draw(rows, 32), draw(onednn.TALL, 32)
    found = matmul(x, weight)
    assert found.shape == (rows, onednn.TALL)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, rtol=0, atol=1e-4)
    assert onednn.has_few_rows(x, weight) == (rows <= onednn.FEW_ROWS)


ADDERS = {"here": add_matmul_, "oneDNN": pytest.param(onednn.add_matmul_, marks=by_onednn)}


@pytest.mark.parametrize("add", ADDERS.values(), ids=ADDERS)
@pytest.mark.parametrize("is_filled", [False, True])
@pytest.mark.parametrize(
    ("tokens", "columns", "outputs"),
    [(1, IN, OUT), (16, 2 * OUT, OUT), (N, IN, OUT), (16, 512, 4100), (96, 128, 11_008)],
)
def test_a_gradient_is_added_or_written(
    add: object, is_filled: bool, tokens: int, columns: int, outputs: int
) -> None:
    """The last two go chunk by chunk; in the last one dy is transposed so, too."""
    assert callable(add)
    x, dy, out = draw(tokens, columns), draw(tokens, outputs), draw(outputs, columns)
    expected = dy.double().T @ x.double() + (out if is_filled else 0)
    add(out, dy, x, accumulate=is_filled)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_filled", [False, True])
def test_a_narrow_gradient_is_rounded_once(dtype: torch.dtype, is_filled: bool) -> None:
    x, dy, out = (draw(*each, dtype=dtype) for each in ((N, IN), (N, OUT), (OUT, IN)))
    expected = dy.double().T @ x.double() + (out.double() if is_filled else 0)
    add_matmul_(out, dy, x, accumulate=is_filled)
    steps = 0.501 if dtype in onednn.EMULATED else 1.001  # torch's own rounds the result, too
    torch.testing.assert_close(
        out.double(), expected, rtol=steps * torch.finfo(dtype).eps, atol=0.2 if steps > 1 else 1e-5
    )


# Without the folder

ROOT = Path(__file__).parents[2]
TESTS = (
    "tests/parallel/test_layers.py::test_layers_equal_those_of_torch[2d]",
    "tests/parallel/test_buckets.py::test_narrow_buckets_round_a_sum_once",
    "tests/optim/test_adam.py::test_five_steps_equal_a_plain_loop[settings1]",
)
CODE = """
import sys
sys.modules["megatron.parallel.cpu"] = None  # its import fails, as without the folder
import pytest
from megatron.parallel import kernels
sys.exit(kernels.use_cpu_kernels or pytest.main(sys.argv[1:]))
"""


def test_the_equality_tests_pass_without_the_folder() -> None:
    """In one process, by tests that start no others."""
    command = [sys.executable, "-c", CODE, "-q", "-x", "-p", "no:cacheprovider", *TESTS]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
