"""The runner: its verdict on figures, what ranks count, and a whole run by torchrun."""

import dataclasses
import faulthandler
import json
import math
import os
import signal
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.functional import scaled_dot_product_attention

from conformance import run, worker
from conformance.adapters import plain
from conformance.compare import dead, differences, division, divisors, largest, nearest
from conformance.faults import FAULTS
from conformance.fixture import NAMES, STEPS, Figures, ranks, read_fixture
from conformance.plain import train
from tests.conformance import trainers
from tests.conformance.test_fixtures import NOISE
from tests.dist import Pool

HERE = "tests.conformance.trainers"
PLAIN = "conformance.adapters.plain:Adapter"
FAULT_ROWS = [(number, name) for number, name in enumerate(FAULTS)]


def options(words: str, adapter: str = PLAIN) -> Any:
    return run.options_of(["--adapter", adapter, *words.split()])


def judged(figures: Figures, words: str = "--layout data=2", model: str = "gpt2") -> run.Result:
    return run.judge(read_fixture(model), figures, options(words), [], {})


def copied(figures: Figures) -> Figures:
    return dataclasses.replace(
        figures,
        losses=list(figures.losses),
        grad_norms=list(figures.grad_norms),
        gradients={name: each.clone() for name, each in figures.gradients.items()},
        weights={s: {n: each.clone() for n, each in w.items()} for s, w in figures.weights.items()},
    )


@pytest.mark.parametrize("model", NAMES)
def test_the_plain_trainer_agrees_in_fp32(model: str) -> None:
    """test_fixtures.py has fp64. A fault shows, and is named, in such a trainer too."""
    name, fault = next((name, each) for name, each in FAULTS.items() if model in each.models)
    words = f"--layout data={fault.among[0]} --dtype float32"
    right = train(read_fixture(model), torch.float32)
    wrong = train(read_fixture(model), torch.float32, fault, fault.among[0])
    result = judged(right, words, model)
    assert result.status == 0, str(result)
    assert result.fault is None
    result = judged(wrong, words, model)
    assert result.status == 1
    assert name in str(result)


@pytest.mark.parametrize(("number", "name"), FAULT_ROWS)
def test_a_known_fault_is_named(number: int, name: str) -> None:
    """The fixture has its signature, and rounding to fp32 does not hide it."""
    fault = FAULTS[name]
    models = [model for model in NAMES if model in fault.models]
    fixture = read_fixture(models[number % len(models)])
    between = fault.among[number % len(fault.among)]
    figures = train(fixture, fault=fault, ranks=between)
    known = fixture.faults()[name, between]
    found = torch.tensor(figures.signature(fixture.weights()), dtype=torch.float64)
    size = known.abs()
    assert ((found - known).abs() <= torch.where(size < NOISE, NOISE, 1e-9 * size)).all()
    for tensors in (figures.gradients, *figures.weights.values()):
        tensors |= {key: each.float() for key, each in tensors.items()}
    result = judged(figures, f"--layout data={between} --dtype float32", fixture.name)
    assert result.status == 1
    assert result.fault is not None
    # Some are equal by theory at some number of ranks; then both are said.
    named = {result.fault.fault}
    if result.fault.next_distance < 1e-3:
        named.add(str(result.fault.next_fault))
    assert name in named
    assert name in str(result)


def test_a_fault_of_more_ranks_than_the_layout_has_is_not_named() -> None:
    fixture = read_fixture("gpt2")
    figures = train(fixture, fault=FAULTS["data_rank_means"], ranks=4)
    for between in (2, 5):  # nor one of a number that does not divide them
        named = nearest(figures, fixture, between)
        assert named is None or named.distance > 0.1
    result = judged(figures, "--layout data=1 --resume 3 --resume-layout data=4")
    assert result.fault is not None
    assert result.fault.fault == "data_rank_means"


NAME = "transformer.h.1.mlp.c_fc.weight"


