"""Numbers as a reader wants them: the one formatter of sizes, durations, shares and columns."""

from collections.abc import Sequence

NONE = "\N{EN DASH}"  # stands for a number that does not exist
SIZES = ("kB", "MB", "GB", "TB", "PB")


def size(number: float) -> str:
    """Bytes with one decimal, in powers of a thousand: 999 B, 1.0 MB, 1.2 PB."""
    if number < 999.5:
        return f"{number:,.0f} B"
    for unit in SIZES:
        number /= 1000
        if number < 999.95 or unit == SIZES[-1]:
            break
    return f"{number:,.1f} {unit}"


def duration(seconds: float) -> str:
    """8.3 s, 42 s, 7.6 min, 3.5 h: below two of a unit the smaller one is used."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    if seconds < 119.5:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:,.1f} h"


def decimal(number: float, places: int = 2) -> str:
    return f"{number:,.{places}f}"


def whole(number: float) -> str:
    return f"{number:,.0f}"


def percent(share: float | None, places: int = 1) -> str:
    """The share in percent; NONE for a share of nothing, which is None.

    A share over 0 is not shown as 0 %, and one under 1 not as 100 %.
    """
    if share is None:
        return NONE
    least = 10**-places
    if 0 < share < 0.005 * least:
        return f"< {least:.{places}f} %"
    if 1 - 0.005 * least <= share < 1:
        return f"> {100 - least:.{places}f} %"
    return f"{100 * share:.{places}f} %"


def aligned(rows: Sequence[Sequence[str]], *, right: bool = False) -> str:
    """The rows as lines of text, with columns two blanks apart. right: all columns but the first
    are of numbers, which end below each other."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    widths = [f"<{first}", *(f"{'>' if right else '<'}{width}" for width in others)]
    lines = ("  ".join(map(format, row, widths)) for row in rows)
    return "\n".join(map(str.rstrip, lines))
