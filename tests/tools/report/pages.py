"""Checks of every page: it is well-formed, runs nothing and loads nothing. The texts of a
figure."""

import re
from html.parser import HTMLParser
from pathlib import Path

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
