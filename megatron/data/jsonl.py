"""Documents as JSON lines: an object a line, its text under a key."""

import json


def parse_document(line: str | bytes, key: str) -> str:
    """The text of a line; ValueError with the reason, for a list of rejects, where it has none."""
    if not line.strip():
        raise ValueError("blank line")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError("not JSON") from error
    text = record.get(key) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"no string under the key {key}")
    if not text:
        raise ValueError("empty text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("half of a surrogate pair in the text") from error
    return text
