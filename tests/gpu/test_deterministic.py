"""--deterministic: two runs, and a resumed one, end with the same bits; on a CPU in miniature."""

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import zip_longest
from pathlib import Path

import pytest
import torch
import torch._inductor.config as inductor

from megatron.errors import UsageError
from megatron.train.launch import launch
from pretrain_gpt2 import main
from tests.programs import arguments_of, lines_of, newest, start_ranks, whole_tensors

DROPOUT = "--attention-dropout 0.1 --hidden-dropout 0.1"
LARGER = "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --max-position-embeddings 256 "
SIZES = {  # on a GPU large enough for kernels that add in several blocks
    "cpu": "--vocab-size 64",
    "cuda": f"{LARGER} --seq-length 256 --vocab-size 8192 --micro-batch-size 4",
}
RUNS = {"one": [""], "two": [""], "resumed": ["--exit-interval 3", "--load {save}"]}


def switches() -> dict[str, object]:
    """Settings by which this process computes the same bits each time."""
    return {
        "torch": torch.are_deterministic_algorithms_enabled(),
        "fills": torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        "inductor": inductor.deterministic,
        "cudnn": torch.backends.cudnn.benchmark,
        **{name: os.environ.get(name) for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO")},
    }


SET = {"torch": True, "fills": False, "inductor": True, "cudnn": False,
       "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}  # fmt: skip


def train(words: str, device: str, file: Path) -> None:
    """The program; `file` gets the switches of its process."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    main(arguments_of(f"{SIZES[device]} {words}", file.parent), os.environ)
    file.write_text(json.dumps(switches()))


def test_runs_and_a_resumed_one_have_the_same_bits(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    device, losses, weights = request.config.getoption("--device"), {}, {}
    common = f"--mock-data --deterministic --train-iters 6 --log-interval 1 --lr 1e-3 {DROPOUT}"
    for starts in zip_longest(*RUNS.values()):
        with ExitStack() as stack:  # side by side, as a GPU's kernels take long to compile
            runs = {}
            for name, more in zip(RUNS, starts, strict=True):
                if more is not None:
                    (place := tmp_path / name).mkdir(exist_ok=True)
                    words = f"{common} --save {place} {more.format(save=place)}"
                    call = partial(train, words, device, place / "switches")
                    runs[place] = stack.enter_context(start_ranks(call, [0], 1, place))
            for place, run in runs.items():
                assert run.wait() == [0], run.text()
                assert json.loads((place / "switches").read_text()) == SET
                (place / "switches").unlink()
    for name in RUNS:
        save = tmp_path / name
        losses[name] = {line["step"]: line["loss"] for line in lines_of(save, "grad_norm")}
        weights[name] = {key: each.tobytes() for key, each in whole_tensors(newest(save)).items()}
    assert len({*losses["one"].values()}) == 6
    assert losses["one"] == losses["two"] == losses["resumed"]
    assert weights["one"] == weights["two"] == weights["resumed"]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.setenv(name, "")
    yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]


# The user's own settings, and whether they are kept.
OWN = [
    ({"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "ring"}, True),
    ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, False),
    ({"NCCL_ALGO": "Tree"}, False),
    ({"NCCL_ALGO": "Ring,Tree"}, False),
    ({"NCCL_ALGO": "allreduce:ring"}, False),
]


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize(("own", "kept"), OWN)
def test_a_users_own_setting_is_kept_or_refused(own: dict[str, str], kept: bool) -> None:
    if kept:
        with launch(environ=own, deterministic=True):
            assert switches() == SET | own
        return
    with pytest.raises(UsageError) as refused, launch(environ=own, deterministic=True):
        pass
    assert refused.value.flag in own
    assert not torch.are_deterministic_algorithms_enabled()
