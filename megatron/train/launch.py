"""Builds the mesh from the launcher's environment, which no code below this file reads."""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from tempfile import gettempdir

import torch
import torch.distributed as dist

from megatron.config.launch import RankInfo, read_rank_info, world_size, write_error_file
from megatron.config.parallel import ParallelConfig
from megatron.config.parts import PARTS
from megatron.errors import UsageError
from megatron.parallel.mesh import Mesh, build_mesh, serial_mesh
from megatron.train.watch import ROUNDS, Arrival, Watch, began_at, note

PATIENCE = 120.0  # seconds within which all ranks have to arrive
NOTICE = 5.0  # seconds of waiting after which the missing ranks are named
_POLL = 0.1  # seconds
_MARGIN = 300.0  # seconds added to torch's own time limits, so that the watch ends a run first
# Values with which a repeated run has the same bits, the default first. Ring is the algorithm that
# all of NCCL's collectives have; if several are allowed, NCCL chooses by its measurements.
_DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"), "NCCL_ALGO": ("Ring",)}


def default_precision(device: torch.device) -> str:
    """The default precision of a run: bf16 if the device has bf16 matmuls, else fp32."""
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        capabilities = torch.cpu.get_capabilities()
        has_bf16 = any(capabilities.get(name) for name in ("amx_bf16", "avx512_bf16"))
    return "bf16" if has_bf16 else "fp32"


@contextmanager
def launch(
    parallel: ParallelConfig | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    deterministic: bool = False,
) -> Iterator[Mesh]:
    """The mesh of this run: the launcher's processes, or only this process without a launcher.

    A launcher is torchrun, or anything that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    Several processes are watched until the `with` ends: a failure or a stall of one is printed once
    and ends all of them, with status 1 and without returning here.

    deterministic: operators, cuBLAS, NCCL and the compiler give the same bits in every run; CUDA
    must not have been used before.

    Raises ValueError if the processes do not fit, TimeoutError if some do not arrive.
    """
    parallel, error_file = parallel or ParallelConfig(), environ.get("TORCHELASTIC_ERROR_FILE")
    try:
        size = world_size(environ)
        parallel.check(size)
        if deterministic:
            for name, values in _DETERMINISTIC.items():
                value = environ.get(name, values[0])
                if value.lower() not in map(str.lower, values):
                    allowed = f"{' or '.join(values)} with {{}}"
                    raise UsageError(name, value, allowed, "--deterministic")
                os.environ[name] = value
            torch.use_deterministic_algorithms(True)  # also for Inductor, which times no kernels
            # Otherwise each new tensor is first filled with NaN, which writes all of it.
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
            torch.backends.cudnn.benchmark = False
        if size == 1:
            device = choose_device(0, [_describe_process(1)], environ)
            if device.type == "cuda":
                torch.cuda.set_device(device)
            yield serial_mesh(device)
            return
        info, limit = read_rank_info(environ), 60 * parallel.distributed_timeout_minutes
        note("meeting the other ranks")
        store, is_first = open_store(info, PATIENCE)
    except Exception as error:
        write_error_file(error_file, f"{type(error).__name__}: {error}".splitlines()[0])
        raise
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # prints the stacks of a process that gloo aborts
    dump_prefix = f"{gettempdir()}/flight_recorder_{info.port}_"  # no other run has this port
    dump_prefix = environ.get("TORCH_FR_DUMP_TEMP_FILE", dump_prefix)
    watch = Watch(dist.PrefixStore("watch", store), info, limit, error_file, dump_prefix)
    with watch:
        if not is_first:
            raise UsageError("RANK", info.rank, "the rank of one process; two were given it")
        arrivals = meet(store, info, watch, PATIENCE)
        note("making process groups")
        watch.all_arrived(arrivals)
        check_interface(arrivals, environ)
        device = choose_device(info.rank, arrivals, environ)
        has_gpu = device.type == "cuda"
        if has_gpu:
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=ROUNDS * limit + _MARGIN)
        connect = PARTS["process_group"].find(parallel.process_group)
        connect(
            backend="nccl" if has_gpu else "gloo",
            store=dist.PrefixStore("groups", store.clone()),  # type: ignore[attr-defined]
            rank=info.rank,
            world_size=info.size,
            timeout=timeout,
            device_id=device if has_gpu else None,
        )
        mesh = build_mesh(
            parallel.sizes,
            device,
            timeout,
            tensor_parallel_mode=parallel.tensor_parallel_mode,
            sequence_parallel=parallel.cuts_stream,
            cp_comm_type=parallel.context_type,
        )
        watch.add_mesh(mesh)
        yield mesh
    dist.destroy_process_group()


