"""Checks of every page: it is well-formed, runs nothing and loads nothing. The texts of a
figure. Records of runs."""

import json
import re
from collections.abc import Iterable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

HOSTILE = "<script>alert(1)</script>\"'&amp;<img src=x onerror=y> $x$ |"
VOID = ("meta", "br")


def texts_of(file: Path) -> list[str]:
    """Those of an SVG file; coordinates differ between releases of matplotlib."""
    found = re.findall(r"<text[^>]*>([^<]+)</text>", file.read_text())
    assert len(found) > 10
    return found


class ParsedPage(HTMLParser):
    """Tags and text; every element is closed where it should be, and nothing is run or linked."""

    def __init__(self, content: bytes) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self._open: list[str] = []
        self.feed(content.decode())
        assert not self._open
        assert not self.tags & {"script", "link", "img", "iframe", "object", "base", "form"}
        assert b"default-src 'none'" in content
        assert not any(word in content for word in (b"@import", b"http://", b"https://"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            assert name not in ("src", "href", "action")
            assert not name.startswith("on")
            # A figure refers to its own shapes alone.
            assert name != "xlink:href" or value.startswith("#")
            assert "url(" not in (value or "") or "url(#" in value
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


# Records of runs, written by hand

START = {
    "step": 0,
    "started": "2026-11-29T10:20:04+00:00",
    "layout": {"pipeline_parallel_size": 2, "data_parallel_size": 1, "tensor_parallel_size": 2},
    "command": f"pretrain_gpt2.py {HOSTILE}",
    "config": {
        "model": {"num_layers": 2},
        "parallel": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        "training": {"train_iters": 40, "seed": 1234},
        "data": {"data_path": [HOSTILE], "vocab_file": HOSTILE},
    },
}


def step(number: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    """A logged step: a quarter of a second, 400 tokens a second."""
    about = {"lr": 0.1, "grad_norm": 1.0, "tokens_per_second": 400.0, "step_seconds": 0.25}
    return {"step": number, "samples": 4 * number, "loss": loss, **about, **more}


def write(folder: Path, lines: Iterable[Mapping[str, Any]]) -> Path:
    """The folder, with these lines added to its record."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return folder
