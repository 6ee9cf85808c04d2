"""Processes of contenders: started, asked for turns, ended; and what runs in each of them.

python -m benchmarks.processes      # by `Processes`: reads a line of JSON each on standard input
"""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from pkgutil import resolve_name
from statistics import median
from typing import Any

from benchmarks.harness import Contender, Figures, Flags, Question, Rank, Turn

ROOT = Path(__file__).resolve().parents[1]
OUT_OF_MEMORY = "OutOfMemoryError|out of memory|ALLOC_FAILED|can't allocate memory|MemoryError"


@dataclass
class Agents:
    """The launched processes, of which this is one; alone it starts all ranks of a contender."""

    rank: int = 0
    size: int = 1
    local: int = 0
    address: tuple[str, int] | None = None
    store: Any = None  # of torch.distributed
    gathered: int = 0

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Agents:
        from megatron.config.launch import read_rank_info, world_size

        if world_size(environ) == 1:
            return cls()
        from megatron.train.launch import PATIENCE, open_store

        info = read_rank_info(environ)
        store, _ = open_store(info, PATIENCE)
        store.set_timeout(timedelta(hours=12))  # of a turn
        local = int(environ.get("LOCAL_RANK", "0"))
        return cls(info.rank, info.size, local, (info.address, info.port), store)

    def ranks_of(self, contender: Contender) -> list[int]:
        """Those whose processes this one starts."""
        if self.size == 1:
            return list(range(contender.ranks))
        return [self.rank] if self.rank < contender.ranks else []

    def meeting_place(self) -> tuple[str, int]:
        """Host and port of the store at which the ranks of a contender meet."""
        if self.address is None:
            import torch.distributed as dist

            self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.address = "127.0.0.1", self.store.port
        return self.address

    def gather(self, value: Any) -> list[Any]:
        """The value of every launched process, on each of them."""
        if self.size == 1:
            return [value]
        self.gathered += 1
        prefix = f"gathered/{self.gathered}"
        self.store.set(f"{prefix}/{self.rank}", json.dumps(value))
        if self.rank == 0:  # one reads all, so that the store is not asked size x size times
            values = [json.loads(self.store.get(f"{prefix}/{rank}")) for rank in range(self.size)]
            self.store.set(prefix, json.dumps(values))
        return list(json.loads(self.store.get(prefix)))


