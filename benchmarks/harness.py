"""One instrument for every benchmark: contenders in processes of their own, in rounds.

    question    a file of this folder: it declares contenders and the columns of a table
    contender   a function that prepares something and returns its turn, which does it once
    group       contenders that are compared, each with the first of them
    round       new processes of all contenders, which take turns, on a GPU one after another has
                all of its turns; who is first changes
    figures     of a turn: wall and CPU seconds, peak memory, and what the turn itself returns

Processes that run the same code differ in speed by several per cent, so a ratio is taken within a
round, and its interval is over rounds. A process that waits for its turn takes no CPU. `report.py`
makes table, page and picture of the figures.

Run as a program, a question starts all ranks of a contender on this machine. Under torchrun or
Slurm each launched process stands for one rank and starts that rank of each contender.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from megatron.libraries import failure

Figures = dict[str, Any]
Turn = Callable[[], Figures | None]


@dataclass
class Rank:
    """What a contender's function is given: which of its processes it is, and the way to others."""

    rank: int = 0
    size: int = 1
    device_type: str = "cpu"
    local: int = 0  # number of the GPU
    round: int = 0  # for contenders that get input of their own in each
    store: Sequence[Any] = ()  # host, port and prefix
    notes: list[str] = field(default_factory=list)  # that are shown with the contender's figures

    @property
    def device(self) -> Any:
        import torch

        if self.device_type == "cpu":
            return torch.device("cpu")
        torch.cuda.set_device(self.local)
        return torch.device("cuda", self.local)

    def connect(self) -> None:
        """Initialise torch.distributed over the ranks of this contender."""
        import torch.distributed as dist

        host, port, prefix = self.store
        store = dist.PrefixStore(prefix, dist.TCPStore(host, port, is_master=False))
        backend = "nccl" if self.device_type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=self.size)

    def mesh(self, sizes: Mapping[str, int] | None = None, **options: Any) -> Any:
        """This project's mesh, see build_mesh; by default all ranks are tensor-parallel."""
        from megatron.parallel.mesh import build_mesh, serial_mesh

        device = self.device
        if self.size == 1:
            return serial_mesh(device)
        self.connect()
        return build_mesh({"tensor": self.size} if sizes is None else sizes, device, **options)

    def synchronize(self) -> None:
        if self.device_type == "cuda":
            sys.modules["torch"].cuda.synchronize()

    def wait(self) -> None:
        """Until all that was started is done on every rank."""
        self.synchronize()
        torch = sys.modules.get("torch")
        if torch is not None and self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()


@dataclass(frozen=True)
class Contender:
    """run: called with a Rank and `arguments` in each process; prepares, and returns a turn.

    needs, memory: modules, and GB of the machine, without which it is left out; the modules are
    imported before memory is counted. missing: another reason. facts: figures that are known
    beforehand, and shown of what is left out, too. x: its place in a picture of lines.
    same: figures of the warm-up turns, or else of the timed ones, and the share by which they may
    differ from those of the first of the group; beyond it nothing is reported.
    """

    name: str
    run: Callable[..., Turn]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # that can be pickled
    _: KW_ONLY
    group: str = ""
    ranks: int = 1
    threads: int = 1  # of a rank
    needs: Sequence[str] = ()
    memory: float = 0.0
    missing: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, float] = field(default_factory=dict)
    x: float | None = None

    def reason(self, launched: int, device: str) -> str:
        """Why it is not measured, or nothing. launched: ranks; 1 where any number is started."""
        if lacking := [*filter(None, map(failure, self.needs))]:
            return "; ".join(lacking)
        if self.memory > memory_gb():
            return f"takes {self.memory:g} GB of memory, there are {memory_gb():.0f}"
        if self.ranks > launched > 1:
            return f"takes {self.ranks} ranks, {launched} were started"
        if device == "cuda" and launched == 1:
            import torch

            if self.ranks > (gpus := torch.cuda.device_count()):
                return f"takes {self.ranks} GPUs, there are {gpus}"
        return self.missing


def memory_gb() -> float:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9


@dataclass(frozen=True)
class Column:
    """A column of the table: the median over rounds. Where a figure is missing the cell is empty.

    figure: a key of a round's figures, or a function of (own figures, those of the first of the
    group). per: a key that it is divided by, such as wall or cpu. unit: what it is counted in.
    ratio: the cell is the figure over that of the first of the group, or the other way round, with
    an interval; see report.cell.
    """

    title: str
    figure: str | Callable[[Figures, Figures], Any]
    form: str = "{:.3g}"
    ratio: Literal["", "its / first", "first / its"] = ""
    per: str = ""
    unit: float = 1.0

    def value(self, own: Figures, first: Figures) -> Any:
        """Raises KeyError where a figure is missing. first: empty where it was not measured, and of
        the first itself."""
        if callable(self.figure):
            return self.figure(own, first)
        ours = self._of(own)
        if not self.ratio:
            return ours
        base = self._of(first)
        return ours / base if self.ratio == "its / first" else base / ours

    def _of(self, figures: Figures) -> Any:
        return figures[self.figure] / self.unit / (figures[self.per] if self.per else 1.0)


