"""A whole run described in one TOML file: which steps, with which flags, in which folders.

`output`, `input` (files that need no extraction) and flags that all steps share come before the
first table.  Each step that has a table runs, in the order of STEPS, with the keys of the table as
its flags:

    output = "runs/corpus"
    workers = 8
    [extract.wikipedia]
    input = ["dumps/wikipedia"]
    format = "wikiextractor"
    [dedup]
    jaccard = 0.7

A step reads the previous step's output and writes to OUTPUT/STEP.  Paths are as in a command:
relative to the folder in which it is run.
"""

import difflib
import importlib
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from megatron.config.parse import parse_table
from megatron.config.presets import settings_of
from megatron.errors import UsageError

STEPS = {
    "extract": "tools.corpus.extract",
    "clean": "tools.corpus.clean",
    "decontaminate": "tools.corpus.decontaminate",
    "dedup": "tools.corpus.dedup",
    "split": "tools.corpus.split",
    "tokenise": "tools.corpus.tokenize.step",
    "report": "tools.corpus.report",
}
COMMON = ("workers", "scheduler", "memory", "compress", "unit")
"""Keys before the first table, given to the steps that have them."""
OF_THE_COMMAND = {"shard", "overwrite"}
"""Settings of steps that a file does not hold: a run with them is another command."""
USUAL = ("clean", "dedup", "split")
"""Steps of a run without a file."""

