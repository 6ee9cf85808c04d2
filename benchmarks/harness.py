"""The harness of all benchmarks: contenders run in their own processes, in rounds.

    question    a file in this folder: it declares contenders and the columns of a table
    contender   a function that prepares work and returns a turn: a function that does it once
    group       contenders that are compared, each with the first of them
    round       new processes of all contenders. They alternate turns; on a GPU each contender runs
                all of its turns in a row. The order changes from round to round
    figures     per turn: wall and CPU seconds, peak memory, and the values that the turn returns

Processes that run the same code differ in speed by several per cent, so a ratio is computed within
a round, and its interval is over rounds. A process that waits for its turn takes no CPU.
`report.py` turns the figures into a table, a page and a picture.

Run as a program, a question starts all ranks of a contender on this machine. Under torchrun or
Slurm each launched process is one rank, and starts that rank of each contender.
"""

from __future__ import annotations

import atexit
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, wraps
from importlib import import_module
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from megatron.errors import UsageError
from megatron.libraries import failure

Figures = dict[str, Any]
Turn = Callable[[], Figures | None]


@dataclass
class Rank:
    """First argument of a contender's function: its rank, and how to connect to the others."""

    rank: int = 0
    size: int = 1
    device_type: str = "cpu"
    local: int = 0  # number of the GPU
    round: int = 0  # for contenders that have different input in each round
    store: Sequence[Any] = ()  # host, port and prefix
    notes: list[str] = field(default_factory=list)  # shown with the contender's figures

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
        """This project's mesh (see build_mesh); by default all ranks are tensor-parallel."""
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
        """Wait until all started work is done on every rank."""
        self.synchronize()
        torch = sys.modules.get("torch")
        if torch is not None and self.size > 1 and torch.distributed.is_initialized():
            torch.distributed.barrier()


@dataclass(frozen=True)
class Contender:
    """run: called with a Rank and `arguments` in each process; prepares, and returns a turn.

    needs: required modules, imported before memory is measured; without them the contender is left
    out. missing: another reason to leave it out.
    memory_of_turns: peak memory does not include the preparation.
    facts: figures known in advance; also shown if it is left out. x: its x in a picture of lines.
    same: figures of the warm-up turns (or, without any, of the timed ones), each with its largest
    relative difference from the first of the group; if it is exceeded, nothing is reported.
    """

    name: str
    run: Callable[..., Turn]
    arguments: Mapping[str, Any] = field(default_factory=dict)  # picklable
    _: KW_ONLY
    group: str = ""
    ranks: int = 1
    threads: int = 1  # per rank
    needs: Sequence[str] = ()
    missing: str = ""
    memory_of_turns: bool = False
    facts: Mapping[str, Any] = field(default_factory=dict)
    same: Mapping[str, float] = field(default_factory=dict)
    x: float | None = None

    def reason(self, launched: int, device: str) -> str:
        """Why it is not measured, or "". launched: number of ranks; 1 if they are started here."""
        if lacking := [*filter(None, map(failure, self.needs))]:
            return "; ".join(lacking)
        if self.ranks > launched > 1:
            return f"takes {self.ranks} ranks, {launched} were started"
        if device == "cuda" and launched == 1:
            import torch

            if self.ranks > (gpus := torch.cuda.device_count()):
                return f"takes {self.ranks} GPUs, there are {gpus}"
        return self.missing


@dataclass(frozen=True)
class Column:
    """A column of the table: the median over rounds. The cell is empty where a figure is missing.

    figure: a key of a round's figures, or a function of (own figures, figures of the first of the
    group). per: key of a divisor, such as wall or cpu. unit: unit that the figure is shown in.
    ratio: the cell is the figure divided by that of the first of the group, or the inverse, with an
    interval; see report.cell.
    """

    title: str
    figure: str | Callable[[Figures, Figures], Any]
    form: str = "{:.3g}"
    ratio: Literal["", "its / first", "first / its"] = ""
    per: str = ""
    unit: float = 1.0

    def value(self, own: Figures, first: Figures) -> Any:
        """Raises KeyError where a figure is missing. first: empty where the first contender was not
        measured, and for the first contender itself."""
        if callable(self.figure):
            return self.figure(own, first)
        ours = self._of(own)
        if not self.ratio:
            return ours
        base = self._of(first)
        over, under = (ours, base) if self.ratio == "its / first" else (base, ours)
        return over / under if under else inf

    def _of(self, figures: Figures) -> Any:
        return figures[self.figure] / self.unit / (figures[self.per] if self.per else 1.0)