@dataclass(frozen=True)
class Question:
    """What a file of this folder asks. Its docstring is the title and the text of the page.

    contenders: a function of Flags and of arguments of its own, which the command line has, too.
    columns: those without a figure are left out. result, failure: of a report.Results: the sentence
    at the top of the page; why the exit status is 1, or nothing. together: the processes of a group
    wait beside each other; else one contender runs at a time. drawn: titles of columns; of curves
    columns whose figures are lists.
    """

    contenders: Callable[..., Iterable[Contender]]
    columns: Sequence[Column]
    result: Callable[[Any], str]
    _: KW_ONLY
    failure: Callable[[Any], str] = lambda results: ""
    rounds: int = 5
    turns: int = 1  # of a round, which are timed
    in_a_row: int = 1  # of a timed turn on a GPU, which nothing waits for between them
    warm_up: int = 1  # turns before these
    together: bool = True
    picture: Literal["bars", "lines", "curves", ""] = "bars"
    drawn: Sequence[Any] = ()

    @property
    def text(self) -> tuple[str, str]:
        """(title, method)"""
        title, _, method = (sys.modules[self.contenders.__module__].__doc__ or "").partition("\n")
        return title.rstrip("."), method.strip("\n")

    def run(self) -> None:
        """With the arguments of the command line."""
        import tyro

        from megatron.config.parse import user_errors

        given: dict[str, Any] = {}

        @wraps(self.contenders)
        def call(**arguments: Any) -> list[Contender]:
            given.update(arguments)
            return list(self.contenders(**arguments))

        with user_errors(os.environ, kinds=(ValueError, OSError, RuntimeError)):
            contenders = tyro.cli(call, config=(tyro.conf.OmitArgPrefixes,))
            self.ask(contenders, given.pop("flags"), given)

    def ask(
        self, contenders: Sequence[Contender], flags: Flags, settings: Mapping[str, Any]
    ) -> None:
        """Measure and report. SystemExit with status 1 where there is a failure."""
        from benchmarks.processes import Agents, measure
        from benchmarks.report import Machine, others_in, report
        from megatron.config.checks import writable

        agents = Agents.of(os.environ)
        if unknown := {*flags.contenders} - {each.name for each in contenders}:
            names = ", ".join(dict.fromkeys(each.name for each in contenders)) or "none"
            raise ValueError(
                f"--contenders {sorted(unknown)[0]}: at these settings there are {names}"
            )
        for name in ("rounds", "turns"):
            if (number := getattr(flags, name)) is not None and number < 1:
                raise ValueError(f"--{name} {number}: must be 1 or more")
        writable(flags, "json", ".json")
        writable(flags, "page", ".md")
        machine = Machine(contenders, flags.device, agents)
        others = others_in(flags.json, machine.known)
        given = {k: v for k, v in settings.items() if isinstance(v, (int, float, str)) and v != ""}
        for rounds, measured in enumerate(measure(self, contenders, flags, agents), start=1):
            record = machine.facts() | given | {"rounds": rounds, "contenders": measured}
            if agents.rank == 0 and flags.json is not None:  # each time, as the next may fail
                flags.json.write_text(json.dumps([record, *others]) + "\n")
        if agents.rank != 0:
            return
        if failure := self.failure(report(self, flags.page, [record, *others])):
            raise SystemExit(f"error: {failure}")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """What every benchmark takes."""

    rounds: int | None = None
    """Times that all contenders are started anew; if not given, as many as the question wants."""

    turns: int | None = None
    """Timed turns of each contender in a round; if not given, as many as the question wants."""

    contenders: tuple[str, ...] = ()
    """Names of those that run; all if not given."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Where they compute."""

    until: float | None = None
    """Seconds since 1970 at which contenders that are not done are left out."""

    json: Path | None = None
    """File for every figure of every round. What it holds of other kinds of processors stays."""

    page: Path | None = None
    """Markdown page of the result, its picture beside it. What stands below "## Notes" stays."""

    profile: Path | None = None
    """Folder for traces of one more turn of each contender, and tables of where its time goes."""


@cache
def scratch() -> Path:
    """A folder for what contenders read and write, which goes when the program ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)
