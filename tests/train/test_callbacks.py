"""Callbacks: when each method is called, what it reads and asks for, and that a run with them has
the numbers of a run without."""

import random
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron.api import Callback
from megatron.config.launch import StopSignals
from megatron.config.parse import parse
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.batch import Batch
from megatron.models.gpt import GPT2
from megatron.models.vit import ViT
from megatron.parallel.stages import plan_stages
from megatron.train.callbacks import HOOKS, Clock, Training, open_callback
from megatron.train.loop import train
from megatron.train.metrics import Metrics
from megatron.train.monitors import usual
from megatron.train.step import StepResult
from tests.dist import Pool, on_ranks
from tests.programs import pretrain
from tests.refusals import refusal
from tests.tiny import mesh_of_ranks, tiny_config, tiny_state
from tests.train.test_loop import lines, loop_of
from tools.layouts.meters import host_reads

HERE = "tests.train.test_callbacks:"
SMALL = "--num-layers 2 --hidden-size 8 --num-attention-heads 4 --train-iters 3 --mock-data"


def run(
    folder: Path,
    callbacks: Sequence[Callback],
    layout: int | str = 1,
    log_interval: int = 1,
    **settings: Any,
) -> tuple[int, str]:
    """(steps done, the reason for the end) of a run that draws dropout and logs each step."""
    mesh = mesh_of_ranks(layout)
    config = tiny_config(attention_dropout=0.1, hidden_dropout=0.1)
    plan = plan_stages(config.num_layers, mesh.pipeline.size, 1, None)
    state = tiny_state(mesh, config, pipeline=plan)
    every = [*usual("test", log_interval), *callbacks]
    with Metrics(folder / "m.jsonl", mesh, start=0, callbacks=every) as metrics:
        loop = loop_of(
            metrics,
            mesh,
            {"train_iters": 4, "eval_interval": 2} | settings,
            log_interval=log_interval,
            save_interval=3,
        )
        end = train(state, loop, lambda: metrics.write({"step": 0, "started": "now"}))
        metrics.write({"step": state.step, "ended": end})
    return state.step, end


def numbers(folder: Path) -> list[tuple[float, ...]]:
    """Loss and norm of each step."""
    found = [line for line in lines(folder) if "loss" in line]
    return [(line["loss"], line["grad_norm"]) for line in found]


