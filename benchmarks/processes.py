"""Processes of contenders: starts them, asks for turns, ends them; and the code that they run."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from benchmarks.harness import Contender, Figures, Flags, Question, Rank, Turn

ROOT = Path(__file__).resolve().parents[1]
TIME_OVER = "the time was over"
OUT_OF_MEMORY = "OutOfMemoryError|out of memory|ALLOC_FAILED|can't allocate memory|MemoryError"
SPAWN = multiprocessing.get_context("spawn")  # each imports modules under its own environment


@dataclass
class Agents:
    """The launched processes, including this one; a single one starts all ranks of a contender."""

    rank: int = 0
    size: int = 1
    local: int = 0
    address: tuple[str, int] | None = None

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Agents:
        from megatron.config.launch import read_rank_info, world_size

        if world_size(environ) == 1:
            return cls()
        from megatron.train.launch import PATIENCE, open_store

        info = read_rank_info(environ)
        store, _ = open_store(info, PATIENCE)
        dist, longest = import_module("torch.distributed"), timedelta(hours=12)  # per turn
        own = {"store": store, "rank": info.rank, "world_size": info.size, "timeout": longest}
        dist.init_process_group("gloo", **own)
        atexit.register(dist.destroy_process_group)  # gloo may abort at exit without this
        local = int(environ.get("LOCAL_RANK", "0"))
        return cls(info.rank, info.size, local, (info.address, info.port))

    def ranks_of(self, contender: Contender) -> list[int]:
        """Ranks whose processes this process starts."""
        if self.size == 1:
            return list(range(contender.ranks))
        return [self.rank] if self.rank < contender.ranks else []

    def meeting_place(self) -> tuple[str, int]:
        """Host and port of the store through which the ranks of a contender connect."""
        return self.address or ("127.0.0.1", own_store().port)

    def gather(self, value: Any) -> list[Any]:
        """The value of every launched process, on each of them."""
        found = [value] * self.size
        if self.size > 1:
            sys.modules["torch"].distributed.all_gather_object(found, value)
        return found


@cache
def own_store() -> Any:
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


class Processes:
    """The processes of one contender in one round, and their answers."""

    def __init__(self, contender: Contender, agents: Agents, flags: Flags, number: int) -> None:
        """number: number of the round."""
        self.contender, self.agents, self.until = contender, agents, flags.until
        device = flags.device
        self.dropped = ""  # reason why it is out of this and all further rounds
        self.warm: list[Figures] = []
        self.timed: list[Figures] = []
        self.last: Figures = {}  # peak memory and notes
        self.processes, self.pipes = [], []
        prefix = f"{number}/{contender.group}/{contender.name}"
        store = (*agents.meeting_place(), prefix) if contender.ranks > 1 else ()
        environ = {"OMP_NUM_THREADS": str(contender.threads)}  # libraries read it when loaded
        if agents.size == 1:
            environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        if device == "cpu":  # programs that a contender starts see no GPU, either
            environ["CUDA_VISIBLE_DEVICES"] = ""
        with patch.dict(os.environ, environ):
            for rank in agents.ranks_of(contender):
                local = rank if agents.size == 1 else agents.local
                own = Rank(rank, contender.ranks, device, local, number, store)
                pipe, its = SPAWN.Pipe()
                self.pipes.append(pipe)
                self.processes.append(SPAWN.Process(target=work, args=(its, contender, own)))
                self.processes[-1].start()
                its.close()

    def send(self, command: Command | None) -> None:
        for pipe in self.pipes:
            with suppress(BrokenPipeError):  # the process has ended; `answers` reports it
                pipe.send(command)

    def ask(self, command: Command) -> list[Figures]:
        """Send a command, and return its `answers`."""
        self.send(command)
        return self.answers()

    def answers(self) -> list[Figures]:
        """Answers of all ranks, on every agent. Raises LeftOutError if any rank has run out of
        memory or time, and RuntimeError with the tracebacks of ranks that failed otherwise."""
        own: list[Figures] = [{}] * len(self.pipes)
        waiting, failures = list(self.pipes), list[str]()
        while waiting and not failures:
            left = None if self.until is None else max(0.0, self.until - time.time())
            answered = wait_for_any(waiting, left)
            if not answered:
                failures = [TIME_OVER]
            for pipe in answered:
                waiting.remove(pipe)
                place = self.pipes.index(pipe)
                try:
                    own[place] = pipe.recv()
                except EOFError:
                    self.processes[place].join()
                    own[place] = {"failure": ended(self.processes[place].exitcode)}
                failures += filter(None, [own[place].get("failure")])
        gathered = self.agents.gather([own, failures])
        if words := "\n".join(each for _, failures in gathered for each in failures):
            if TIME_OVER in words:
                raise LeftOutError(f"left out: {TIME_OVER}")
            if found := re.search(f"^(?! ).*({OUT_OF_MEMORY}).*", words, re.MULTILINE):
                raise LeftOutError(f"out of memory: {found[0]}")
            raise RuntimeError(f"{self.contender.name} has failed:\n{words}")
        return [answer for answers, _ in gathered for answer in answers]

    def turn(self, count: int = 1) -> Figures:
        """Wall seconds of the slowest rank and CPU seconds of all. Other figures are those of the
        first rank in the last of `count` turns in a row."""
        answers = self.ask(partial(timed, count=count))
        wall, cpu = [each["wall"] for each in answers], [each["cpu"] for each in answers]
        return answers[0] | {"wall": max(wall), "cpu": sum(cpu)}

    def begin(self) -> None:
        """Start the contender's preparation, once all modules are imported."""
        self.send(None)

    def prepare(self, turns: int) -> None:
        self.answers()
        self.warm = [self.turn() for _ in range(turns)]

    def finish(self, profile: Path | None) -> None:
        found = self.ask(memory_and_notes)
        self.last["peak_bytes"] = sum(each["peak_bytes"] for each in found)
        self.last["notes"] = found[0]["notes"]
        if profile is not None:
            name = f"{self.contender.group} {self.contender.name}".strip()
            name = re.sub(r"[^\w.=-]+", "_", name)
            wall = median(each["wall"] for each in self.timed)
            command = partial(profiled, folder=profile.resolve(), name=name, wall=wall)
            try:
                self.last |= self.ask(command)[0]
            except LeftOutError as error:  # the timed turns are kept
                self.last["notes"] = [*self.last["notes"], f"{name} has no profile, {error}"]
                self.kill()

    def take_turns(self, count: int) -> None:
        self.timed.append(self.turn(count))

    def figures(self, compared: Set[str]) -> Figures:
        """Figures of the round. compared: keys to leave out; `check_same` has compared them."""
        found = dict(self.last)
        for key in [key for key in self.timed[0] if key not in compared]:
            values = [each[key] for each in self.timed]
            others = median(values) if is_number(values[0]) else values[-1]
            found[key] = values if key in ("wall", "cpu") else others
        return found

    def attempt(self, do: Callable[..., object], *arguments: object) -> None:
        """Call `do`; drop the contender if it runs out of memory or time."""
        try:
            if not self.dropped:
                do(*arguments)
        except LeftOutError as error:
            self.dropped = str(error)
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def stop(self) -> None:
        """End the processes; those that wait for a failed rank have to be killed."""
        for pipe in self.pipes:  # close all first: at their end, ranks may wait for each other
            pipe.close()
        for process in self.processes:
            process.join(60.0)
            process.kill()
            process.join()


