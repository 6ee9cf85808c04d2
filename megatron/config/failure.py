"""What torchrun is told of a process that failed."""

import json
import sys
import time
from pathlib import Path


def write_error_file(path: str | None, headline: str, text: str) -> None:
    """Tell torchrun, in its own form, what its summary should name as the root cause.

    path: TORCHELASTIC_ERROR_FILE, which torchrun sets; None without it.
    """
    if path is None:
        return
    extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
    content = json.dumps({"message": {"message": headline, "extraInfo": extra}})
    try:
        Path(path).write_text(content)
    except OSError as error:
        print(f"torchrun will not name the cause: {error}", file=sys.stderr)
