"""From the environment of a launcher to a mesh; below this file nothing reads the environment."""

from __future__ import annotations

import faulthandler
import os
import socket
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.distributed_c10d import _set_pg_timeout

from megatron.config.failure import write_error_file
from megatron.config.launch import world_size
from megatron.config.training import ParallelConfig
from megatron.parallel.mesh import Mesh, build_mesh, serial_mesh
from megatron.train.watch.ending import Ending
from megatron.train.watch.lifeline import Lifeline, address_of, open_door
from megatron.train.watch.rendezvous import (
    Arrival,
    Place,
    check_interface,
    choose_device,
    enter,
    introduce,
    meet,
    not_alone,
    open_store,
    reach,
    read_place,
)
from megatron.train.watch.standing import RECORDED, groups_of
from megatron.train.watch.watcher import Seat, Watch

PATIENCE = 120.0  # seconds within which all ranks have to arrive
_MARGIN = 300.0  # seconds that torch's own time limits are longer, so that the watch speaks first


def default_precision(device: torch.device) -> str:
    """What a run computes in if nobody says: bf16 where the device multiplies in it, else fp32."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bf16 = any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))
    return "bf16" if has_bf16 else "fp32"


@contextmanager
def launch(parallel: ParallelConfig, environ: Mapping[str, str]) -> Iterator[Mesh]:
    """The mesh of this run: the launcher's processes, or this process alone without a launcher.

    Launchers are torchrun, and whatever sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Where
    there are several processes they are watched to the end of the `with`: a failure or a stall of
    one is told once and ends all, with status 1 and without coming back here.

    Raises ValueError where the processes do not fit, TimeoutError where some do not arrive.
    """
    size = world_size(environ)
    if size % parallel.tensor_model_parallel_size:
        raise ValueError(
            f"--tensor-model-parallel-size {parallel.tensor_model_parallel_size} does not divide "
            f"the number of processes, {size}; start them with "
            f"torchrun --nproc-per-node {parallel.tensor_model_parallel_size}"
        )
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if size == 1:
        with _recorded(error_file):
            yield serial_mesh(_own_device(environ))
        return
    with _recorded(error_file):
        place, limit = read_place(environ), 60 * parallel.distributed_timeout_minutes
        seat, arrivals = _find_others(place, PATIENCE)
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # where gloo aborts a process, it shows its stacks
    # Torch's recorder takes its size from the environment alone, when it is first asked.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", str(RECORDED))
    with Watch(seat, limit, Ending(seat.store, place, error_file)) as watch:
        check_interface(arrivals, environ)
        mesh = _build(parallel, place, choose_device(place.rank, arrivals, environ), seat, limit)
        watch.know(mesh)
        yield mesh
    dist.destroy_process_group()


@contextmanager
def _recorded(error_file: str | None) -> Iterator[None]:
    """Let torchrun's summary show the exception that leaves."""
    try:
        yield
    except Exception as error:
        text = "".join(traceback.format_exception(error))
        write_error_file(error_file, f"{type(error).__name__}: {error}", text)
        raise


def _own_device(environ: Mapping[str, str]) -> torch.device:
    """Of a process that is alone: the first GPU that it sees."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _find_others(place: Place, patience: float) -> tuple[Seat, list[Arrival]]:
    door = open_door()
    store = enter(open_store(place, patience), place)
    arrival = introduce(place, address_of(door, place.address, place.port))
    with not_alone(store, place):
        arrivals = meet(store, place, arrival, patience)
    words = PrefixStore("watch", store)
    neighbour = arrivals[(place.rank + 1) % place.size]
    try:
        lines = {"neighbour": socket.create_connection(neighbour.door, timeout=patience)}
    except OSError as error:
        Ending(words, place, None).follow()  # the neighbour may have left, with a verdict
        raise OSError(
            f"{arrival.host} does not reach {neighbour.host} at {neighbour.door[0]}, port "
            f"{neighbour.door[1]} ({error}); the hosts of a run need open ports between them"
        ) from error
    if place.rank or not place.is_host:
        lines["keeper"] = reach(place, patience)
    return Seat(place, arrival.host, words, Lifeline(door, lines)), arrivals


def _build(
    parallel: ParallelConfig, place: Place, device: torch.device, seat: Seat, limit: float
) -> Mesh:
    """Process groups and the mesh."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=limit + _MARGIN)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore("groups", seat.store.clone()),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    mesh = build_mesh(parallel.tensor_model_parallel_size, device, timeout)
    for group in groups_of(mesh).values():
        _set_pg_timeout(timeout, group)
    return mesh