class Recorder(Callback):
    """Writes down each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name in HOOKS:
            object.__getattribute__(self, "calls").append(name)
        return object.__getattribute__(self, name)


def test_methods_are_called_in_order(tmp_path: Path) -> None:
    recorder = Recorder()
    assert run(tmp_path, [recorder]) == (4, "train_iters")
    step, log = ["pre_step", "post_step"], ["pre_log", "log_metrics"]
    evaluation, save = ["pre_evaluation", "post_evaluation"], ["pre_save", "post_save"]
    first = [*step, *log]
    second, third, last = [*first, *evaluation], [*first, *save], [*first, *evaluation, *save]
    ends = ["post_train", "log_metrics", "close"]
    start = ["pre_train", "log_metrics"]
    assert recorder.calls == [*start, *first, *second, *third, *last, *ends]
    assert set(recorder.calls) | {"on_error"} == HOOKS.keys()


class Draws(Callback):
    """Draws from every source of random numbers that it could share with the run."""

    def draw(self, *given: object) -> None:
        torch.rand(3), np.random.rand(3), random.random()
        torch.manual_seed(self.training.state.step)

    pre_train = pre_step = post_step = draw


class Numbers(Callback):
    """Adds the share of labels that the logits have as their largest."""

    wants_outputs = True

    def post_step(self, result: StepResult) -> None:
        assert result.outputs is not None
        hits = result.outputs.logits.argmax(-1) == result.outputs.labels
        self.training.add(accuracy=hits.double().mean().item())
        self.training.add("", unseen=1, rank=self.training.state.mesh.control.rank)


def measure(folder: Path, layout: int | str) -> None:
    run(folder / str(mesh_of_ranks(layout).control.rank), [Numbers()], layout)


def test_added_numbers_are_the_same_at_every_layout(
    gloo: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(tmp_path / "one", 1)
    said = capsys.readouterr().out
    first = next(line for line in lines(tmp_path / "one" / "0") if "accuracy" in line)
    assert f"| accuracy {first['accuracy']:.4g} |" in said
    assert "unseen" not in said
    assert (first["unseen"], first["rank"]) == (1, 0)
    for name in ("tensor=2", "data=2", "context=2"):
        gloo.run(2, measure, tmp_path / name, name)
        added = [line.get("accuracy") for line in lines(tmp_path / name / "0")]
        assert added == [line.get("accuracy") for line in lines(tmp_path / "one" / "0")]
        assert not (tmp_path / name / "1" / "m.jsonl").exists()


def test_callbacks_of_a_run_change_no_number_and_read_nothing_from_the_device(
    tmp_path: Path,
) -> None:
    counts = []
    for name, callbacks in (("plain", []), ("drawn", [Draws(), Recorder()])):
        with host_reads() as reads:
            run(tmp_path / name, callbacks)
        counts.append(reads.total())
    assert numbers(tmp_path / "drawn") == numbers(tmp_path / "plain")
    assert counts[0] == counts[1] > 0
    with host_reads() as reads:
        run(tmp_path / "longer", [], train_iters=5)
    assert reads.total() - counts[0] == 1, "one read a step"


class Stops(Callback):
    """Asks for a stop after step 2, on the last rank."""

    def post_step(self, result: StepResult) -> None:
        control = self.training.state.mesh.control
        if self.training.state.step == 2 and control.rank == control.size - 1:
            self.training.stop("good enough")


def stopped(folder: Path, layout: int | str) -> tuple[int, str]:
    return run(folder / str(mesh_of_ranks(layout).control.rank), [Stops()], layout)


def test_a_stop_that_one_rank_asks_for_ends_all(gloo: Pool, tmp_path: Path) -> None:
    assert gloo.run(2, stopped, tmp_path, "tensor=2") == [(3, "good enough")] * 2
    training = Training(None, 1, print, print, Clock(), StopSignals())
    for reason in ("SIGTERM", "train_iters", ""):
        with pytest.raises(ValueError, match="reason"):
            training.stop(reason)


class Fails(Callback):
    """Raises in one of its methods."""

    def __init__(self, hook: str, config: Any = None) -> None:
        super().__init__(config)
        self.errors: list[Exception] = []
        setattr(self, hook, self.fail)

    def fail(self, *arguments: object) -> None:
        raise ZeroDivisionError("of a callback")

    def on_error(self, error: Exception) -> None:
        self.errors.append(error)


class Elsewhere(Fails):
    """A logger that loses its network, whose other methods are collectives."""

    may_fail = True

    def __init__(self) -> None:
        super().__init__("log_metrics")
        self.closed: list[int] = []

    def fail(self, *arguments: object) -> None:
        if self.training.state.mesh.control.rank == 0:
            raise ConnectionError

    def post_step(self, result: StepResult) -> None:
        self.training.state.mesh.control.gather(0)

    def close(self, exit_code: int) -> None:
        self.closed.append(exit_code)


@on_ranks(2)
def test_an_error_of_one_that_may_fail_ends_its_lines_alone(tmp_path: Path) -> None:
    callback, rank = Elsewhere(), dist.get_rank()
    assert run(tmp_path / str(rank), [callback])[1] == "train_iters"
    assert callback.closed == [int(rank == 0)]


@pytest.mark.parametrize("hook", [each for each in HOOKS if each != "on_error"])
def test_an_error_of_a_callback_ends_the_run(tmp_path: Path, hook: str) -> None:
    callback, other = Fails(hook), Recorder()
    with pytest.raises(ZeroDivisionError):
        run(tmp_path, [callback, other])
    assert [type(each) for each in callback.errors] == [ZeroDivisionError] * (hook != "close")
    assert other.calls[-1] == "close", "the others are closed"
    last = {"ended": "train_iters" if hook == "close" else "ZeroDivisionError"}
    assert last.items() <= lines(tmp_path)[-1].items()


class FailsOnOne(Callback):
    def post_step(self, result: StepResult) -> None:
        if self.training.state.step == 2 and self.training.state.mesh.control.rank == 1:
            raise ZeroDivisionError("of a callback")


class Collective(Callback):
    """Each rank waits for the others in its methods."""

    def log_metrics(self, line: Mapping[str, Any]) -> None:
        self.training.state.mesh.control.gather(0)


def test_an_error_on_one_rank_ends_the_program_with_its_traceback(tmp_path: Path) -> None:
    words = f"--train-iters 9 --callbacks {HERE}FailsOnOne {HERE}Collective"
    with pretrain(words, world=2, folder=tmp_path) as ranks:
        assert 0 not in ranks.wait()
        for said in ("rank 1 of 2 (data 1", "in post_step", "ZeroDivisionError: of a callback"):
            assert said in ranks.text()
        assert ranks.text().count("Traceback") == 1


class Hides(Callback):
    def post_step(self, result: StepResult) -> None:
        raise ZeroDivisionError

    def on_error(self, error: Exception) -> None:
        raise KeyError("of on_error")


def test_an_error_is_not_hidden_by_those_that_it_is_told_to(tmp_path: Path) -> None:
    other = Recorder()
    with pytest.raises(ZeroDivisionError) as raised:
        run(tmp_path, [Hides(), other])
    assert "of on_error" in raised.value.__notes__[0]
    assert "on_error" in other.calls


class Measures(Callback):
    """Adds a number after the line of the step, and pauses the clock while it stands still."""

    def post_evaluation(self, loss: float | None) -> None:
        clock = self.training.clock
        with clock.paused():
            self.training.add(evaluated=self.training.state.step)
        clock._start, clock._paused = clock._start - 100, clock._paused + 100  # it took so long

    def post_train(self, end: str) -> None:
        self.training.add(last=1)


def test_numbers_that_come_after_the_line_have_one_of_their_own(tmp_path: Path) -> None:
    run(tmp_path, [Measures()])
    found = [line for line in lines(tmp_path) if "evaluated" in line or "last" in line]
    evaluated = [{"step": step, "evaluated": step} for step in (2, 4)]
    assert found == [*evaluated, {"step": 4, "last": 1}]
    logged = [line for line in lines(tmp_path) if "loss" in line]
    assert all(line["tokens_per_second"] > 0 for line in logged)
    assert logged[-1]["elapsed_seconds"] > 100, "with evaluations"


def test_pauses_within_pauses_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, 2.0, 5.0, 7.0, 10.0])
    monkeypatch.setattr("megatron.train.callbacks.time.monotonic", lambda: next(times))
    clock = Clock()
    with clock.paused(), clock.paused():
        pass
    assert clock.training == 10 - (7 - 1)


class Keeps(Callback):
    """Notes whether the logits of the step before are still in memory."""

    wants_outputs = True

    def __init__(self) -> None:
        super().__init__()
        self.logits: list[weakref.ref[torch.Tensor]] = []

    def pre_step(self, batches: Sequence[Batch]) -> None:
        assert all(each() is None for each in self.logits)

    def post_step(self, result: StepResult) -> None:
        assert result.outputs is not None
        self.logits.append(weakref.ref(result.outputs.logits))


def test_outputs_are_freed_before_the_next_step(tmp_path: Path) -> None:
    callback = Keeps()
    run(tmp_path, [callback])
    assert len(callback.logits) == 4


class Exits(Callback):
    """Ends the process in a step that is profiled; its constructor does not call Callback's."""

    def __init__(self, config: Any) -> None:
        pass

    def post_step(self, result: StepResult) -> None:
        assert self.config.training.train_iters == 9
        if self.training.state.step == 2:
            raise SystemExit(7)