def lose(figures: Figures) -> None:
    del figures.gradients[NAME]


def add(figures: Figures) -> None:
    figures.weights[3]["surplus"] = torch.ones(2)


def spoil(figures: Figures) -> None:
    figures.gradients[NAME][0, 0] = math.nan


def transpose(figures: Figures) -> None:
    figures.weights[5][NAME] = figures.weights[5][NAME].T


def stop(figures: Figures) -> None:
    figures.losses.pop()


def go_on(figures: Figures) -> None:
    figures.grad_norms.append(1.0)


def diverge(figures: Figures) -> None:
    figures.losses[2] = math.nan


def leave_out_weights(figures: Figures) -> None:
    del figures.weights[3]


def scale_one(figures: Figures) -> None:
    figures.gradients[NAME] *= 1 + 1e-11  # below the cap of later figures


def slip(figures: Figures) -> None:
    figures.losses[0] *= 1 + 1e-11
    figures.losses[1] *= 1 + 1e-10  # more, and below the limit of later figures


def move_a_zero(figures: Figures) -> None:
    figures.gradients["transformer.h.0.attn.c_attn.bias"][30] += 1e-6


@pytest.mark.parametrize(
    ("change", "figure", "where"),
    [
        (lose, "gradient", NAME),
        (add, "weight", "surplus"),
        (spoil, "gradient", NAME),
        (transpose, "weight", NAME),
        (stop, "loss", "step 5"),
        (go_on, "grad_norm", "steps"),
        (diverge, "loss", "step 3"),
        (leave_out_weights, "weight", "step 3"),
        (scale_one, "gradient", NAME),
        (slip, "loss", "step 1"),
        (move_a_zero, "gradient", "c_attn.bias"),
    ],
)
def test_a_difference_has_its_place(
    change: Callable[[Figures], None], figure: str, where: str
) -> None:
    figures = copied(read_fixture("gpt2").expected())
    change(figures)
    result = judged(figures)
    assert result.status == 1
    worst = largest(result.differences)[figure]
    assert worst.is_fault
    assert where in worst.where
    others = {name for name, each in largest(result.differences).items() if each.is_fault}
    assert others == {figure}


def test_rounding_is_no_difference_and_has_a_limit() -> None:
    """A change of a few units in the last place agrees in its own dtype alone."""
    fixture = read_fixture("gpt2")
    figures = copied(fixture.expected())
    for each in figures.gradients.values():
        each *= 1 + 1e-12
    found = differences(figures, fixture.expected(), fixture.facts, "float64")
    assert largest(found)["gradient"].is_fault  # below the limit of later figures
    for each in figures.gradients.values():
        each *= 1 + 1e-6
    for dtype, is_fault in (("float64", True), ("float32", False)):
        found = differences(figures, fixture.expected(), fixture.facts, dtype)
        assert largest(found)["gradient"].is_fault is is_fault
    for each in figures.gradients.values():
        each *= 1 + 1e-3
    found = differences(figures, fixture.expected(), fixture.facts, "float32")
    assert largest(found)["gradient"].is_fault


def by_steps(
    adapter: type[plain.Adapter], model: str = "gpt2", first: int = 1, last: int = STEPS
) -> tuple[Any, Figures, Any]:
    fixture = read_fixture(model)
    trainer = adapter(fixture, {"data": 1}, torch.float64)
    return trainer, *worker.take_steps(trainer, fixture, first, last)


def test_agreement_without_content() -> None:
    """A dead trainer is not one that differs, and a parameter left out does not make one dead."""
    _, figures, _ = by_steps(trainers.Dead)
    result = judged(figures)
    assert result.status == 3
    assert "gradient norm" in result.reason
    figures = copied(read_fixture("gpt2").expected())
    figures.grad_norms[-1] = 1e-9  # of one step alone
    assert "gradient norm" in str(dead(figures, read_fixture("gpt2").facts))

    figures = copied(read_fixture("gpt2").expected())
    figures.losses = [1.0, 1.0, 1 + 1e-4]  # the fixture's moves by 0.02 to 0.23
    assert "move" in str(dead(figures, read_fixture("gpt2").facts))

    figures = copied(read_fixture("gpt2").expected())
    figures.gradients[NAME].zero_()
    result = judged(figures)
    assert result.status == 1
    assert f"{NAME} has no gradient" in result.reason