class Processes:
    """The processes of one contender in one round, and what they have said."""

    def __init__(self, contender: Contender, agents: Agents, device: str, number: int) -> None:
        """number: of the round."""
        self.contender, self.agents = contender, agents
        self.dropped = ""  # why it is out of this and all further rounds
        self.warm: list[Figures] = []
        self.timed: list[Figures] = []
        self.last: Figures = {}  # peak memory and notes
        prefix = f"{number}/{contender.group}/{contender.name}"
        store = (*agents.meeting_place(), prefix) if contender.ranks > 1 else ()
        environ = {**os.environ, "OMP_NUM_THREADS": str(contender.threads)}
        if agents.size == 1:
            environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self.errors, self.processes = [], []
        for rank in agents.ranks_of(contender):
            self.errors.append(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - as long as it lives
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "benchmarks.processes"],
                    cwd=ROOT,
                    env=environ,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self.errors[-1],
                    text=True,
                )
            )
            local = rank if agents.size == 1 else agents.local
            own = Rank(
                rank=rank,
                size=contender.ranks,
                device_type=device,
                local=local,
                round=number,
                store=store,
            )
            start = {"run": name_of(contender.run), "arguments": dict(contender.arguments)}
            start |= {"rank": asdict(own), "needs": list(contender.needs)}
            send(self.processes[-1], start)

    def ask(self, **command: Any) -> list[Figures]:
        """As `answers`, after a command."""
        for process in self.processes:
            send(process, command)
        return self.answers()

    def answers(self) -> list[Figures]:
        """Of all ranks, on every agent. Raises OutOfMemoryError where any rank has run out of it,
        RuntimeError with the last words of those that have ended otherwise."""
        own: list[Figures] = [{}] * len(self.processes)
        waiting = {process.stdout: place for place, process in enumerate(self.processes)}
        failures: list[str] = []
        while waiting and not failures:
            for stream in wait_for_any(list(waiting)):
                place, line = waiting.pop(stream), stream.readline()
                if line:
                    own[place] = json.loads(line)
                else:
                    failures.append(self._last_words(place))
        gathered = self.agents.gather([own, failures])
        if words := "\n".join(each for _, failures in gathered for each in failures):
            if found := re.search(f"^(?! ).*({OUT_OF_MEMORY}).*", words, re.MULTILINE):
                raise OutOfMemoryError(f"out of memory: {found[0]}")
            raise RuntimeError(f"{self.contender.name} has failed:\n{words}")
        return [answer for answers, _ in gathered for answer in answers]

    def _last_words(self, place: int) -> str:
        status = self.processes[place].wait()
        self.errors[place].seek(0)
        words = self.errors[place].read()[-4000:].strip()
        if status == -signal.SIGKILL:  # as the system does to what takes too much
            return "killed, out of memory as it seems"
        return words or f"status {status}, without a word"

    def turn(self) -> Figures:
        """Wall seconds of the slowest rank, CPU seconds of all; the rest is the first one's."""
        answers = self.ask(command="turn")
        wall, cpu = [each["wall"] for each in answers], [each["cpu"] for each in answers]
        return answers[0] | {"wall": max(wall), "cpu": sum(cpu)}

    def prepare(self, turns: int) -> None:
        self.last["notes"] = self.answers()[0]["notes"]
        self.warm = [self.turn() for _ in range(turns)]

    def finish(self, profile: Path | None) -> None:
        self.last["peak_bytes"] = sum(each["peak_bytes"] for each in self.ask(command="peak"))
        if profile is not None:
            name = f"{self.contender.group} {self.contender.name}".strip()
            name = re.sub(r"[^\w.=-]+", "_", name)
            self.ask(command="profile", folder=str(profile.resolve()), name=name)

    def attempt(self, do: Callable[[], object]) -> None:
        """Do it; a contender that runs out of memory is dropped."""
        if self.dropped:
            return
        try:
            do()
        except OutOfMemoryError as error:
            self.dropped = str(error)
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def stop(self) -> None:
        """End them; those that wait for a rank that has failed have to be killed."""
        for process in self.processes:  # all, since what they end with may wait for each other
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process, errors in zip(self.processes, self.errors, strict=True):
            try:
                process.wait(timeout=60.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            errors.close()


class OutOfMemoryError(RuntimeError):
    """Of one contender; the others go on."""


def send(process: subprocess.Popen[str], message: Figures) -> None:
    with suppress(BrokenPipeError):  # it has ended, which its answer shows
        print(json.dumps(message), file=process.stdin, flush=True)


def name_of(function: Callable[..., Any]) -> str:
    """As "module:function", also of the file that runs as a program."""
    module = function.__module__
    if module == "__main__":
        file = Path(sys.argv[0]).resolve().relative_to(ROOT)
        module = ".".join(file.with_suffix("").parts)
    return f"{module}:{function.__qualname__}"


@dataclass
class Measured:
    """Of one contender. rounds: its figures; of wall and cpu a list, a number for each turn."""

    contender: Contender
    first: str  # of its group, by name
    reason: str  # why it has no figures
    rounds: list[Figures] = field(default_factory=list)


def measure(
    question: Question, contenders: Sequence[Contender], flags: Flags, agents: Agents
) -> list[Measured]:
    """All rounds; every launched process calls this."""
    first = {each.group: each.name for each in reversed(contenders)}
    found = [
        Measured(each, first[each.group], each.reason(agents.size, flags.device))
        for each in contenders
        if each.name in flags.contenders or not flags.contenders
    ]
    groups = list(dict.fromkeys(each.contender.group for each in found))
    for number in range(rounds := flags.rounds or question.rounds):
        profile = flags.profile if number == rounds - 1 else None
        for group in rotated(groups, number):
            whole = [each for each in found if each.contender.group == group]
            able = rotated([each for each in whole if not each.reason], number)
            ended: list[Processes] = []
            for unit in [able] if question.together else [[each] for each in able]:
                running = [each.contender for each in unit]
                ended += run_unit(question, flags, agents, running, number, profile)
            for own, processes in zip(able, ended, strict=True):
                if processes.dropped:
                    own.reason, own.rounds = processes.dropped, []
                    continue
                timed = processes.timed
                lists = {key: [each[key] for each in timed] for key in ("wall", "cpu")}
                compared = {key for each in whole for key in each.contender.same}
                others = {
                    key: median([each[key] for each in timed]) if is_number(last) else last
                    for key, last in timed[-1].items()
                    if key not in compared
                }
                own.rounds.append(processes.last | others | lists)
            check_same(ended, whole[0].first)
        if agents.rank == 0:
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def rotated(items: list[Any], number: int) -> list[Any]:
    first = number % max(1, len(items))
    return items[first:] + items[:first]


def run_unit(
    question: Question,
    flags: Flags,
    agents: Agents,
    contenders: Sequence[Contender],
    number: int,
    profile: Path | None,
) -> list[Processes]:
    """Start these, warm them up, let them take turns, and end them."""
    unit: list[Processes] = []
    try:
        for each in contenders:
            unit.append(Processes(each, agents, flags.device, number))
        for each in unit:
            each.attempt(lambda each=each: each.prepare(question.warm_up))
        for turn in range(flags.turns or question.turns):
            for each in rotated(unit, turn):
                each.attempt(lambda each=each: each.timed.append(each.turn()))
        for each in unit:
            each.attempt(lambda each=each: each.finish(profile))
    except BaseException:
        for each in unit:
            each.kill()
        raise
    finally:
        for each in unit:
            each.stop()
    return unit


def check_same(ended: Sequence[Processes], first: str) -> None:
    """SystemExit where a contender does not do the job of the first of its group."""
    able = {each.contender.name: each.contender for each in ended if not each.dropped}
    turns = {each.contender.name: each.warm or each.timed for each in ended}
    for name, contender in able.items() if first in able else ():
        for key, tolerance in contender.same.items():
            ours, its = ([turn[key] for turn in turns[each]] for each in (first, name))
            if not is_close(ours, its, tolerance):
                raise SystemExit(
                    f"error: {first} and {name} do not do the same job: their {key} is {ours} "
                    f"and {its}"
                )


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_close(one: Any, other: Any, tolerance: float) -> bool:
    """Of numbers and lists of them; a tolerance of 0 asks for equality, of anything."""
    if not tolerance:
        return bool(one == other)
    import numpy as np

    return np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=tolerance, atol=0)


