"""The ranks of one node of a job: torchrun, to whose ranks signals come and whose status is theirs.

    srun ... python scripts/slurm/node.py NODES RANKS_PER_NODE ADDRESS PORT PROGRAM [WORD ...]

Slurm with proctrack/cgroup signals none but the process that it started, this one. By itself
torchrun dies of SIGUSR1, kills after 30 seconds of SIGTERM ranks that are still saving, and ends
with 1 whatever their status is.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

STOPPED = 75  # status of ranks that SIGTERM or SIGUSR1 stopped: the same command goes on
ARRIVING = 600  # seconds within which all nodes have to be there
LEAVING = 300  # seconds that a rank may take to save and end once the first has ended


class Passed:
    """Passes SIGTERM and SIGUSR1 on to the ranks; where there are none yet, there is no need."""

    def __init__(self) -> None:
        self.numbers: set[int] = set()
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.numbers.add(number)
        ranks = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
        if not ranks:
            os._exit(STOPPED)  # an exception may come in a callback of an import, which drops it
        for rank in ranks:
            os.kill(int(rank), number)

    def status(self, exit_code: int) -> int:
        """This process's status for a rank's: STOPPED if a passed signal has killed it."""
        if -exit_code in self.numbers:
            return STOPPED
        return exit_code if exit_code > 0 else 128 - exit_code


def arguments(words: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    """torchrun's, for this node.

    Raises ValueError where Slurm's step, or the GPUs that it gave this node, are not what the words
    say.
    """
    nodes, per_node, address, port, *program = words
    for what, variable, number in (
        ("nodes", "SLURM_STEP_NUM_NODES", nodes),
        ("GPUs for the ranks of this node", "SLURM_GPUS_ON_NODE", per_node),
    ):
        given = environ.get(variable, number)
        if given != number:
            raise ValueError(
                f"node {environ['SLURM_NODEID']}: the job has {nodes} nodes x {per_node} ranks, "
                f"but Slurm gave {given} {what}, not {number}"
            )
    return [
        *("--nnodes", nodes, "--nproc-per-node", per_node, "--node-rank", environ["SLURM_NODEID"]),
        *("--master-addr", address, "--master-port", port),
        *("--rdzv-conf", f"timeout={ARRIVING}", "--shutdown-timeout", str(LEAVING)),
        *("--signals-to-handle", "SIGINT,SIGHUP,SIGQUIT"),
        *program,
    ]


def main(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the ranks to their end; the status of the first that failed, or 0."""
    passed = Passed()  # before torch comes, which takes seconds
    try:
        own = arguments(words, environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2

    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(own)
    except ChildFailedError as failed:
        _, first = failed.get_first_failure()
        return passed.status(first.exitcode)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