class LeftOutError(RuntimeError):
    """The reason why one contender has no figures; the others go on."""


def ended(status: int | None) -> str:
    """Message for a process that ended without one."""
    if status == -signal.SIGKILL:  # as the system does to a process that takes too much memory
        return "killed, out of memory as it seems"
    return f"a process has ended with status {status}"


def measure(
    question: Question, contenders: Sequence[Contender], flags: Flags, agents: Agents
) -> Iterator[tuple[int, list[Figures]]]:
    """Yields, after each group, the number of rounds begun and the contenders' entries in a record;
    every launched process calls this. `rounds` has the figures of each round, with one number per
    turn for wall and cpu."""
    chosen = [each for each in contenders if each.name in flags.contenders or not flags.contenders]
    first = {each.group: each.name for each in reversed(contenders)}
    found = {
        (each.group, each.name): {
            "group": each.group,
            "name": each.name,
            "x": each.x,
            "facts": dict(each.facts),
            "first": first[each.group],
            "reason": each.reason(agents.size, flags.device),
            "rounds": list[Figures](),
        }
        for each in chosen
    }
    assert len(found) == len(chosen), "two contenders of a group have one name"
    for number in range(rounds := flags.rounds or question.rounds):
        for group in rotated(list(dict.fromkeys(each.group for each in chosen)), number):
            whole = [each for each in chosen if each.group == group]
            able = [each for each in whole if not found[group, each.name]["reason"]]
            able, ended = rotated(able, number), dict[str, Processes]()
            for unit in [able] if question.together else [[each] for each in able]:
                ended |= run_unit(question, flags, agents, unit, number)
            check_same(ended, first[group])
            compared = {key for each in whole for key in each.same}
            for name, processes in ended.items():
                if processes.dropped:
                    found[group, name] |= {"reason": processes.dropped, "rounds": []}
                else:
                    found[group, name]["rounds"].append(processes.figures(compared))
            yield number + 1, list(found.values())
        if agents.rank == 0:
            print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)


def rotated(items: list[Any], number: int) -> list[Any]:
    first = number % max(1, len(items))
    return items[first:] + items[:first]


