"""The scaling study on gloo's ranks, with models of a layer or two; and all of it by torchrun."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks import scaling, scaling_configurations, scaling_worlds
from benchmarks.comparison import ROOT
from benchmarks.scaling_configurations import Configuration, studies
from benchmarks.scaling_worlds import Failed, Worlds, first_ranks
from benchmarks.turns import Stopwatch
from megatron.parallel.mesh import ControlGroup, Mesh, build_mesh
from tests.dist import Pool

SETTINGS = scaling.Settings(
    is_small=None,
    precision="fp32",
    hardware=None,
    rounds=2,
    steps=2,
    warm_up=1,
    threads=1,
    command="torchrun",
)


def make_tiny() -> None:
    """Models of one layer on 16 tokens, of this process from here on."""
    scaling_configurations.LAYERS, scaling_configurations.SEQUENCE = 40, 64


def whole_mesh() -> Mesh:
    return build_mesh({"tensor": dist.get_world_size()}, torch.device("cpu"))


def worlds(**changes: Any) -> Worlds:
    given = {"whole": whole_mesh(), "precision": "fp32", "compiled": False, "warm_up": 1}
    return Worlds(**given | changes)


def parts() -> list[tuple[int, ...] | None]:
    """(data rank and size, tensor rank and size, sum of the ranks that take part), or None."""
    whole, found = whole_mesh(), []
    for copies, tensor in ((1, 1), (1, 2), (3, 1), (2, 2)):
        mesh = first_ranks(whole, copies, tensor)
        if mesh is None:
            found.append(None)
            continue
        ranks = [(axis.rank, axis.size) for axis in (mesh.data, mesh.tensor)]
        found.append((*ranks[0], *ranks[1], sum(mesh.control.gather(dist.get_rank()))))
    return found


def test_the_first_ranks_take_part(gloo: Pool) -> None:
    assert gloo.run(4, parts) == [
        [(0, 1, 0, 1, 0), (0, 1, 0, 2, 1), (0, 3, 0, 1, 3), (0, 2, 0, 2, 6)],
        [None, (0, 1, 1, 2, 1), (1, 3, 0, 1, 3), (0, 2, 1, 2, 6)],
        [None, None, (2, 3, 0, 1, 3), (1, 2, 0, 2, 6)],
        [None, None, None, (1, 2, 1, 2, 6)],
    ]


def cut_both_ways() -> list[float]:
    """Losses of a model on 2 x 2 of the ranks, whose samples differ."""
    make_tiny()
    both = Configuration("gpt2_scaling_1.2b", tensor=2, copies=2, is_small=True)

    def work(_: Mesh, watch: Stopwatch) -> list[float]:
        return watch.losses(2)["losses"]

    answers = worlds().turn(both, work)
    assert not isinstance(answers, Failed)
    return [loss for each in answers for loss in each]


def test_both_axes_train_one_model(gloo: Pool) -> None:
    losses = gloo.run(4, cut_both_ways)[0]
    assert len(losses) == 8
    assert len(set(losses)) == 2  # of two steps, the same on all ranks
    assert all(7 < loss < 8 for loss in losses)  # log 1600 = 7.4


def idles() -> float:
    """Processor seconds of this rank while the first one works for a while."""
    make_tiny()
    configuration = studies(2, is_small=True)[0].configuration
    mine = worlds()
    mine.turn(configuration, lambda mesh, watch: None)

    def work(_: Mesh, watch: Stopwatch) -> None:
        until = time.process_time() + 1
        while time.process_time() < until:
            watch.time(1)

    start = time.process_time()
    mine.turn(configuration, work)
    return time.process_time() - start


def test_ranks_that_take_no_part_sleep(gloo: Pool) -> None:
    working, idle = gloo.run(2, idles)
    assert working > 1
    assert idle < 0.1


def run_out(words: str) -> list[Any]:
    """One configuration after another on two ranks; the model of the largest is too large."""
    make_tiny()
    build = scaling_worlds.build_state

    def too_large(section: Any, *rest: Any, **settings: Any) -> Any:
        state = build(section, *rest, **settings)
        if section.hidden_size == 384:
            raise RuntimeError(words)
        return state

    scaling_worlds.build_state = too_large
    try:
        points = [each for each in studies(2, is_small=True) if each.configuration.ranks == 2]
        found = [worlds().turn(each.configuration, lambda *_: "ran") for each in points]
    finally:
        scaling_worlds.build_state = build
    return [(each.configuration.model, said) for each, said in zip(points, found, strict=True)]


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 2.00 GiB.\nmore",
        "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried",
    ],
)
def test_what_runs_out_of_memory_is_told_and_the_others_go_on(gloo: Pool, words: str) -> None:
    for found in gloo.run(2, run_out, words):
        for model, said in found:
            if model == "8.3B":
                assert said == Failed(f"out of memory: {words.splitlines()[0]}")
            else:
                assert said == ["ran", "ran"]


def test_any_other_error_is_no_figure(gloo: Pool) -> None:
    with pytest.raises(RuntimeError, match="it is broken"):
        gloo.run(2, run_out, "it is broken")


class CannedWorlds:
    """Two ranks, of which one says what the other does; the number of heads never fits."""

    def __init__(self) -> None:
        self.whole = Mesh(device=torch.device("cpu"), control=ControlGroup(size=2))
        self.order: list[str] = []

    def turn(self, configuration: Configuration, work: Any) -> Any:
        self.order.append(configuration.name)
        if configuration.heads is not None:
            return Failed("out of memory: all of it")
        if work.__qualname__.startswith("profile"):
            return [{"step_seconds": 1.0}, None][: configuration.ranks]
        return [[1.0, 2.0], [3.0, 1.0]][: configuration.ranks]


def test_configurations_take_turns_and_what_fails_is_out() -> None:
    points, results, canned = studies(2, is_small=True), {}, CannedWorlds()
    assert list(scaling.rounds(canned, SETTINGS, points, results)) == [1, 2]
    one, two, copies, strong, *heads = dict.fromkeys(
        each.configuration.name for each in points if each.configuration.ranks <= 2
    )
    assert results[one].rounds == [[1.0, 2.0]] * 2
    assert results[two].rounds == [[3.0, 2.0]] * 2  # the slowest rank's
    assert results[two].communication == {"step_seconds": 1.0}
    assert {results[each].reason for each in heads} == {"out of memory: all of it"}
    assert results[points[2].configuration.name].reason == "takes 4 ranks, 2 were started"
    # The second round begins with another one, and profiles each behind its turn.
    second = [each for each in (two, copies, strong, one) for _ in range(2)]
    assert canned.order == [one, two, copies, strong, *heads, *second]


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["--rounds", "0"], "--rounds"),
        (["--hardware", "dgx3"], "--hardware"),
        (["--page", "/nowhere/page.md"], "/nowhere"),
    ],
)
def test_wrong_settings_are_refused(words: list[str], flag: str) -> None:
    command = [sys.executable, "benchmarks/scaling.py", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert flag in done.stderr


TINY = """
import runpy, sys
sys.path.insert(0, {root!r})
from tests.benchmarks.test_scaling import make_tiny
make_tiny()
runpy.run_path("benchmarks/scaling.py", run_name="__main__")
"""


def test_all_of_it_runs_on_two_processes_which_measure_what_they_can(tmp_path: Path) -> None:
    endings = {"json": "json", "picture": "png", "page": "md"}
    files = {name: tmp_path / f"scaling.{ending}" for name, ending in endings.items()}
    flags = [word for name, file in files.items() for word in (f"--{name}", str(file))]
    flags += ["--rounds", "2", "--steps", "1", "--warm-up", "1", "--hardware", "cpu"]
    (tmp_path / "tiny.py").write_text(TINY.format(root=str(ROOT)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=2", str(tmp_path / "tiny.py"), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(files["json"].read_text())
    assert (written["rounds"], written["miniature"], written["processes"]) == (2, True, 2)
    assert written["threads_per_process"] == 1
    for each in written["configurations"].values():
        if each["ranks"] > 2:
            assert each["reason"] == f"takes {each['ranks']} ranks, 2 were started"
            continue
        assert each["reason"] is None
        assert [len(times) for times in each["seconds_of_rounds"]] == [1, 1]
        cut = {"tensor"} if each["tensor_parallel"] > 1 else set()
        cut |= {"data"} if each["data_parallel"] > 1 else set()
        assert each["communication"].keys() == cut | {"step_seconds"}
        assert all(0 < each["communication"][axis]["share"] < 1 for axis in cut)
    assert len([each for each in written["points"] if each["measured"]]) == 8
    assert all(each["predicted"] > 0 for each in written["points"])
    assert files["picture"].stat().st_size > 10_000
    assert "torchrun --nproc-per-node 2 benchmarks/scaling.py" in files["page"].read_text()