def test_every_rank_does_all_the_work() -> None:
    fixture, layout = read_fixture("gpt2"), {"data": 2}
    _, figures, counts = by_steps(trainers.Serial)
    found = division([counts] * 2, layout, fixture, run.flops_of(fixture))
    result = run.judge(fixture, figures, options("--layout data=2"), [found], {})
    assert result.status == 3
    assert "ignores the layout" in result.reason


def test_moments_lost_on_resume_are_named(tmp_path: Path) -> None:
    fixture = read_fixture("gpt2")
    first, figures, _ = by_steps(trainers.Serial, last=3)
    first.save(tmp_path)
    for adapter, status in ((trainers.Serial, 0), (trainers.LosesMoments, 1)):
        again = adapter(fixture, {"data": 1}, torch.float64)
        again.load(tmp_path)
        rest, _ = worker.take_steps(again, fixture, 4, STEPS)
        whole = copied(figures)
        whole.add(rest)
        result = judged(whole)
        assert result.status == status
    assert result.fault is not None
    assert result.fault.fault == "moments_lost"


def test_what_a_layout_divides() -> None:
    assert divisors({"tensor": 2, "data": 4}) == {
        "flops": [2, 4],
        "parameters": [2],
        "gradients": [2],
        "optimizer": [2],
    }
    assert divisors({"data": 4, "zero": 2, "sequence": 1})["gradients"] == [4]
    assert divisors({"data": 4, "zero": 2})["parameters"] == []
    assert divisors({"context": 2, "shard": 2})["parameters"] == [2]
    assert ranks({"data": 4, "zero": 3}) == 4


@pytest.mark.parametrize(
    ("layout", "flops", "held", "ignored"),
    [
        ({"data": 2}, 0.5, 1.0, set()),
        ({"tensor": 2}, 0.6, 0.6, set()),
        ({"tensor": 2}, 1.0, 0.5, {"flops"}),
        ({"tensor": 2}, 1.0, 1.0, {"flops", "parameters", "gradients", "optimizer"}),
        ({"tensor": 2, "data": 2}, 0.5, 0.5, {"flops"}),
        ({"data": 2, "zero": 3}, 0.5, 1.0, {"parameters", "gradients", "optimizer"}),
        ({"data": 2, "zero": 1}, 0.5, 1.0, {"optimizer"}),
        ({"data": 2, "zero": 2}, 0.5, 0.0, {"gradients", "optimizer"}),  # not counted
        ({"tensor": 4}, 0.25, 0.5, {"parameters", "gradients", "optimizer"}),
        ({"tensor": 3, "data": 2}, 1 / 3, 1 / 3, {"flops"}),
        ({"data": 1}, 1.0, 1.0, set()),
    ],
)
def test_a_layout_that_is_ignored(
    layout: dict[str, int], flops: float, held: float, ignored: set[str]
) -> None:
    """flops, held: the shares of one process's counts that each rank has."""
    fixture = read_fixture("llama")
    elements = sum(each.numel() for each in fixture.weights().values())

    def count(whole: float) -> dict[str, int]:
        return {"elements": int(whole), "bytes": int(8 * whole)}

    each = {
        "flops": count(flops * 1e6),
        "parameters": count(held * elements),
        "gradients": count(held * elements),
        "optimizer": count(2 * held * elements),
    }
    found = division([each] * ranks(layout), layout, fixture, 10**6)
    assert {kind for kind in found if found[kind]["ignored"]} == ignored
    result = run.judge(
        fixture, fixture.expected(), options("--layout data=2"), [found], {"torch": "1"}
    )
    assert result.status == (3 if ignored else 0)


