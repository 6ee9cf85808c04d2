"""The ranks of a run find each other before anything is built, or say who is missing."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from megatron.config.launch import world_size

WORD = 5.0  # seconds of waiting after which a person is told for whom
_POLL = 0.1  # seconds


@dataclass(frozen=True)
class Place:
    """This process among those of the run, and the store over which they meet."""

    rank: int
    size: int
    address: str
    port: int
    is_host: bool  # rank 0 keeps the store, but for torchrun's agent, which outlives the ranks
    restarts: int = 0  # of all ranks by torchrun, within one store

    @property
    def keeper(self) -> str:
        """Who keeps the store, for messages."""
        who = "rank 0" if self.is_host else "the launcher"
        return f"{who} at {self.address}:{self.port}"


def read_place(environ: Mapping[str, str]) -> Place:
    """The launcher's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises ValueError where one is missing or wrong; no value is made up for it.
    """
    size = world_size(environ)
    rank, port = environ["RANK"], environ.get("MASTER_PORT", "")
    if not rank.isdecimal() or int(rank) >= size:
        raise ValueError(f"RANK is {rank!r}, which is none of the {size} ranks of WORLD_SIZE")
    if not environ.get("MASTER_ADDR"):
        raise ValueError(
            "RANK is set, but not MASTER_ADDR: set it to the host of rank 0, or start with torchrun"
        )
    if not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ValueError(f"MASTER_PORT is {port!r}; a free port such as 29500 would work")
    is_host = environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    restarts = int(environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return Place(int(rank), size, environ["MASTER_ADDR"], int(port), is_host, restarts)


@dataclass(frozen=True)
class Arrival:
    """What the others should know of a rank."""

    host: str
    pid: int
    size: int  # ranks of the run, as this one was told
    gpus: int
    door: tuple[str, int]  # where its lifeline listens


def introduce(place: Place, door: tuple[str, int]) -> Arrival:
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Arrival(socket.gethostname(), os.getpid(), place.size, gpus, door)


def open_store(place: Place, patience: float) -> Store:
    """A connection to the store of this run; `patience` in seconds."""
    keeps = place.is_host and place.rank == 0
    if not keeps:
        reach(place, patience).close()
    try:
        return TCPStore(
            place.address,
            place.port,
            place.size,
            is_master=keeps,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise OSError(
            f"rank {place.rank} on {socket.gethostname()} cannot use port {place.port} of "
            f"{place.address} to meet the others; another MASTER_PORT would work"
        ) from error


def reach(place: Place, patience: float) -> socket.socket:
    """A bare connection to where the store is kept, as soon as somebody listens there.

    Raises TimeoutError after `patience` seconds.
    """
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection((place.address, place.port), timeout=patience)
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {place.rank} of {place.size} on {socket.gethostname()} did not reach "
                    f"{place.keeper} within {patience:g} s ({error})"
                ) from None
            time.sleep(_POLL)


def enter(store: Store, place: Place) -> Store:
    """The part of the store that belongs to this start of the ranks.

    torchrun keeps one store through restarts, and does not count those after a node was lost; all
    ranks start anew each time, so that each counts its own. Raises ValueError where two processes
    are the same rank.
    """
    start = store.add(f"{place.restarts}/starts/{place.rank}", 1)
    if place.is_host and start > 1:
        raise ValueError(
            f"RANK {place.rank} was given to two processes, one of them {os.getpid()} on "
            f"{socket.gethostname()}"
        )
    return PrefixStore(f"{place.restarts}/{start}", store)


def meet(store: Store, place: Place, arrival: Arrival, patience: float) -> list[Arrival]:
    """What each rank says of itself, by rank, once all have arrived.

    Raises TimeoutError after `patience` seconds, which names the ranks that are missing, and
    ValueError where ranks contradict each other. Ends with the status of one that gave up.
    """
    store.set(f"here/{place.rank}", json.dumps(asdict(arrival)))
    if store.add("arrived", 1) == place.size:
        store.set("everyone", "")
    start, is_told = time.monotonic(), False
    while not store.check(["everyone"]):
        waited = time.monotonic() - start
        if waited > WORD and not is_told:
            _tell_waiting(store, place, patience)
            is_told = True
        if store.check(["gave up"]):
            raise SystemExit(int(store.get("gave up")))
        if waited > patience or store.check(["missing"]):
            _raise_missing(store, place, patience)
        time.sleep(_POLL)
    arrivals = [_read(store, rank) for rank in range(place.size)]
    _check(arrivals)
    return arrivals


@contextmanager
def not_alone(store: Store, place: Place) -> Iterator[None]:
    """Who leaves while the ranks meet, as a signal may ask, takes the others along."""
    try:
        yield
    except SystemExit as stop:
        # Where the keeper of the store is gone, there is nobody to tell.
        with suppress(dist.DistError):
            if not store.check(["missing"]) and store.add("giving up", 1) == 1:
                print(f"rank {place.rank} left while the ranks met", file=sys.stderr, flush=True)
                store.set("gave up", str(as_status(stop.code)))
                _linger(place)
        raise


def _linger(place: Place) -> None:
    """A rank that keeps the store ends a little later: the others ask it."""
    if place.is_host and place.rank == 0:
        time.sleep(10 * _POLL)


def as_status(code: object) -> int:
    """Of a run of which one rank left with `code` before the others: never 0."""
    return int(str(code)) if str(code).isdecimal() and int(str(code)) else 1


def _read(store: Store, rank: int) -> Arrival:
    fields = json.loads(store.get(f"here/{rank}"))
    return Arrival(**fields | {"door": tuple(fields["door"])})


def _present(store: Store, place: Place) -> tuple[list[int], list[int]]:
    """(ranks that are here, ranks that are missing)."""
    here = [rank for rank in range(place.size) if store.check([f"here/{rank}"])]
    return here, [rank for rank in range(place.size) if rank not in here]


def _tell_waiting(store: Store, place: Place, patience: float) -> None:
    here, missing = _present(store, place)
    if missing and place.rank == here[0]:
        text = f"waiting for {listed(missing)} of {place.size}, for {patience:g} s at most"
        print(text, file=sys.stderr, flush=True)


def _raise_missing(store: Store, place: Place, patience: float) -> NoReturn:
    """The lowest rank that is here says who is not; the others end without a word."""
    here, missing = _present(store, place)
    hosts = Counter(_read(store, rank).host for rank in here)
    store.set("missing", "")  # all end together
    _linger(place)
    if place.rank != here[0]:
        raise SystemExit(1)
    raise TimeoutError(
        f"{listed(missing)} of {place.size} did not arrive at {place.keeper} within "
        f"{patience:g} s; there are {', '.join(f'{n} on {host}' for host, n in hosts.items())}"
    )


def listed(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 4`, and no more than 16 of them."""
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def _check(arrivals: list[Arrival]) -> None:
    for rank, arrival in enumerate(arrivals):
        if arrival.size != arrivals[0].size:
            raise ValueError(
                f"WORLD_SIZE is {arrivals[0].size} on rank 0 but {arrival.size} on rank {rank} "
                f"({arrival.host})"
            )


