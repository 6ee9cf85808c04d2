"""The machine that a run would start on: versions, libraries, devices, limits, speed."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from megatron.config.pretrain import require_apex
from megatron.errors import UsageError
from megatron.libraries import load
from megatron.parallel.kernels import matmul
from megatron.train.launch import default_precision
from megatron.train.machine import COMPILER_HELP, compiler_failure
from megatron.train.state import DTYPES
from tools.doctor.findings import Fact, Finding, Problem
from tools.doctor.links import seconds
from tools.report.numbers import size

NEEDED = ("numpy", "numba", "safetensors", "tokenizers", "tyro", "tqdm")
OPTIONAL = ("gigatoken", "wandb", "tensorboard", "matplotlib", "ftfy", "pycld2", "orjson")
LINUX = sys.platform == "linux"
OPEN_FILES = 4096  # for shards of a corpus, slices of a checkpoint, sockets to other ranks
SMALL_DISK = 10**9
SMALL_SHARED_MEMORY = 2**27  # a container's default is 2**26, which NCCL's buffers outgrow
VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "GLOO_SOCKET_IFNAME", "RANK", "WORLD_SIZE",
    "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "WANDB_MODE",
)  # fmt: skip
PREFIXES = ("NCCL_", "TORCH_NCCL_", "ONEDNN_", "MKL_CBWR")
FEATURES = ("avx2", "avx512_f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "sve", "bf16")
PRODUCT = {"cpu": 512, "cuda": 4096}  # rows and columns of the matrices whose matmul is timed
SECONDS = 0.25  # of timing in each dtype


def versions() -> Iterator[Finding]:
    yield Fact("python", platform.python_version())
    yield Fact("torch", torch.__version__)
    yield Fact("CUDA of torch", torch.version.cuda, torch.version.cuda or "none: built for the CPU")
    if torch.cuda.is_available():
        yield Fact("NCCL", ".".join(map(str, torch.cuda.nccl.version())))
        yield Fact("cuDNN", torch.backends.cudnn.version())
    driver = Path("/proc/driver/nvidia/version")
    if driver.exists():
        yield Fact("NVIDIA driver", driver.read_text().splitlines()[0])
    for package in NEEDED + OPTIONAL:
        found = importlib.metadata.distributions(name=package)
        version = next((each.version for each in found), None)
        yield Fact(package, version, version or "not installed")
        if version is None and package in NEEDED:
            yield Problem(f"{package} is not installed", f"pip install {package}", is_needed=True)


def libraries(device: torch.device) -> dict[str, Callable[[], Iterator[Finding]]]:
    """Probes of the libraries that compile or replace code, by name."""
    compiler = partial(_layer_compiler, device)
    return {"torch.compile": compiler, "apex": _apex, "numba": _numba, "gigatoken": _encoder}


def _layer_compiler(device: torch.device) -> Iterator[Finding]:
    """torch.compile, which training uses by default on a GPU alone."""
    if device.type == "cpu":
        yield Fact("torch.compile", False, "not used on a CPU, unless --compile asks for it")
        return
    lack = compiler_failure(device)
    yield Fact("torch.compile", lack is None, lack or "works; layers are compiled")
    if lack is not None:
        yield Problem(f"torch.compile does not work: {lack}; layers run as they are", COMPILER_HELP)


def _apex() -> Iterator[Finding]:
    """NVIDIA's apex is optional, so its absence is no problem; another package of its name is."""
    if importlib.util.find_spec("apex") is None:
        text = "not installed; optional, torch's own kernels are the default"
        yield Fact("apex", {"installed": False, "usable": False}, text)
        return
    try:
        require_apex(optimizer_impl="apex", layernorm_impl="apex")
    except UsageError as error:
        yield Fact("apex", {"installed": True, "usable": False}, "not NVIDIA's, or not whole")
        yield Problem(str(error), "pip uninstall apex, or scripts/setup.sh --with-apex DIR")
    else:
        yield Fact("apex", {"installed": True, "usable": True}, "NVIDIA's, with its extensions")


def _numba() -> Iterator[Finding]:
    """numba, which compiles loops of the corpus tools, on one function and its plain Python."""

    def triangle(count: int) -> int:
        total = 0
        for number in range(count):
            total += number
        return total

    is_right = load("numba").njit(triangle)(1000) == triangle(1000)
    yield Fact("numba", is_right, "compiles, and computes what Python computes")
    if not is_right:
        cure = "install the version of requirements.txt"
        yield Problem("numba computes something else than Python", cure, is_needed=True)


