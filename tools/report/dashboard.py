"""The page of a run while it trains, from a server on this machine alone."""

import errno
import os
import re
import sys
import time
from contextlib import suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Annotated

import tyro

from megatron.config.parse import parse_call, user_errors
from megatron.errors import UsageError
from megatron.train.metrics import one_line
from tools.report.curves import Against, run_names
from tools.report.numbers import duration
from tools.report.record import read_record, record_of
from tools.report.run import run_page
from tools.report.sections import Page

HOST = "127.0.0.1"
# A page of another host may have its name resolve to this machine.
OWN_HOST = re.compile(r"(127\.0\.0\.1|localhost|\[::1\])(:\d+)?")
SECONDS = 5  # until the page asks for news
REST = 10  # times the last drawing until the page is drawn again: that of a long record is slow
SCRIPT = """
const opened = () => [...document.querySelectorAll("details[open] > summary")];
const renew = async () => {
  try {
    if (document.hidden || !getSelection().isCollapsed) return;
    const answer = await fetch(location.href, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const titles = new Set(opened().map(each => each.textContent));
    for (const each of fresh.querySelectorAll("summary"))
      each.parentNode.open = titles.has(each.textContent);
    const [x, y] = [scrollX, scrollY];
    document.body.replaceWith(document.adoptNode(fresh.body));
    scrollTo({left: x, top: y, behavior: "instant"});
    document.title = fresh.title;
  } catch (error) {
    document.title = "(no answer) " + document.title.replace("(no answer) ", "");
  } finally {
    setTimeout(renew, SECONDS * 1000);
  }
};
setTimeout(renew, SECONDS * 1000);
""".replace("SECONDS", str(SECONDS))


def dashboard(
    run: Annotated[Path, tyro.conf.Positional],
    port: int = 0,
    against: Against = "steps",
) -> None:
    """Show a run in a browser on this machine while it trains: how far it is, its curves, where its
    time goes, its layout, samples and settings. Ctrl-C ends it.

    Args:
        run: folder of the run (its --save), or its file of metrics. It may not be there yet.
        port: of the address 127.0.0.1; 0 takes a free one.
        against: the x axis: steps, tokens (images) trained, or time of training.
    """
    with Dashboard(run, port, against) as server:
        waits = "" if server.file.is_file() else f" (waits for {server.file})"
        print(f"{server.name}: {server.address}{waits}", flush=True)
        server.serve_forever()


def main() -> None:
    with user_errors(os.environ), suppress(KeyboardInterrupt):
        parse_call(dashboard, sys.argv[1:], os.environ)()


class Dashboard(ThreadingHTTPServer):
    """Serves the page of one run at `address`, drawn anew when its record has changed."""

    def __init__(self, run: Path, port: int = 0, against: Against = "steps") -> None:
        """Raises UsageError for a port that cannot be had."""
        is_there = run.exists() or run.suffix == ".jsonl"
        self.file = record_of(run) if is_there else run / "metrics.jsonl"
        (self.name,) = run_names([self.file])
        self.against = against
        self._lock = Lock()  # matplotlib has one style for all threads
        self._drawn: tuple[object, Page] | None = None  # state of the file, and its page
        self._next = 0.0  # moment from which it may be drawn again
        works = ("--port", "0")
        if not 0 <= port < 2**16:
            raise UsageError("--port", port, "from 0 to 65535", works=works)
        try:
            super().__init__((HOST, port), Handler)
        except OSError as error:
            reasons = {errno.EADDRINUSE: "free: another program listens there"}
            reasons[errno.EACCES] = "1024 or above, or 0, for this user"
            if error.errno not in reasons:
                raise
            raise UsageError("--port", port, reasons[error.errno], works=works) from error

    @property
    def address(self) -> str:
        return f"http://{HOST}:{self.server_port}/"

    def content(self) -> bytes:
        """The page as it is now."""
        with self._lock:
            try:
                state = self.file.stat()
            except FileNotFoundError:
                page = self._waiting()
            else:
                page = self._page((state.st_ino, state.st_size, state.st_mtime_ns))
                seconds = max(0.0, time.time() - state.st_mtime)
                page = replace(page, lead=f"{page.lead} Last change {duration(seconds)} ago.")
            return replace(page, script=SCRIPT).html()

    def _page(self, state: object) -> Page:
        start = time.monotonic()
        if self._drawn is None or (self._drawn[0] != state and start >= self._next):
            lines = read_record(self.file)
            page = run_page(self.name, lines, self.against) if lines else self._waiting()
            self._drawn = state, page
            end = time.monotonic()
            self._next = end + REST * (end - start)
        return self._drawn[1]

    def _waiting(self) -> Page:
        return Page(self.name, f"Waits for the start of the run: {self.file} has no line yet.", [])


class Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD of the page alone."""

    server: Dashboard
    server_version, sys_version = "dashboard", ""
    timeout = 30  # seconds without a request until a connection is closed

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # the reader has closed the page
            self._answer()

    do_HEAD = do_GET  # noqa: N815, as the base class asks for it

    def _answer(self) -> None:
        if not OWN_HOST.fullmatch(self.headers.get("Host", "")):
            self.send_error(403, explain="Open the address that the dashboard printed.")
        elif self.path.partition("?")[0] != "/":
            self.send_error(404)
        else:
            try:
                content = self.server.content()
            except Exception as error:  # another program's record may hold anything
                self.send_error(500, explain=one_line(error))
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", "frame-ancestors 'none'")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Requests are not worth a line."""