def run_unit(
    question: Question, flags: Flags, agents: Agents, contenders: Sequence[Contender], number: int
) -> dict[str, Processes]:
    """Start these contenders, warm them up, let them take turns, and end them. number: number of
    the round. On a GPU they run one after another, so that none uses memory while another runs."""
    unit: list[Processes] = []
    in_a_row = question.in_a_row if flags.device == "cuda" else 1
    try:
        for each in contenders:
            unit.append(Processes(each, agents, flags, number))
        for each in unit:  # all import at the same time: 15 s on a GPU machine
            each.attempt(each.answers)
        for able in [unit] if flags.device == "cpu" else [[each] for each in unit]:
            for each in able:
                each.attempt(each.begin)
            for each in able:
                each.attempt(each.prepare, question.warm_up)
            for turn in range(flags.turns or question.turns):
                for each in rotated(able, turn):
                    each.attempt(each.take_turns, in_a_row)
            for each in able:
                each.attempt(each.finish, flags.profile)
            if flags.device == "cuda":  # kill: a compiler's own processes would end slowly
                able[0].kill()
                able[0].stop()
    except BaseException:
        for each in unit:
            each.kill()
        raise
    finally:
        for each in unit:
            each.stop()
    return {each.contender.name: each for each in unit}


def check_same(ended: Mapping[str, Processes], first: str) -> None:
    """Raises SystemExit if a contender does other work than the first of its group."""
    able = {name: each for name, each in ended.items() if not each.dropped}
    for name, each in able.items() if first in able else ():
        for key, tolerance in each.contender.same.items():
            ours, its = ([turn[key] for turn in x.warm or x.timed] for x in (able[first], each))
            if not is_close(ours, its, tolerance):
                known = f"their {key} is {ours} and {its}"
                raise SystemExit(f"error: {first} and {name} do not do the same job: {known}")


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_close(one: Any, other: Any, tolerance: float) -> bool:
    """Whether nested lists of numbers are close. Lists that are empty, all 0 or not finite prove
    nothing: False. A tolerance of 0 asks for equality, of values of any kind."""
    if not tolerance:
        return bool(one) and bool(one == other)
    import numpy as np

    if np.shape(one) != np.shape(other) or not (np.any(one) and np.isfinite(one).all()):
        return False
    return np.allclose(one, other, rtol=tolerance, atol=0)


class Running(NamedTuple):
    """A contender in its own process."""

    turn: Turn
    rank: Rank
    peak: Callable[[], int]


Command = Callable[[Running], Figures]


def work(pipe: Connection, contender: Contender, rank: Rank) -> None:
    """Runs in a process of a contender: prepare it, and run commands until there are no more."""
    os.dup2(2, 1)  # output of contenders is not part of the result
    os.chdir(ROOT)
    try:
        for module in contender.needs:
            import_module(module)
        pipe.send({})
        pipe.recv()
        peak = peak_memory(rank.device_type)  # from here on: memory of modules does not count
        running = Running(contender.run(rank, **contender.arguments), rank, peak)
        if contender.memory_of_turns:
            forget_peak(rank.device_type)
        pipe.send({})
        while True:
            try:
                command = pipe.recv()
            except EOFError:  # the other end is closed: no more commands
                return
            pipe.send(command(running))
    except BaseException:
        pipe.send({"failure": traceback.format_exc()})


def timed(running: Running, count: int) -> Figures:
    """Figures of a turn. A wall or cpu that it returns replaces these; tensors become numbers."""
    running.rank.wait()
    wall, cpu = time.perf_counter(), cpu_seconds()
    figures = [running.turn() or {} for _ in range(count)][-1]
    running.rank.wait()
    spent = {"wall": time.perf_counter() - wall, "cpu": cpu_seconds() - cpu}
    read = {name: x.item() if getattr(x, "ndim", None) == 0 else x for name, x in figures.items()}
    return {name: x / count for name, x in spent.items()} | read


def memory_and_notes(running: Running) -> Figures:
    return {"peak_bytes": running.peak(), "notes": running.rank.notes}


def profiled(running: Running, folder: Path, name: str, wall: float) -> Figures:
    from benchmarks.profiles import write_profile

    return write_profile(running.turn, running.rank, folder, name, wall)


def cpu_seconds() -> float:
    """CPU seconds of this process and the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_memory(device_type: str) -> Callable[[], int]:
    """A function that returns this process's peak bytes from now on: on a CPU the growth of its
    resident memory, on a GPU all tensors."""
    if device_type == "cuda":
        return lambda: sys.modules["torch"].cuda.max_memory_allocated()
    forget_peak(device_type)
    before = status_bytes("VmRSS")
    return lambda: status_bytes("VmHWM") - before


def forget_peak(device_type: str) -> None:
    """Reset the peak of this process: memory used only for preparation does not count."""
    if device_type == "cuda":
        sys.modules["torch"].cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def status_bytes(name: str, process: str = "self") -> int:
    """Bytes in a line of /proc/PROCESS/status; 0 for an ended process not yet waited for."""
    _, _, behind = Path(f"/proc/{process}/status").read_text().partition(f"\n{name}:")
    return 1024 * int(behind.split()[0]) if behind else 0
