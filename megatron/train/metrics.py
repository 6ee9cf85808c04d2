"""metrics.jsonl is the record of a run; the console shows the same numbers to a person."""

from __future__ import annotations

import json
import sys
from math import isfinite
from pathlib import Path
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Metrics:
    """One JSON object a line, and a progress bar; only the first rank of the mesh writes."""

    def __init__(self, path: str | Path | None, *, is_first: bool, start: int, steps: int) -> None:
        """path: appended to; None keeps no file. start: steps done before this process."""
        self.is_first = is_first
        self.path = Path(path) if is_first and path is not None else None
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        self.bar = tqdm(
            initial=start,
            total=steps,
            unit="step",
            desc="pretrain",
            disable=not is_first,
            mininterval=0.1 if sys.stderr.isatty() else 30,  # a log file is no terminal
        )

    def describe(self, facts: dict[str, Any]) -> None:
        """Write what holds for the whole run to run.json beside the metrics."""
        if self.path is not None:
            text = json.dumps(facts, indent=1) + "\n"
            self.path.with_name("run.json").write_text(text, encoding="utf-8")

    def write(self, line: dict[str, Any]) -> None:
        """Append a line; a number that is not finite becomes null, as JSON has no other word."""
        if self.path is not None:
            finite = {
                key: None if isinstance(value, float) and not isfinite(value) else value
                for key, value in line.items()
            }
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(finite, allow_nan=False) + "\n")

    def say(self, text: str) -> None:
        if self.is_first:
            self.bar.write(text)

    def advance(self) -> None:
        self.bar.update()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.close()
