"""What a reader opens to follow one training step stays short."""

import re
import sys
from pathlib import Path
from types import FrameType

from megatron.parallel import kernels
from megatron.train.step import train_step
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, micro_batches, samples, tiny_state

ROOT = Path(__file__).parents[1]
NOT_READ = ("<module>", "<lambda>")  # an import, and an entry of the table that the factory is


def core_path() -> list[str]:
    """The files that CONTRIBUTING.md lists."""
    text = (ROOT / "CONTRIBUTING.md").read_text().partition("## The core path")[2]
    return re.findall(r"^\d+\. `(\S+)`", text, re.MULTILINE)


def entered_by_a_step() -> set[tuple[str, str]]:
    """(file of megatron/, function) of each call of the main thread."""
    package, found = str(ROOT / "megatron"), set[tuple[str, str]]()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_ours = code.co_filename.startswith(package) and code.co_name not in NOT_READ
        if event == "call" and is_ours:
            found.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_name))

    before, kernels.use_cpu_kernels = kernels.use_cpu_kernels, False
    try:
        mesh = mesh_of_ranks(2)
        state, batches = tiny_state(mesh), micro_batches(samples(4), mesh, 2)
        sys.setprofile(note)
        train_step(state, batches, 1e-3)
    finally:
        sys.setprofile(None)
        kernels.use_cpu_kernels = before
    return found


def test_a_step_enters_the_files_of_the_core_path_alone(gloo: Pool) -> None:
    for found in gloo.run(2, entered_by_a_step):
        files = {file for file, _ in found}
        assert files <= set(core_path())
        # The program and the loop come before the step, and a schedule is kept from the first on.
        before = {"megatron/train/pretrain.py", "megatron/train/loop.py"}
        kept = {"megatron/parallel/schedules.py"}
        assert set(core_path()) - files - kept == before
        # Autograd calls the backward of our own functions on this thread too.
        assert ("megatron/parallel/collectives.py", "backward") in found


def test_the_core_path_is_short() -> None:
    names = core_path()
    assert len(set(names)) == len(names) <= 21
    assert sum(len((ROOT / name).read_text().splitlines()) for name in names) <= 5900