def work() -> None:
    """A process of a contender: prepares, and answers commands, a line of JSON each."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else prints
    start = json.loads(sys.stdin.readline())
    rank, run = Rank(**start["rank"]), resolve_name(start["run"])
    for module in start["needs"]:
        import_module(module)
    peak = peak_memory(rank.device_type)  # from here on: what modules take is not counted
    turn = run(rank, **start["arguments"])
    print(json.dumps({"notes": rank.notes}), file=answers, flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        if command["command"] == "turn":
            answer = timed(turn, rank)
        elif command["command"] == "peak":
            answer = {"peak_bytes": peak()}
        else:
            from benchmarks.profiles import write_profile

            answer = write_profile(turn, rank, Path(command["folder"]), command["name"])
        print(json.dumps(answer), file=answers, flush=True)


def timed(turn: Turn, rank: Rank) -> Figures:
    """Figures of a turn; wall and cpu that it returns itself replace these."""
    rank.wait()
    wall, cpu = time.perf_counter(), cpu_seconds()
    figures = turn() or {}
    rank.wait()
    return {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu} | figures


def cpu_seconds() -> float:
    """Of this process and the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_memory(device_type: str) -> Callable[[], int]:
    """What tells how many bytes this process took at most, from now on: on a CPU the growth of its
    resident memory, on a GPU all tensors."""
    if device_type == "cuda":
        return lambda: sys.modules["torch"].cuda.max_memory_allocated()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = status_bytes("VmRSS")
    return lambda: status_bytes("VmHWM") - before


def status_bytes(name: str, process: str = "self") -> int:
    text = Path(f"/proc/{process}/status").read_text()
    return next(
        int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:")
    )


if __name__ == "__main__":
    work()
