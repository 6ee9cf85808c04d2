"""A Slurm of this machine alone: munged, slurmctld and nodes, each on a port of its own.

All that they write is in one folder, and nothing of the system's own Slurm, if it has one, is used
or changed. The cluster's processes are known by SLURM_CONF in their environment, which daemons,
steps and ranks inherit.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.dist import PATIENCE

ROOT = Path(__file__).parents[2]
NODES = ("first", "second", "third", "fourth")  # which no resolver knows
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol")
PATH = f"/usr/sbin:/sbin:{os.environ['PATH']}"  # of the daemons
PORTS = range(20_000, 32_000)  # below those that the kernel gives to clients

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/%n.pid
SlurmdLogFile={folder}/%n.log
SlurmdSpoolDir={folder}/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
EnforcePartLimits=ALL
# Seconds until a job that may start is seen.
SchedulerParameters=bf_interval=1
# A port of the ranks that another cluster of this machine does not use.
FirstJobId={ports[0]}
# A node is lost after so many seconds, and back as soon as its slurmd is. One that was set down is
# not: an answer that it gave before it died may arrive later.
SlurmdTimeout=5
ReturnToService=1
# The nodes have the processors that they say, whatever this machine has.
SlurmdParameters=config_overrides
NodeName=first NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2
NodeName=second NodeHostname={host} NodeAddr=127.0.0.2 Port={ports[2]} CPUs=2
NodeName=third NodeHostname={host} NodeAddr=127.0.0.3 Port={ports[3]} CPUs=2
NodeName=fourth NodeHostname={host} NodeAddr=127.0.0.4 Port={ports[4]} CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    absent = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    return f"no {', '.join(absent)}; apt-get install slurm-wlm munge" if absent else None


class Cluster:
    """While entered, its daemons run; what is left of them and of jobs at the end is killed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "slurm.conf"
        self.environ = {
            **{name: os.environ[name] for name in ("HOME", "LANG") if name in os.environ},
            "PATH": PATH,
            "SLURM_CONF": str(self.file),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
        }
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Cluster:
        attempts = 0
        try:
            self._start_munge()
            while not self._has_started():
                attempts += 1
                assert attempts < 5, self.log_tails()
                self._stop(*NODES, "slurmctld")
        except BaseException:
            self.__exit__()
            raise
        return self

    def _has_started(self) -> bool:
        """Whether all daemons came up; False where a port that one drew is in use."""
        ports = random.SystemRandom().sample(PORTS, 1 + len(NODES))
        self.file.write_text(
            CONF.format(host=socket.gethostname(), folder=self.folder, ports=ports)
        )
        shutil.rmtree(self.folder / "state", ignore_errors=True)
        (self.folder / "state").mkdir()
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)

        def has_failed() -> bool:
            return any(daemon.poll() is not None for daemon in self.daemons.values())

        self.wait_for(lambda: self.are_idle() or has_failed(), "idle nodes")
        return not has_failed()

    def __exit__(self, *_: object) -> None:
        self._stop(*self.daemons)
        self.kill_members()

    def _stop(self, *names: str) -> None:
        for daemon in [self.daemons.pop(name) for name in names]:
            daemon.kill()
            daemon.wait()

    def _start_munge(self) -> None:
        key, kept = self.folder / "munge.key", self.folder / "munge"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        # --force: temporary folders are not as munged wants them, which is for root alone.
        self._start(
            "munged", "munged", "--foreground", "--force", f"--key-file={key}",
            f"--socket={kept}.socket", f"--pid-file={kept}.pid", f"--log-file={kept}.log",
            f"--seed-file={kept}.seed",
        )  # fmt: skip
        self.wait_for((self.folder / "munge.socket").exists, "munged")

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"{name}.out").open("ab") as out:
            self.daemons[name] = subprocess.Popen(
                command, env=self.environ, stdout=out, stderr=out, start_new_session=True
            )

    def start_node(self, node: str) -> None:
        self._start(node, "slurmd", "-D", "-N", node)

    def start_node_again(self, node: str) -> None:
        """After `set_down`."""
        self.start_node(node)
        self.ask("scontrol", "update", f"NodeName={node}", "State=RESUME")

    def kill_node(self, node: str) -> None:
        """As where its power fails: its slurmd, step daemons and tasks, before one can tell."""
        slurmd = self.daemons.pop(node)
        slurmd.kill()
        self.kill_members(SLURMD_NODENAME=node)
        slurmd.wait()

    def set_down(self, node: str) -> None:
        """Sets the state that Slurm gives a node which has not answered for half a minute."""
        self.ask("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")

    def kill_members(self, **variables: str) -> None:
        while members := self.members(**variables):
            kill(members)

    def members(self, **variables: str) -> list[int]:
        """Processes that have the variables in their environment, after the step daemons of these.

        Daemons come first, since one that outlives its task tells that the task has ended.
        """
        variables["SLURM_CONF"] = str(self.file)
        wanted = {f"{name}={value}".encode() for name, value in variables.items()}
        pids = {pid for pid, environ in environments() if wanted <= environ}
        parents = {parent_of(pid) for pid in pids}
        return [*(pid for pid in parents if command_of(pid).startswith("slurmstepd")), *pids]

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, from the root of the repository."""
        return subprocess.run(
            command, cwd=ROOT, env=self.environ, capture_output=True, text=True, timeout=PATIENCE
        )

    def ask(self, *command: str) -> str:
        """The output of a command that has to succeed."""
        ended = self.run(*command)
        assert ended.returncode == 0, (command, ended.stdout, ended.stderr)
        return ended.stdout.strip()

    def states(self) -> list[str]:
        """The states of the nodes; [] while nobody answers."""
        return self.run("sinfo", "--noheader", "--Node", "--format=%T").stdout.split()

    def are_idle(self) -> bool:
        return self.states() == ["idle"] * len(NODES)

    def wait_until_idle(self) -> None:
        self.wait_for(self.are_idle, "idle nodes")

    def submit(self, log: Path, *words: str) -> str:
        """The number of a job of two nodes and two ranks each; later flags of sbatch win."""
        size = ("--nodes=2", "--ntasks-per-node=2")
        return self.ask("sbatch", "--parsable", *size, f"--output={log}", *words)

    def job(self, number: str) -> Mapping[str, str]:
        """The fields of scontrol show job, such as JobState; none while nobody answers."""
        shown = self.run("scontrol", "--oneliner", "show", "job", number).stdout
        return dict(re.findall(r"(\S+?)=(\S*)", shown))

    def wait_for_state(self, number: str, *states: str) -> Mapping[str, str]:
        """The job's fields, once it is in one of the states."""
        self.wait_for(lambda: self.job(number).get("JobState") in states, f"{number}: {states}")
        return self.job(number)

    def start_again(self, number: str) -> None:
        """A job that was queued again would wait for two minutes.

        Within a second or two the nodes still refuse it, as the job that they were told to end.
        """
        self.wait_for_state(number, "PENDING")
        self.ask("scontrol", "update", f"JobId={number}", "StartTime=now+3seconds")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.log_tails()}"
            time.sleep(0.1)

    def log_tails(self) -> str:
        """The last lines of the daemons' logs."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"{file.name}\n{file.read_text()[-2000:]}" for file in files)


def environments() -> Iterator[tuple[int, set[bytes]]]:
    """(process, its environment) of all that can be read."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            yield int(folder.name), set((folder / "environ").read_bytes().split(b"\0"))
        except OSError:  # it has ended
            continue


def parent_of(pid: int) -> int:
    found = re.search(r"^PPid:\s*(\d+)", _read(pid, "status"), re.MULTILINE)
    return int(found[1]) if found else 0


def command_of(pid: int) -> str:
    return _read(pid, "cmdline")


def _read(pid: int, name: str) -> str:
    """ "" of a process that has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except OSError:
        return ""


def kill(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
