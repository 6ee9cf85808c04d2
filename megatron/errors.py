"""The errors that a program reports in one message, and the spelling of settings in them: as flags
of a command line, or as lines of a TOML file. A leaf: it imports nothing of megatron."""

import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args


class UsageError(ValueError):
    """A setting's value that cannot be used.

        UsageError("--seq-length", 2048, "at most {} 1024", "--max-position-embeddings",
                   works=("--seq-length", "1024"))

    reads `--seq-length 2048: must be at most --max-position-embeddings 1024; --seq-length 1024
    works`, and `in_toml` reads `seq_length = 2048: must be at most max_position_embeddings 1024;
    seq_length = 1024 works`.

    others: flags of other settings, in place of each {} in `allowed`. works: arguments that are
    accepted in place of the flag and its value, or only another value of the flag; the tests of
    refusals run them.
    """

    def __init__(
        self, flag: str, value: object, allowed: str, *others: str, works: object = ()
    ) -> None:
        super().__init__(flag, value, allowed, *others)  # a copy for another rank is made from them
        self.flag, self.value, self.others = flag, value, others
        self.allowed = allowed.format(*others) if others else allowed
        self.works: tuple[str, ...] = works if isinstance(works, tuple) else (flag, str(works))

    def __str__(self) -> str:
        given = self.flag if self.value is None else f"{self.flag} {self.value}"
        return _message(given, self.allowed, shlex.join(self.works))

    def about(
        self, flag: str, value: object, *, before: str = "", after: str = "", works: object = ()
    ) -> "UsageError":
        """The same of another flag or value, with text before and after `allowed`."""
        allowed = f"{before}{self.args[2]}{after}"
        return UsageError(flag, value, allowed, *self.others, works=works)

    def in_toml(self, kinds: Mapping[str, Any], given: str | None = None) -> str:
        """The message for a setting in a TOML file. kinds: types of the settings that may stand
        beside it; a cure with another one stays flags. given: the setting as it stands there."""
        words = (self.flag,) if self.value is None else (self.flag, self.value)
        given = given or line_of(words, kinds) or " ".join(map(str, words))
        allowed = self.allowed
        if self.others:
            lines = [line_of([each], kinds, is_named=True) or each for each in self.others]
            allowed = self.args[2].format(*lines)
        cures = [line_of(words, kinds) for words in by_flag(self.works)]
        cure = shlex.join(self.works) if None in cures else " and ".join(map(str, cures))
        return _message(given, allowed, cure)


class CommandLineError(ValueError):
    """The command line does not fit the flags of a program; the message is tyro's."""


class OutOfMemoryError(RuntimeError):
    """An allocation of a rank failed; the message says what helps (megatron/train/machine.py)."""


def _message(given: str, allowed: str, cure: str) -> str:
    return f"{given}: must be {allowed}" + (f"; {cure} works" if cure else "")


def flag(field: str) -> str:
    """The command line's spelling of a field: --seq-length for seq_length."""
    return "--" + field.replace("_", "-")


def field_of(flag: str) -> str:
    """The field that a flag spells; another name, such as that of a file, is returned unchanged."""
    return flag[2:].replace("-", "_") if flag.startswith("--") else flag


def switch(field: str, on: bool) -> str:
    """The command line's spelling of a field that is true or false: --bf16, --no-bf16."""
    return flag(field if on else f"no_{field}")


def spellings(field: str) -> set[str]:
    """The flags of a field, on and off."""
    return {flag(field), switch(field, False)}


def spelling(field: str, value: Any) -> tuple[str, ...]:
    """A field and its value as arguments: ("--seed", "1"), ("--no-bf16",), ("--data-path", "a")."""
    if isinstance(value, bool):
        return (switch(field, value),)
    return (flag(field), *map(str, value if isinstance(value, list | tuple) else [value]))


def by_flag(words: Iterable[str]) -> list[list[str]]:
    """Arguments as a list for each flag, with its values."""
    found: list[list[str]] = []
    for word in words:
        if word.startswith("--") or not found:
            found.append([])
        found[-1].append(word)
    return found


def setting(field: str, value: Any) -> str:
    """The spelling of a field and its value in a TOML file: append_eod = false."""
    is_number = isinstance(value, float)  # which TOML spells as Python does: nan, inf
    text = str(value) if is_number else json.dumps(value, default=str, ensure_ascii=False)
    return f"{field} = {text}"


def line_of(
    words: Sequence[Any], kinds: Mapping[str, Any], *, is_named: bool = False
) -> str | None:
    """A flag and its values as a line of a TOML file: append_eod = false for --no-append-eod; None
    if the file cannot hold it. kinds: types of the file's settings. is_named: a flag without a
    value stands for its setting, and not for the value true."""
    field, values = field_of(words[0]), words[1:]
    turned_off = field.removeprefix("no_")
    if field not in kinds:
        return setting(turned_off, False) if turned_off in kinds and not values else None
    parts = types_within(kinds[field])
    if not values:
        return setting(field, True) if bool in parts and not is_named else field
    if not parts.isdisjoint((int, float)):
        values = [*map(_number, values)]
    return setting(field, values if len(values) > 1 else values[0])


def types_within(kind: Any) -> set[Any]:
    """A type, and the types within it: int and None for int | None."""
    return {kind}.union(*map(types_within, get_args(kind)))


def _number(value: Any) -> Any:
    """The number that an argument spells; the argument if it spells none."""
    try:
        number = json.loads(value)
    except (TypeError, ValueError):
        return value
    return number if type(number) in (int, float) else value