def test_memory_of_two_names_counts_once() -> None:
    flat = torch.zeros(10, dtype=torch.float64)
    tied, freed = torch.zeros(6), torch.zeros(5)
    freed.untyped_storage().resize_(0)
    found = worker.held([flat[:5], flat[5:], tied, tied.view(2, 3), freed])
    assert found == {"elements": 16, "bytes": 10 * 8 + 6 * 4}


def local_counts() -> tuple[int, dict[str, int]]:
    mesh = init_device_mesh("cpu", (2,))
    x = DTensor.from_local(torch.ones(4, 8), mesh, [Replicate()])
    weight = DTensor.from_local(torch.ones(8, 3), mesh, [Shard(1)])
    with worker.Matmuls() as counted:
        torch.mm(x, weight)
    return counted.flops, worker.held([weight])


def test_a_rank_counts_its_own_part_of_a_distributed_tensor(gloo: Pool) -> None:
    for flops, held in gloo.run(2, local_counts):
        assert flops == 2 * 4 * 8 * 3  # half of the matmul
        assert held == {"elements": 24, "bytes": 96}


def attended(q: Tensor, k: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, k)


def test_matmuls_are_counted_forward_and_backward() -> None:
    x, weight = torch.ones(2, 5, 8, requires_grad=True), torch.ones(8, 3, requires_grad=True)
    with worker.Matmuls() as counted:
        (x @ weight).sum().backward()
    assert counted.flops == 3 * (2 * 10 * 8 * 3)
    with worker.Matmuls() as counted:
        torch.ones(10, 3).addmm_(torch.ones(10, 8), torch.ones(8, 3))
        torch.mm(torch.ones(10, 8), torch.ones(8, 3), out=torch.ones(10, 3))
    assert counted.flops == 2 * (2 * 10 * 8 * 3)
    q, k = (torch.ones(2, 4, 6, 8, requires_grad=True) for _ in range(2))
    with worker.Matmuls() as counted:
        attended(q, k).sum().backward()
    assert counted.flops == 7 * (2 * 2 * 4 * 6 * 6 * 8)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        ("--layout tensor=0", "--layout"),
        ("--layout tensor", "--layout"),
        ("--layout expert=2", "--layout"),
        ("--layout tensor=2,,data=2", "--layout"),
        ("--layout data=2,data=2", "--layout"),
        ("--layout data=9999", "--layout"),
        ("--layout=-data=2", "--layout"),
        ("", "--layout"),
        ("--layout data=2 --model t5", "--model"),
        ("--layout data=2 --dtype float16", "--dtype"),
        ("--layout data=2 --resume 5", "--resume"),
        ("--layout data=2 --resume-layout data=1", "--resume-layout"),
        ("--layout data=2 --timeout 0", "--timeout"),
        ("--layout data=2 --timeout nan", "--timeout"),
        ("--layout data=2 --python no-such-python", "--python"),
        ("--layout data=2 --json no/such/folder/file.json", "--json"),
        ("--layout data=2 --adapter conformance.adapters.plain", "--adapter"),
        ("--layout data=2 --adapter conformance.adapters.nothing:Adapter", "--adapter"),
        ("--layout data=2 --adapter nothing.at.all:Adapter", "--adapter"),
        ("--layout data=2 --adapter conformance.adapters.plain:Adaptor", "--adapter"),
        ("--layout data=2 --surplus", "--surplus"),
    ],
)
def test_what_the_command_refuses(
    words: str, field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        options(words)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert field in said.err


@pytest.mark.parametrize(
    ("name", "save", "key", "word"),
    [
        ("Refuses", None, "refused", "no kernel for this head"),
        ("NotResumable", "saved", "refused", "resumed"),
        ("Raises", None, "failed", "ZeroDivisionError: a rank has no samples"),
    ],
)
def test_a_rank_that_refuses_or_fails_says_why(
    name: str,
    save: str | None,
    key: str,
    word: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job = {
        "adapter": f"{HERE}:{name}",
        "fixture": str(read_fixture("gpt2").folder),
        "layout": {"data": 1},
        "dtype": "float64",
        "steps": [1, STEPS],
        "load": None,
        "save": save,
        "output": str(tmp_path),
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    monkeypatch.setattr(plain, "dist", type("NoGroup", (), {"is_initialized": lambda: True}))
    monkeypatch.setenv("RANK", "0")
    assert worker.main(str(tmp_path / "job.json")) != 0
    assert word in json.loads((tmp_path / "0.json").read_text())[key]


# In place of Python: torchrun whose rank 0 fails because rank 1 did, or hangs and says where.
RAISES = """#!/bin/sh
for last; do :; done
folder=$(dirname "$last")
printf '%s' '{"failed": "RuntimeError: connection closed", "time": 2}' > "$folder/0.json"
printf '%s' '{"failed": "Traceback\\nZeroDivisionError: no samples", "time": 1}' > "$folder/1.json"
exit 1
"""
HANGS = """#!/bin/sh
for last; do :; done
folder=$(dirname "$last")
trap 'echo in a wait > "$folder/0.stack"' USR1
trap 'kill -9 $$' TERM
echo $$ > "$folder/0.pid"
echo nobody comes
while :; do sleep 0.05; done
"""


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (RAISES, ["the trainer fails: ZeroDivisionError: no samples"]),
        (HANGS, ["no end within 3 seconds", "nobody comes", "rank 0: in a wait"]),
    ],
)
def test_ranks_that_fail_or_hang(
    program: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = tmp_path / "python"
    python.write_text(program)
    python.chmod(0o755)
    flags = "--layout data=2 --model gpt2 --timeout 3"
    assert run.main(["--adapter", PLAIN, "--python", str(python), *flags.split()]) == 2
    said = capsys.readouterr().out
    assert all(word in said for word in words), said


@pytest.mark.parametrize(("each", "status"), [((0, 2, 1), 1), ((3, 0, 2), 2), ((0, 3, 0), 3)])
def test_the_status_of_several_models(
    each: tuple[int, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A difference is said before a failure, and this before figures without content."""
    found = iter(each)
    monkeypatch.setattr(run, "flops_of", lambda fixture: 1)
    monkeypatch.setattr(run, "run_model", lambda model, *_: run.Result(model.name, next(found)))
    assert run.main(["--adapter", PLAIN, "--layout", "data=1"]) == status


def test_a_rank_says_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hang(job: Any, rank: int) -> dict[str, Any]:
        os.kill(int((tmp_path / "0.pid").read_text()), signal.SIGUSR1)
        return {"division": []}

    (tmp_path / "job.json").write_text(json.dumps({"output": str(tmp_path)}))
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(worker, "work", hang)
    try:
        assert worker.main(str(tmp_path / "job.json")) == 0
    finally:
        faulthandler.unregister(signal.SIGUSR1)
    assert "in hang" in (tmp_path / "0.stack").read_text()
    assert not (tmp_path / "0.pid").exists()


def test_a_whole_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By torchrun, resumed among other ranks."""
    file = tmp_path / "results.json"
    words = f"--adapter {PLAIN} --layout data=1 --resume 3 --resume-layout data=2 --model gpt2"
    assert run.main([*words.split(), "--json", str(file)]) == 0
    assert "agreement" in capsys.readouterr().out
    record = json.loads(file.read_text())
    assert record["status"] == 0
    result = record["models"]["gpt2"]
    assert result["versions"]["torch"] == version("torch")
    first, second = result["division"]
    assert first["flops"]["times"] == second["flops"]["times"] == 1
    assert len(second["parameters"]["bytes"]) == 2
    assert set(result["largest"]) == {"loss", "grad_norm", "gradient", "weight"}