def _encoder() -> Iterator[Finding]:
    """The encoder that preprocessing would choose, on a small vocabulary made here."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer

    from tools.corpus.tokenize.encoders import PROBES, build_encoder

    bpe = Tokenizer(BPE())
    bpe.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(PROBES, trainer)
    encoder = build_encoder("auto", bpe)
    record = {"name": encoder.name, "said": encoder.description}
    yield Fact("tokenizer", record, encoder.description)


def devices(device: torch.device, processes: int) -> Iterator[Finding]:
    """processes: of the run on this machine."""
    yield Fact("host", socket.gethostname())
    features = [name for name in FEATURES if torch.cpu.get_capabilities().get(name)]
    yield Fact("CPU", processor())
    yield Fact("CPU features", features, ", ".join(features) or "none that matter here")
    yield Fact("cores for this process", available := cores())
    threads = torch.get_num_threads()
    yield Fact("threads of torch", threads, f"{threads} in each of {processes} processes here")
    if device.type == "cpu" and processes * threads < available:
        what = f"processes x threads = {processes} x {threads} leaves some of {available} cores "
        yield Problem(f"{what}idle", f"OMP_NUM_THREADS={available // processes} before the command")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield Fact("memory", memory, size(memory))
    for number in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        record = {
            "name": facts.name,
            "bytes": total,
            "free_bytes": free,
            "capability": [facts.major, facts.minor],
        }
        text = f"{facts.name}, {size(total)} ({size(free)} free), "
        text += f"compute capability {facts.major}.{facts.minor}"
        yield Fact(f"GPU {number}", record, text)
    if not torch.cuda.is_available():
        yield Fact("GPU", None, "none that torch can use")
    there = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available()}
    backends = [name for name, is_there in there.items() if is_there]
    yield Fact("backends", backends, ", ".join(backends))
    yield Fact("a run computes on", str(device))
    yield Fact("default precision", default_precision(device))


def cores() -> int:
    """Cores that this process may use."""
    return (len(os.sched_getaffinity(0)) if LINUX else os.cpu_count()) or 1


def processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def limits(save: str, device: torch.device) -> Iterator[Finding]:
    """save: the folder of --save, which need not exist yet."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    yield Fact("open files", soft, f"{soft} (at most {most})")
    if soft != resource.RLIM_INFINITY and soft < OPEN_FILES:
        cure = f"ulimit -n {OPEN_FILES} in the shell that starts the run"
        if most.isdecimal() and hard < OPEN_FILES:
            cure += f", once the administrator has raised the hard limit from {hard}"
        yield Problem(f"only {soft} files may be open at once", cure)
    folder = Path(save).absolute()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    yield Fact("free disk of --save", free, f"{size(free)} at {folder}")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        what = f"--save {save}: {folder} cannot be written to: {error.strerror}"
        yield Problem(what, "another folder for --save", is_needed=True)
    if free < SMALL_DISK:
        cure = "free some, or another disk for --save; a checkpoint takes 12 to 14 bytes a weight"
        yield Problem(f"--save {save}: {size(free)} of the disk are free", cure)
    shared = Path("/dev/shm")
    if shared.exists():
        total = shutil.disk_usage(shared).total
        yield Fact("shared memory", total, f"{size(total)} at {shared}")
        if total < SMALL_SHARED_MEMORY and device.type == "cuda":
            cure = "docker run --shm-size=1g, or --ipc=host"
            yield Problem(f"{shared} has {size(total)}, which NCCL may outgrow", cure)


def environment(environ: Mapping[str, str]) -> Iterator[Finding]:
    for name, value in sorted(environ.items()):
        if name in VARIABLES or name.startswith(PREFIXES):
            yield Fact(name, value)


def speed(device: torch.device) -> Iterator[Finding]:
    """Billions of operations a second of a matmul in each dtype."""
    size = PRODUCT[device.type]
    for name, dtype in DTYPES.items():
        matrix = torch.ones(size, size, dtype=dtype, device=device)
        call, count, spent = partial(matmul, matrix, matrix), 0, 0.0
        call()  # the first run makes what later ones use again
        while spent < SECONDS:
            spent += seconds(call, device)
            count += 1
        rate = count * 2 * size**3 / spent
        text = f"{rate / 1e9:.0f} GFLOP/s, {size} x {size} x {size}"
        yield Fact(f"product, {name}", {"flops_per_second": rate, "size": size}, text)
