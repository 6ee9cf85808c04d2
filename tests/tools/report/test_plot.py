"""tools.plot: losses of several runs in one picture."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse_call
from tests.refusals import refused
from tools.report.plot import plot


def write_losses(folder: Path, terms: tuple[str, ...]) -> None:
    lines: list[dict[str, Any]] = [{"step": 0, "device": "cpu"}]
    lines += [{"step": k, **dict.fromkeys(terms, 9 / k)} for k in (1, 2, 3)]
    lines += [{"step": 3, **{f"validation_{term}": 3.5 for term in terms}}]
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_runs_of_ones_own_are_drawn_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_losses(Path("gpt2"), ("loss",))
    write_losses(Path("bert"), ("loss", "mlm_loss"))
    write_losses(Path("other/bert"), ("loss",))
    plot((Path("gpt2"), Path("bert/metrics.jsonl"), Path("other/bert")), Path("new/losses.svg"))
    labels = re.findall(r">([\w/]+, \w+)</text>", Path("new/losses.svg").read_text())
    names, kinds = ("gpt2", "bert", "other/bert"), ("training", "validation")
    assert labels == [f"{name}, {kind}" for name in names for kind in kinds]
    for words in ("gpt2 --output loss.png --term mlm_loss", "bert --output a.png --term step"):
        assert refused(lambda given: parse_call(plot, given, {})(), words) == "--term"
    assert refused(lambda given: parse_call(plot, given, {})(), "gpt2 --output a.gif") == "--output"