def test_an_exit_in_a_profile_keeps_its_status(tmp_path: Path) -> None:
    words = f"--train-iters 9 --callbacks {HERE}Exits --profile-step-start 1 --profile-step-end 3"
    with pretrain(f"{words} --save {tmp_path}/s", folder=tmp_path) as ranks:
        assert ranks.wait() == [7], ranks.text()


class Misspelt(Callback):
    on_gpu = False  # which is no method

    def post_setp(self, result: StepResult) -> None:
        pass


class Singular(Callback):
    def log_metric(self, line: object) -> None:
        pass


class Short(Callback):
    def post_step(self) -> None:
        pass


def no_callback(config: Any) -> object:
    return config


def no_config() -> Callback:
    return Callback()


def test_a_callback_that_does_not_fit_is_refused() -> None:
    for name, model, named in (
        ("Misspelt", GPT2, "post_step"),
        ("Singular", GPT2, "log_metrics"),
        ("Short", GPT2, "post_step"),
        ("no_callback", GPT2, "PretrainGPT2Config"),
        ("no_config", GPT2, "config"),
        ("Absent", GPT2, "Absent"),
        ("Numbers", ViT, "ViT"),  # which has no outputs
    ):
        config = parse(PretrainGPT2Config, [*SMALL.split(), "--callbacks", HERE + "Numbers"], {})
        assert isinstance(open_callback(HERE + "Numbers", config, GPT2), Numbers)
        refusal(partial(open_callback, HERE + name, config, model), named, field="--callbacks")


@pytest.mark.parametrize(
    ("numbers", "error"),
    [
        ({"loss": 1.0}, ValueError),
        ({"step_seconds": 1.0}, ValueError),  # of another callback
        ({"norm": torch.ones(())}, TypeError),
    ],
)
def test_numbers_that_a_line_cannot_have_are_refused(
    tmp_path: Path, numbers: Mapping[str, Any], error: type[Exception]
) -> None:
    class Adds(Callback):
        def pre_log(self) -> None:
            self.training.add(**numbers)

    with pytest.raises(error, match=next(iter(numbers))):
        run(tmp_path, [Adds()])
