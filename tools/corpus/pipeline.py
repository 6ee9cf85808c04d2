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
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, get_origin

from megatron.errors import UsageError, setting
from tools.corpus.settings import parse_settings

STEPS = {
    "extract": "tools.corpus.extract",
    "clean": "tools.corpus.clean",
    "decontaminate": "tools.corpus.decontaminate",
    "dedup": "tools.corpus.dedup",
    "split": "tools.corpus.split",
    "tokenise": "tools.preprocess_data",
    "report": "tools.corpus.report",
}
COMMON = ("workers", "scheduler", "memory", "compress", "unit")
"""Keys before the first table, given to the steps that have them."""
OF_THE_COMMAND = {"shard", "overwrite"}
NOT_OF_THE_FILE = {"output", *OF_THE_COMMAND}
USUAL = ("clean", "dedup", "split")
"""Steps of a run without a file."""
SWITCHES = (bool, bool | None)
"""Types of keys whose flags take no value."""
FLAG = re.compile(r"--[a-z]+(?:-[a-z]+)*")

Table = Mapping[str, Any]


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
            made = self._of_step(step, inputs, output, jobs, flags)
            if step == "extract":
                inputs += [job.output for job in made]
            elif step == "split":
                inputs = [output / step / side for side in ("train", "valid")]
            elif step not in ("tokenise", "report"):
                inputs = [job.output for job in made]
            jobs += made
        return jobs

    def _of_step(
        self, step: str, inputs: list[Path], output: Path, before: Sequence[Job], flags: Table
    ) -> list[Job]:
        table, folder = self.tables[step], output / step
        if step == "extract":
            return [
                self._job(f"{step}.{name}", each, None, folder / name, flags)
                for name, each in table.items()
            ]
        if step == "report":
            folders = [job.output for job in before]
            return [self._job(step, table, folders, output / "report.html", flags)]
        if step == "tokenise" and "split" in self.tables:
            return [
                self._job(f"{step}.{side.name}", table, [side], folder / side.name, flags)
                for side in inputs
            ]
        return [self._job(step, table, inputs, folder, flags)]

    def _job(
        self, name: str, table: Table, inputs: list[Path] | None, output: Path, flags: Table
    ) -> Job:
        """inputs: None where the table names them."""
        step = name.partition(".")[0]
        where = f"{self.origin}: [{name if inputs is None else step}]"
        kind = importlib.import_module(STEPS[step]).Settings
        known = {field.name for field in fields(kind)}
        check_table(table, kind, step, where, reads_raw=inputs is None)
        common = {key: value for key, value in self.head.items() if key in known & set(COMMON)}
        last = {key: value for key, value in flags.items() if key in known}
        given = {"output": output} if inputs is None else {"input": inputs, "output": output}
        settings = parse(step, arguments({**given, **common, **table, **last}), where)
        return Job(name=name, step=step, settings=settings, output=output, where=where)


def check_table(table: Table, kind: type[Any], step: str, where: str, *, reads_raw: bool) -> None:
    """Raises ValueError for a key that is unknown to the step, set by `run`, or missing."""
    known = {field.name: field for field in fields(kind)}
    own = NOT_OF_THE_FILE if reads_raw else NOT_OF_THE_FILE | {"input"}
    for key, value in table.items():
        if key in own:
            raise ValueError(f"{where} {key}: `run` sets it; take it out")
        check_key(where, key, set(known), f"python -m {STEPS[step]} --help")
        if isinstance(value, Mapping):
            raise ValueError(f"{where} {key}: a table in a table is no flag")
        if known[key].type in SWITCHES and not isinstance(value, bool):
            raise ValueError(f"{where} {key}: true or false would work, without quotes")
    if reads_raw and not table.get("input"):
        raise ValueError(f'{where} needs input = ["FILE OR FOLDER"]')
    for key, field in known.items():
        if field.default is MISSING and key not in {"input", "output", *table}:
            raise ValueError(f"{where} needs {key}; python -m {STEPS[step]} --help says what it is")


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
    return describe(str(file), head, tables)


def describe_usual(inputs: Sequence[Path], output: Path) -> Description:
    """Description of the usual steps, with their defaults."""
    head = {"input": list(map(str, inputs)), "output": str(output)}
    return describe("the command", head, {step: {} for step in USUAL})