Table = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Settings of the programs that read a description."""

    config: Annotated[Path | None, tyro.conf.Positional] = None
    """TOML file; scripts/corpus/ has two.  Without it, give --input and --output."""

    input: tuple[Path, ...] = ()
    """Files of JSON lines or text, or folders of them, to clean, de-duplicate and split."""

    output: Path | None = None
    """Folder that the run fills."""

    workers: int | None = None
    """Processes of every step; overrides the file."""

    allow_overcommit: bool = False
    """Only warn if the estimate says that disk or memory do not suffice."""

    def __post_init__(self) -> None:
        given = bool(self.input), self.output is not None
        if given != ((False, False) if self.config else (True, True)):
            raise UsageError(
                "--input", None, "given with --output, or both left out where a TOML file is given"
            )

    def description(self) -> "Description":
        """The content of the file, or without a file the usual steps with their defaults."""
        if self.config is not None:
            return read_description(self.config)
        head = {"input": list(map(str, self.input)), "output": str(self.output)}
        return Description(origin="the command", head=head, tables={step: {} for step in USUAL})


@dataclass(frozen=True, kw_only=True)
class Job:
    """One step on one input."""

    name: str
    """Name of its table, such as dedup or extract.wikipedia; tokenise adds the side."""
    step: str
    settings: Any
    output: Path
    where: str
    """The file and the table, for messages."""

    def run(self) -> None:
        importlib.import_module(STEPS[self.step]).run(self.settings)


@dataclass(frozen=True, kw_only=True)
class Description:
    """The content of a file, or of a command without a file."""

    origin: str
    """Its name in messages."""
    head: Table
    tables: Mapping[str, Table]

    def __post_init__(self) -> None:
        known = ("output", "input", *COMMON)
        for key in self.head:
            check_key(f"{self.origin}: before the first table:", key, known, ", ".join(known))
        for name in self.tables:
            check_key(f"{self.origin}: the tables:", name, STEPS, "python tools/corpus.py")
        inputs, extracts = self.head.get("input", []), self.tables.get("extract", {})
        loose = [name for name, table in extracts.items() if not isinstance(table, Mapping)]
        faults = {
            'needs output = "FOLDER" before the first table': "output" not in self.head,
            'input must be a list such as ["raw.jsonl"]': not isinstance(inputs, list),
            f"[extract] {', '.join(loose)} must be in a table for its source such as "
            "[extract.wikipedia]": loose,
            'needs input = ["raw.jsonl"] before the first table, or a table [extract.NAME]': not (
                inputs or extracts
            ),
            "needs the table of a step such as [dedup]": not self.tables,
        }
        for reason, is_so in faults.items():
            if is_so:
                raise ValueError(f"{self.origin}: {reason}")

    def jobs(self, flags: Table) -> list[Job]:
        """The jobs to run, in order.  flags: flags of steps, which override the file's.

        Raises ValueError, naming the file and the key, for values that the steps refuse.
        """
        output = Path(self.head["output"])
        inputs = [*map(Path, self.head.get("input", []))]
        jobs: list[Job] = []
        for step in STEPS:
            if step not in self.tables:
                continue
            table, folder = self.tables[step], output / step
            if step == "extract":
                for name, each in table.items():
                    jobs.append(self._job(f"{step}.{name}", each, None, folder / name, flags))
                    inputs.append(folder / name)
            elif step == "report":
                folders = [job.output for job in jobs]
                jobs.append(self._job(step, table, folders, output / "report.html", flags))
            elif step == "tokenise" and "split" in self.tables:
                for side in inputs:
                    name = f"{step}.{side.name}"
                    jobs.append(self._job(name, table, [side], folder / side.name, flags))
            else:
                jobs.append(self._job(step, table, inputs, folder, flags))
                inputs = [folder]
                if step == "split":
                    inputs = [folder / side for side in ("train", "valid")]
        return jobs

    def _job(
        self, name: str, table: Table, inputs: list[Path] | None, output: Path, flags: Table
    ) -> Job:
        """inputs: None where the table names them."""
        step = name.partition(".")[0]
        where = f"{self.origin}: [{name if inputs is None else step}]"
        kind = importlib.import_module(STEPS[step]).Settings
        known = {each.name: each for each in fields(kind)}
        keys = known.keys() - OF_THE_COMMAND
        paths = {"output": output} if inputs is None else {"input": inputs, "output": output}
        help_command = f"python tools/corpus.py {step} --help"
        for key, value in table.items():
            if key in paths or key in OF_THE_COMMAND:
                raise ValueError(f"{where} {key}: `run` sets it; take it out")
            check_key(where, key, keys, help_command)
            if isinstance(value, Mapping):
                raise ValueError(f"{where} {key}: a table in a table is no flag")
        if inputs is None and not table.get("input"):
            raise ValueError(f'{where} needs input = ["FILE OR FOLDER"]')
        for key, field in known.items():
            if field.default is MISSING and key not in paths and key not in table:
                raise ValueError(f"{where} needs {key}; {help_command} says what it is")
        common = {key: value for key, value in self.head.items() if key in COMMON}
        values = {**paths, **common, **table, **flags}
        try:
            settings = parse_table(kind, {key: values[key] for key in values if key in known})
        except ValueError as error:
            raise ValueError(f"{where} {as_toml(error, kind)}") from None
        return Job(name=name, step=step, settings=settings, output=output, where=where)


def read_description(file: Path) -> Description:
    """Raises ValueError, naming the file and the key, if it does not describe a run."""
    if file.is_dir():
        raise ValueError(
            f"{file} is a folder; a TOML file would work, or --input {file} --output DIR"
        )
    try:
        content = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: no TOML ({error})") from None
    except FileNotFoundError:
        raise ValueError(f"{file}: no such file; scripts/corpus/small.toml is one") from None
    tables = {key: value for key, value in content.items() if isinstance(value, dict)}
    head = {key: value for key, value in content.items() if key not in tables}
    return Description(origin=str(file), head=head, tables=tables)


def check_key(where: str, key: str, known: Collection[str], listing: str) -> None:
    if key in known:
        return
    close = difflib.get_close_matches(key, known, 1)
    meant = f"did you mean {close[0]}?" if close else f"{listing} lists what there is"
    raise ValueError(f"{where} {key} is unknown; {meant}")


def preflight(description: Description, jobs: Sequence[Job]) -> None:
    """Raises ValueError, naming the table and the key, for errors that would stop a job later:
    files that are missing, and what the step's check(settings), which must be quick, finds."""
    for path in map(Path, description.head.get("input", [])):
        if not path.exists():
            raise ValueError(f"{description.origin}: input {path}: no such file or folder")
    made = {job.output.absolute() for job in jobs}
    for job in jobs:
        for field in fields(job.settings):
            value = getattr(job.settings, field.name)
            for path in value if isinstance(value, tuple) else (value,):
                if not isinstance(path, Path) or field.name == "output":
                    continue
                place = path.absolute()
                if field.name == "input" and (place in made or place.parent in made):
                    continue  # the run writes it, such as OUTPUT/split/train
                # A vocabulary may be a folder with a tokenizer.json.
                may_be_folder = field.name in ("input", "vocab_file")
                if not (path.exists() if may_be_folder else path.is_file()):
                    raise ValueError(f"{job.where} {field.name} {path}: no such file")
        check = getattr(importlib.import_module(STEPS[job.step]), "check", None)
        try:
            if check is not None:
                check(job.settings)
        except (ValueError, OSError) as error:
            raise ValueError(f"{job.where} {as_toml(error, job.settings)}") from error


def as_toml(error: Exception, settings: Any) -> str:
    """The message of a step's error, with lines of a file in place of the step's flags.  settings:
    the step's, or their class."""
    if not isinstance(error, UsageError):
        return str(error)
    program = settings if isinstance(settings, type) else type(settings)
    kinds = {name: kind for name, kind, _ in settings_of(program)}
    return error.in_toml({name: kinds[name] for name in kinds.keys() - OF_THE_COMMAND})
