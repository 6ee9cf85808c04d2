"""The language of a text, by CLD2."""

import re
from functools import cache

from megatron.libraries import Library

pycld2 = Library("pycld2", "--language any")

UNKNOWN = "un"  # CLD2's code for an unknown language
SAMPLE = 4000  # characters that are examined, half at the start, half from the middle on

# Code points that CLD2 refuses to read: control characters and those that are no characters.
REFUSED = re.compile(
    "[\x00-\x08\x0b\x0e-\x1f\x7f-\x9f\ufdd0-\ufdef"
    + "".join(chr(plane << 16 | low) for plane in range(17) for low in (0xFFFE, 0xFFFF))
    + "]"
)


@cache
def names() -> dict[str, str]:
    """{code: name} of the languages that CLD2 knows."""
    return {code: name for name, code in pycld2.LANGUAGES}


def identify(text: str) -> str:
    """Code of the likeliest language of the text, such as en; un if there is none."""
    if len(text) > SAMPLE:
        half, middle = SAMPLE // 2, len(text) // 2
        text = f"{text[:half]}\n{text[middle : middle + half]}"
    try:
        return _detect(text)
    except pycld2.error:
        return _detect(REFUSED.sub("", text))


def _detect(text: str) -> str:
    languages = pycld2.detect(text, isPlainText=True)[2]
    return str(languages[0][1])