@dataclass(frozen=True)
class Question:
    """The benchmark in one file. The file's docstring is the title and the text of the page.

    contenders: a function of Flags and of further arguments, which become flags of the command.
    columns: those without a figure are left out. result, failure: called with a report.Results,
    return the sentence at the top of the page, and the reason for exit status 1, or "". together:
    the processes of a group exist at the same time and alternate; else one contender runs at a
    time. drawn: titles of columns. small: words that stand before those given, with --small; None:
    there is no miniature.
    """

    contenders: Callable[..., Iterable[Contender]]
    columns: Sequence[Column]
    result: Callable[[Any], str]
    _: KW_ONLY
    failure: Callable[[Any], str] = lambda results: ""
    rounds: int = 5
    turns: int = 1  # timed turns per round
    in_a_row: int = 1  # calls per timed turn on a GPU, without synchronisation between them
    warm_up: int = 1  # turns before the timed ones
    together: bool = True
    picture: Literal["bars", "lines", ""] = "bars"
    drawn: Sequence[Any] = ()
    small: str | None = None

    @property
    def text(self) -> tuple[str, str]:
        """(title, method)"""
        title, _, method = (sys.modules[self.contenders.__module__].__doc__ or "").partition("\n")
        return title.rstrip("."), method.strip("\n")

    def run(self) -> None:
        """Run with the arguments of the command line."""
        from megatron.config.parse import parse_call, whole_program

        given: dict[str, Any] = {}

        @wraps(self.contenders)
        def call(**arguments: Any) -> list[Contender]:
            if arguments["flags"].small and self.small is None:
                allowed, works = "left out: there is no miniature", ("--no-small",)
                raise UsageError("--small", None, allowed, works=works)
            given.update(arguments)
            is_cuda = arguments["flags"].device == "cuda"
            if is_cuda and not import_module("torch").cuda.is_available():
                works = ("--device", "cpu")
                raise UsageError("--device", "cuda", "one that torch finds here", works=works)
            return list(self.contenders(**arguments))

        words = sys.argv[1:]
        if "--small" in words:
            words = [*shlex.split(self.small or ""), *words]
        with whole_program(os.environ, kinds=(ValueError, OSError, RuntimeError)):
            program = f"python benchmarks/{Path(sys.argv[0]).stem}.py"
            quick = "--rounds 1" if self.small is None else "--small"
            examples = f"{program}\n{program} {quick} --json result.json"
            contenders = parse_call(call, words, os.environ, examples=examples)()
            self.ask(contenders, given.pop("flags"), given)

    def ask(
        self, contenders: Sequence[Contender], flags: Flags, settings: Mapping[str, Any]
    ) -> None:
        """Measure and report. Raises SystemExit with status 1 where `failure` names a reason."""
        from benchmarks.processes import Agents, measure
        from benchmarks.report import Machine, others_in, report
        from megatron.config.checks import writable
        from megatron.data.files import write_atomically

        agents = Agents.of(os.environ)
        if not contenders:
            raise UsageError("--contenders", None, "some at these settings: there are none")
        if unknown := {*flags.contenders} - {each.name for each in contenders}:
            names = ", ".join(dict.fromkeys(each.name for each in contenders)) or "none"
            allowed = f"one of the contenders at these settings: {names}"
            raise UsageError("--contenders", sorted(unknown)[0], allowed)
        for name in ("rounds", "turns"):
            if (number := getattr(flags, name)) is not None and number < 1:
                raise UsageError(f"--{name}", number, "1 or more")
        writable(flags, "json", ".json")
        writable(flags, "page", ".md")
        machine = Machine(contenders, flags.device, agents)
        others = others_in(flags.json, machine.known)
        given = {k: v for k, v in settings.items() if isinstance(v, (int, float, str)) and v != ""}
        for rounds, measured in measure(self, contenders, flags, agents):
            record = machine.facts() | given | {"rounds": rounds, "contenders": measured}
            if agents.rank == 0 and flags.json is not None:  # the next group may fail
                text = json.dumps([record, *others]) + "\n"
                write_atomically(flags.json, text.encode())
        if agents.rank != 0:
            return
        if failure := self.failure(report(self, flags.page, [record, *others])):
            raise SystemExit(f"error: {failure}")


@dataclass(frozen=True, kw_only=True)
class Flags:
    """Flags of every benchmark."""

    rounds: int | None = None
    """Number of rounds, each with new processes; if not given, the benchmark's own number."""

    turns: int | None = None
    """Timed turns per contender and round; if not given, the benchmark's own number."""

    contenders: tuple[str, ...] = ()
    """Names of the contenders to run; all if not given."""

    device: Literal["cpu", "cuda"] = "cpu"
    """Device to compute on."""

    small: bool = False
    """A miniature, to try it, where the examples have it; other flags win."""

    until: float | None = None
    """Unix time in seconds after which unfinished contenders are left out."""

    json: Path | None = None
    """File for every figure of every round. Its records of other kinds of processors are kept."""

    page: Path | None = None
    """Markdown page of the result, with a picture next to it. Text below "## Notes" is kept."""

    profile: Path | None = None
    """Folder for traces of one extra turn of each contender, and tables of where its time goes."""


@cache
def scratch() -> Path:
    """A folder for files that contenders read and write; removed when the program ends."""
    folder = TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)
