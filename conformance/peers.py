"""Holds other trainers to the fixtures, each in an environment of its own.

    python -m conformance.peers --environments /tmp/peers --output /tmp/results
    python -m conformance.peers --environments E --output R --only deepspeed --torch PACKAGES

pip alone makes ENVIRONMENTS/NAME, whose versions are here; an environment has torch, 5 GB of it.
With --torch it takes torch and what stands beside it from PACKAGES, the site-packages of an
environment of the same Python. A row is one run of conformance.run and leaves a record in OUTPUT;
one that does not start leaves the reason. Prints the table of all records in OUTPUT.

Exit status: 0 all rows were run (differences and refusals are figures, too), 2 otherwise.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30A0000:
    sys.exit(f"error: Python 3.10 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import json
import os
import subprocess
import venv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TORCH = ("torch==2.13.0", "numpy==2.4.6", "safetensors==0.8.0")
PEERS = {
    "torch": (),
    "transformers": ("transformers==5.23.0", "accelerate==1.15.0"),
    "accelerate": ("accelerate==1.15.0",),
    "deepspeed": ("deepspeed==0.19.8",),
    "megatron-core": ("megatron-core==0.16.1",),
    "lightning": ("lightning==2.6.6",),
}
BUILDS = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}  # DeepSpeed compiles nothing
FIGURES = ("loss", "grad_norm", "gradient", "weight")
SHARES = ("flops", "parameters", "optimizer")


class Row(NamedTuple):
    peer: str
    trainer: str
    adapter: str
    layout: str
    dtype: str = "float64"
    models: str = "gpt2 llama bert"

    @property
    def arguments(self) -> list[str]:
        given = ["--adapter", f"conformance.adapters.{self.adapter}", "--layout", self.layout]
        given += ["--dtype", self.dtype] if self.dtype != "float64" else []
        return given + (["--model", *self.models.split()] if len(self.models.split()) < 3 else [])

    @property
    def name(self) -> str:
        return f"{self.adapter.replace(':', '.')}-{self.layout}"


FP32 = "float32"
ROWS = (
    Row("torch", "torch", "torch:Adapter", "tensor=2"),
    Row("torch", "torch", "torch:Adapter", "data=2,zero=3"),
    Row("transformers", "transformers", "transformers:Adapter", "data=2,zero=3", FP32),
    Row("transformers", "transformers", "transformers:Adapter", "tensor=2", FP32),
    Row("transformers", "Trainer", "trainer:Adapter", "data=2", FP32),
    Row("transformers", "Trainer", "trainer:Adapter", "data=2,zero=3", FP32, "llama"),
    Row("accelerate", "accelerate", "accelerate:Adapter", "data=2"),
    Row("accelerate", "accelerate", "accelerate:Adapter", "data=2,zero=3"),
    Row("accelerate", "accelerate, forced", "accelerate:Forced", "data=2,zero=3"),
    *(Row("deepspeed", "DeepSpeed", "deepspeed:Adapter", f"data=2,zero={n}", FP32) for n in "123"),
    Row("lightning", "Lightning Fabric", "lightning:Adapter", "data=2"),
    Row("lightning", "Lightning Fabric, default fp64", "lightning:Double", "data=2"),
    Row("lightning", "Lightning Fabric", "lightning:Adapter", "data=2,zero=3"),
    *(
        Row("megatron-core", f"Megatron-Core{words}", f"megatron_core:{name}", layout, FP32, models)
        for words, name, layout, models in (
            ("", "Adapter", "data=2", "gpt2 llama bert"),
            ("", "Adapter", "data=2,zero=1", "gpt2 llama"),
            ("", "Adapter", "pipeline=2", "gpt2 llama"),
            ("", "Adapter", "tensor=2", "gpt2 llama"),
            (", padding cut", "Cut", "tensor=2", "gpt2"),
            (", padding cut", "Cut", "tensor=2,sequence=1", "gpt2"),
            (", padding cut", "Cut", "tensor=2,data=2,zero=1", "gpt2"),
        )
    ),
)


def make(folder: Path, requirements: Sequence[str], packages: Path | None) -> str:
    """Makes an environment, or takes a whole one that is there; why it could not, or ""."""
    stamp = folder / "requirements.txt"
    wanted = "\n".join([*requirements, f"# {packages}"])
    if stamp.is_file() and stamp.read_text() == wanted:
        return ""
    try:
        venv.create(folder, symlinks=True, clear=True)
    except OSError as error:
        return str(error)
    if packages:
        (own,) = folder.glob("lib/python*/site-packages")
        (own / "torch.pth").write_text(f"{packages.resolve()}\n")
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python")]
    command += ["install", "--quiet", *requirements]
    ended = subprocess.run(
        command, env={**os.environ, **BUILDS}, capture_output=True, text=True, check=False
    )
    if ended.returncode:
        return "pip: " + (ended.stderr.strip() or "no output").splitlines()[-1]
    stamp.write_text(wanted)
    return ""


def run(row: Row, python: Path, file: Path, timeout: float, lack: str) -> None:
    """Leaves a record in any case. lack: why the row cannot start."""
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "conformance.run", *row.arguments, "--timeout", str(timeout)]
    if not lack:
        ended = subprocess.run(
            [*command, "--python", str(python), "--json", str(file)],
            cwd=file.parent,  # the ranks find this project's folders no more than they need
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        lack = (ended.stderr.strip() or f"exit status {ended.returncode}").splitlines()[-1]
    if not file.is_file():
        failed = {"status": 2, "reason": lack, "versions": {}}
        file.write_text(json.dumps({"models": dict.fromkeys(row.models.split(), failed)}))


def verdict(result: Mapping[str, Any]) -> str:
    reason = (result["reason"].splitlines() or [""])[0]
    if result["status"] == 2:
        return reason
    if result["status"] == 3:
        return f"no content: {reason.split('; ')[0]}"
    if result["status"] == 0:
        return "agrees"
    named = result["fault"]
    return f"differs; {named['fault']} at distance {named['distance']:.2f}" if named else "differs"


def lines(row: Row, record: Mapping[str, Any]) -> list[str]:
    """The row's lines in the table; models of the same verdict share one."""
    groups: dict[str, list[str]] = {}
    for model in row.models.split():
        groups.setdefault(verdict(record["models"][model]), []).append(model)
    found = []
    for words, models in groups.items():
        results = [record["models"][each] for each in models]
        cells = [row.trainer, row.layout, ", ".join(models) if len(models) < 3 else "all"]
        if results[0]["status"] == 2:
            cells += [""] * 5
        else:
            for figure in FIGURES:
                sizes = [each["largest"][figure]["size"] for each in results]
                cells.append("undefined" if None in sizes else f"{max(sizes):.0e}")
            shares = (max(r["division"][-1][s]["times"] for r in results) for s in SHARES)
            cells.append(" / ".join(f"{each:.2f}" for each in shares))
            words += " (fp32)" if row.dtype == FP32 else ""
        cells.append(words.replace("|", "/"))
        found.append("".join(f"| {each} " if each else "| " for each in cells) + "|")
    return found