def open_store(info: RankInfo, patience: float) -> tuple[dist.Store, bool]:
    """(the part of the store for this start of the ranks, whether this process is the only one of
    its rank). patience: in seconds.

    torchrun keeps one store across restarts, and does not count restarts after a lost node. All
    ranks start again each time, so each rank counts its own starts.
    """
    keeps = info.is_host and info.rank == 0
    deadline = time.monotonic() + patience
    while not keeps:  # TCPStore waits too, but blocks signals meanwhile
        try:
            socket.create_connection((info.address, info.port), timeout=patience).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"rank {info.rank} of {info.size} on {socket.gethostname()} did not reach "
                    f"{info.keeper} within {patience:g} s ({error})"
                ) from None
            time.sleep(_POLL)
    try:
        store = dist.TCPStore(
            info.address,
            info.port,
            info.size,
            is_master=keeps,
            timeout=timedelta(seconds=patience),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except dist.DistError as error:
        raise OSError(
            f"rank {info.rank} on {socket.gethostname()} cannot use port {info.port} of "
            f"{info.address} to meet the others; another MASTER_PORT would work"
        ) from error
    start = store.add(f"{info.restarts}/starts/{info.rank}", 1)
    is_first = start == 1 or not info.is_host
    return dist.PrefixStore(f"{info.restarts}/{start if is_first else 1}", store), is_first


def _describe_process(size: int) -> Arrival:
    """size: the number of ranks that this process was given."""
    namespace, pid = "", os.getpid()
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        # Sandboxes of two hosts may have the same boot and names of namespaces.
        namespace = f"{socket.gethostname()} {boot.strip()} {Path('/proc/self/ns/pid').readlink()}"
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Arrival(socket.gethostname(), size, gpus, namespace, pid, began_at(pid))


def meet(store: dist.Store, info: RankInfo, watch: Watch, patience: float) -> list[Arrival]:
    """The Arrival of each rank, in order of rank, once all have arrived.

    Raises TimeoutError, which names the missing ranks, after `patience` seconds, and ValueError if
    ranks contradict each other.
    """
    store.set(f"here/{info.rank}", json.dumps(asdict(_describe_process(info.size))))
    if store.add("arrived", 1) == info.size:
        store.set("everyone", "")
    start, has_printed = time.monotonic(), False
    while not store.check(["everyone"]):
        waited = time.monotonic() - start
        here = [rank for rank in range(info.size) if store.check([f"here/{rank}"])]
        missing = [rank for rank in range(info.size) if rank not in here]
        is_lowest = info.rank == here[0]  # prints for all
        if waited > NOTICE and not has_printed and missing and is_lowest:
            text = f"waiting for {_listed(missing)} of {info.size}, for {patience:g} s at most"
            print(text, file=sys.stderr, flush=True)
            has_printed = True
        if waited > patience + (0 if is_lowest else NOTICE):
            hosts = Counter(json.loads(store.get(f"here/{rank}"))["host"] for rank in here)
            raise TimeoutError(
                f"{_listed(missing)} of {info.size} did not arrive at {info.keeper} within "
                f"{patience:g} s; there are {', '.join(f'{n} on {h}' for h, n in hosts.items())}"
            )
        watch.follow()
        time.sleep(_POLL)
    arrivals = [Arrival(**json.loads(store.get(f"here/{rank}"))) for rank in range(info.size)]
    for rank, arrival in enumerate(arrivals):
        if arrival.size != info.size:
            raise ValueError(
                f"WORLD_SIZE is {info.size} on rank {info.rank} but {arrival.size} on rank "
                f"{rank} ({arrival.host})"
            )
    return arrivals


def _listed(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 3, 4`, with at most 16 numbers."""
    shown = ", ".join(map(str, ranks[:16])) + (", ..." if len(ranks) > 16 else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}"


def choose_device(rank: int, arrivals: list[Arrival], environ: Mapping[str, str]) -> torch.device:
    """This process's own GPU if every process has one; the CPU if no host has enough GPUs.

    Raises ValueError if some hosts have enough and others do not. LOCAL_RANK is the GPU's index;
    without it, the index is the number of lower ranks on the same host.
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
    """Raises ValueError if gloo would give other hosts the loopback address of this host."""
    host = socket.gethostname()
    if len({arrival.host for arrival in arrivals}) == 1 or "GLOO_SOCKET_IFNAME" in environ:
        return
    try:
        address = socket.gethostbyname(host)
    except OSError:
        address = "no address"
    if address.startswith(("127.", "no ")):
        raise ValueError(
            f"the name of host {host} stands for {address}, at which no other host finds it; "
            "GLOO_SOCKET_IFNAME=eth0, with the name of its network interface, would work"
        )