def choose_device(rank: int, arrivals: list[Arrival], environ: Mapping[str, str]) -> torch.device:
    """This process's own GPU where each process has one, the CPU where no host has so many.

    Raises ValueError where some hosts have them and others do not. LOCAL_RANK says which GPU;
    without it, it is the place among the ranks of the same host.
    """
    processes = Counter(arrival.host for arrival in arrivals)
    short = [each for each in arrivals if each.gpus < processes[each.host]]
    if not short:
        before = sum(each.host == arrivals[rank].host for each in arrivals[:rank])
        return torch.device("cuda", int(environ.get("LOCAL_RANK", before)))
    host, gpus = short[0].host, short[0].gpus
    if len({each.host for each in short}) < len(processes):
        raise ValueError(
            f"{host} runs {processes[host]} processes but has {gpus} GPU(s), and other hosts "
            "have one for each process; leave it out, or start as many processes as it has GPUs"
        )
    if gpus and rank == 0:
        print(f"{processes[host]} processes but {gpus} GPU(s) on {host}: computing on the CPU")
    return torch.device("cpu")


def check_interface(arrivals: list[Arrival], environ: Mapping[str, str]) -> None:
    """Raise ValueError where gloo would offer other hosts the loopback of this one."""
    host = socket.gethostname()
    if len({arrival.host for arrival in arrivals}) == 1 or "GLOO_SOCKET_IFNAME" in environ:
        return
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address"
    if address == "no address" or address.startswith("127."):
        raise ValueError(
            f"the name of host {host} stands for {address}, at which no other host finds it; "
            "GLOO_SOCKET_IFNAME=eth0, with the name of its network interface, would work"
        )