def table(folder: Path) -> str:
    """The rows whose records are there, versions and commands."""
    said, commands = [], []
    versions: dict[str, set[str]] = {}
    for row in ROWS:
        file = folder / f"{row.name}.json"
        if not file.is_file():
            continue
        record = json.loads(file.read_text())
        said += lines(row, record)
        commands.append("    python -m conformance.run " + " ".join(row.arguments))
        for result in record["models"].values():
            for name, version in result["versions"].items():
                versions.setdefault(name, set()).add(version)
    known = ", ".join(f"{name} {' and '.join(sorted(versions[name]))}" for name in versions)
    return "\n".join([*said, "", known, "", *commands])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m conformance.peers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--environments", type=Path, required=True, metavar="FOLDER", help="one for each peer")
    add("--output", type=Path, required=True, metavar="FOLDER", help="one record for each row")
    add("--only", nargs="+", choices=list(PEERS), default=list(PEERS), help="by default all")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of each start of ranks")
    add("--torch", type=Path, metavar="PACKAGES", help="a folder that has torch")
    options = parser.parse_args()
    if options.torch and not (options.torch / "torch" / "__init__.py").is_file():
        parser.error(f"argument --torch: {options.torch} has no torch")
    options.output.mkdir(parents=True, exist_ok=True)
    lacks = {}
    for peer in options.only:
        folder = (options.environments / peer).absolute()
        lacks[peer] = make(folder, [*TORCH, *PEERS[peer]], options.torch)
        for row in ROWS:
            if row.peer == peer:
                file = options.output.absolute() / f"{row.name}.json"
                run(row, folder / "bin" / "python", file, options.timeout, lacks[peer])
    print(table(options.output))
    return 2 if any(lacks.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