def check_given(config: Path | None, inputs: Sequence[Path], output: Path | None) -> None:
    """Raises ValueError if a command gives neither a file nor --input and --output, or both."""
    given = bool(inputs), output is not None
    if given != ((False, False) if config else (True, True)):
        raise UsageError(
            "--input", None, "given with --output, or both left out where a TOML file is given"
        )


def describe_given(config: Path | None, inputs: Sequence[Path], output: Path | None) -> Description:
    """Description from a command's arguments, which check_given has checked."""
    if config is not None:
        return read_description(config)
    assert output is not None
    return describe_usual(inputs, output)


def describe(origin: str, head: Table, tables: Mapping[str, Table]) -> Description:
    known = ("output", "input", *COMMON)
    for key in head:
        check_key(f"{origin}: before the first table:", key, known, ", ".join(known))
    for name in tables:
        check_key(f"{origin}: the tables:", name, set(STEPS), "python -m tools.corpus")
    if "output" not in head:
        raise ValueError(f'{origin}: before the first table it needs output = "FOLDER"')
    if not isinstance(head.get("input", []), list):
        raise ValueError(f'{origin}: input: a list such as ["raw.jsonl"] would work')
    extracts = tables.get("extract", {})
    for name, table in extracts.items():
        if not isinstance(table, Mapping):
            raise ValueError(
                f"{origin}: [extract] {name}: a table for each source, such as "
                "[extract.wikipedia], would work"
            )
    if not head.get("input") and not extracts:
        raise ValueError(
            f'{origin}: nothing to read; input = ["raw.jsonl"] before the first table, or a '
            "table [extract.NAME], would work"
        )
    if not tables:
        raise ValueError(f"{origin}: no step; a table such as [dedup] would be one")
    return Description(origin=origin, head=head, tables=tables)


def check_key(where: str, key: str, known: Collection[str], listing: str) -> None:
    if key in known:
        return
    close = difflib.get_close_matches(key, known, 1)
    meant = f"did you mean {close[0]}?" if close else f"{listing} lists what there is"
    raise ValueError(f"{where} {key} is unknown; {meant}")


def arguments(table: Table) -> list[str]:
    """As typed in a command: workers = 2 becomes --workers 2, overwrite = false --no-overwrite."""
    words: list[str] = []
    for key, value in table.items():
        name = key.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words += [f"--{name}", str(value)]
    return words


def parse(step: str, argv: Sequence[str], where: str) -> Any:
    """Settings from flags, by the step's own parser.  Raises ValueError with its reason."""
    try:
        return parse_settings(STEPS[step], argv)
    except ValueError as error:
        kind = importlib.import_module(STEPS[step]).Settings
        raise ValueError(f"{where} {as_keys(error, kind)}") from None


def as_keys(error: Exception, settings: Any) -> str:
    """The message of a step's error, with lines of a file instead of flags: append_eod = false
    instead of --no-append-eod.  settings: the step's, or their class."""
    known = {each.name: each for each in fields(settings) if each.name not in OF_THE_COMMAND}

    def line(flag: str, *values: str) -> str:
        """The line for a flag; a flag that is no key stays unchanged."""
        key = flag.removeprefix("--").replace("-", "_")
        key, is_on = (key, True) if key in known else (key.removeprefix("no_"), False)
        if key not in known:
            return " ".join([flag, *values])
        if known[key].type in SWITCHES:
            return setting(key, is_on)
        if get_origin(known[key].type) is tuple and values:
            return setting(key, [*map(as_value, values)])
        return setting(key, as_value(" ".join(values))) if values else key

    def in_prose(text: str) -> str:
        return FLAG.sub(lambda flag: line(flag[0]), text)

    if not isinstance(error, UsageError):
        # The first line of tyro's text has the reason; the others are about a command line.
        return in_prose(str(error).splitlines()[0])
    given = [] if error.value is None else [str(error.value)]
    cures: list[list[str]] = []
    for word in error.works:
        if word.startswith("--"):
            cures.append([])
        cures[-1].append(word)
    cure = f"; {', '.join(line(*words) for words in cures)} works" if cures else ""
    return f"{line(error.flag, *given)}: must be {in_prose(error.allowed)}{cure}"


def as_value(text: str) -> Any:
    """A number stays a number in a file; anything else is text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
