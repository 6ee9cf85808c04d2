"""Ctrl-C ends a program with one word and the status that shells expect, without a traceback."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping

INTERRUPTED = 130  # what shells say of Ctrl-C


@contextlib.contextmanager
def interruptible(environ: Mapping[str, str]) -> Iterator[None]:
    """Around the whole of a program: Ctrl-C prints "interrupted" and ends it with status 130.

    Of several processes rank 0 (RANK in environ) says it; once they run under launch.launch, that
    ends them itself, in its own words and with the same status.
    """
    try:
        yield
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # once is enough, and ending takes a moment
        if environ.get("RANK", "0") == "0":
            above = "\n" if sys.stderr.isatty() else ""  # the terminal shows ^C in its line
            print(f"{above}interrupted", file=sys.stderr, flush=True)
        raise SystemExit(INTERRUPTED) from None
