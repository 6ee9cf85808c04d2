"""The page of a run, and the server that shows it while it trains."""

import re
import signal
import subprocess
import sys
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from http.client import HTTPConnection
from pathlib import Path
from socket import create_connection
from threading import Thread
from typing import Any
from unittest.mock import Mock

import pytest

from megatron.config.parse import parse_call
from tests.programs import ROOT
from tests.refusals import refused
from tests.tools.report.pages import HOSTILE, START, ParsedPage, step, write
from tools.report.dashboard import Dashboard, Handler, dashboard
from tools.report.run import rank_rows, run_page
from tools.report.sections import Page, Table

AXES = {"pipeline": 2, "data": 3, "tensor": 4}


@contextmanager
def serving(run: Path) -> Iterator[Dashboard]:
    with Dashboard(run) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Dashboard, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    """Status and text of the answer."""
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def test_the_page_follows_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.report.dashboard.REST", 0)
    with serving(tmp_path / "run") as server:
        status, text = ask(server)
        assert status == 200
        assert "run/metrics.jsonl" in text
        write(tmp_path / "run", [START])
        assert "2026-11-29" in ask(server)[1]
        write(tmp_path / "run", [step(7, 3.125)])
        assert "<b>7</b>" in ask(server)[1]
        assert "3.125" in ask(server)[1]
        file = tmp_path / "run" / "metrics.jsonl"
        with file.open("a") as stream:
            stream.write('{"step": 9, "lo')
        assert "<b>7</b>" in ask(server)[1]
        with file.open("a") as stream:
            stream.write('ss": 2.0625}\n')
        assert "<b>9</b>" in ask(server)[1]
        file.unlink()
        assert "<b>9</b>" not in ask(server)[1]


def test_only_the_page_is_served_and_only_to_this_machine(tmp_path: Path) -> None:
    with serving(write(tmp_path, [START, step(1)])) as server:
        assert server.server_address[0] == "127.0.0.1"
        port = server.server_port
        foreign = ("", "evil.example", f"evil.example:{port}", "127.0.0.1.evil.de", "a@127.0.0.1")
        for host in (*foreign, "["):
            status, text = ask(server, Host=host)
            assert status == 403
            assert "2026" not in text
        for host in ("localhost:1", f"127.0.0.1:{port}", "[::1]:80"):
            assert ask(server, Host=host)[0] == 200
        for path in ("/metrics.jsonl", "/../metrics.jsonl", "/favicon.ico"):
            assert ask(server, path)[0] == 404
        assert ask(server, "/?again")[0] == 200
        with create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(b"HEAD / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            answer = connection.makefile("rb").read()
        assert b" 200 " in answer.partition(b"\r\n")[0]
        assert answer.endswith(b"\r\n\r\n")
        assert ask(server, method="POST")[0] >= 400


def timed(which: str, rank: int, seconds: float, host: str, **phases: float) -> dict[str, Any]:
    """Facts of a logged step about its "median" or its "slowest" rank."""
    about = {"rank": rank, "seconds": seconds, "host": host, "phases": phases}
    return {f"{which}_{key}": value for key, value in about.items()}


def hostile_lines() -> list[dict[str, Any]]:
    phases = {HOSTILE: 0.5, "p2p": 0.125}
    about = timed("median", 1, 0.5, HOSTILE, **phases)
    about |= timed("slowest", 3, 0.75, HOSTILE, **phases)
    return [
        START,
        step(10, **about),
        {"step": 10, "validation_loss": 2.0, f"validation_{HOSTILE}": 3.0},
        {"step": 10, "sample": 1, "prompt": HOSTILE, "text": HOSTILE},
        {"step": 10, "ended": HOSTILE, "exit_code": 0},
    ]


def test_texts_of_a_run_are_escaped(tmp_path: Path) -> None:
    page = ParsedPage(run_page(HOSTILE, hostile_lines()).html())
    # Title twice, end, caption and legend of phases, host, evaluation, sample twice, settings.
    assert page.text.count(HOSTILE) >= 10
    folder = write(tmp_path / HOSTILE.replace("/", ""), hostile_lines())
    with serving(folder) as server:
        text = ask(server)[1]
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = b64encode(sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="(.*?)"', text)[1]
    assert f"script-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    ParsedPage(text.replace(f"<script>{script}</script>", "").encode())


def tables_of(page: Page) -> list[Table]:
    parts = (part for section in page.sections for part in section.parts)
    return [part for part in parts if isinstance(part, Table)]


def test_a_page_says_who_is_late_and_what_each_rank_holds() -> None:
    about = timed("median", 1, 0.3, "near", forward=0.3, p2p=0.072, reduction=0.021)
    about |= timed("slowest", 3, 0.393, "node7", forward=0.393) | {"data_wait_share": 0.0325}
    memory = [int(number * 2**30) for number in (61, 58, 70, 40)]
    more = {"mfu": 0.4125, "peak_memory_bytes": memory[2], "peak_memory_bytes_by_rank": memory}
    more |= {"seconds_left": 330.0}
    page = run_page("own", [START, step(5, **about), step(10, **about, **more)])
    shown = {number.value: number.note for number in page.numbers}
    assert {"10", "400", "41.2 %", "70.0 GiB", "5.5 min"} <= shown.keys()
    assert "40" in shown["10"]
    text = ParsedPage(page.html()).text
    for part in ("Rank 3", "node7", "1.31", "72 ms", "21 ms", "2 of the last 2", "3.25 %"):
        assert part in text
    (table,) = (each for each in tables_of(page) if "tensor" in each.head)
    assert [row[:5] for row in table.rows] == [
        ("0", "0", "0", "0", "61.00 GiB"),
        ("1", "0", "0", "1", "58.00 GiB"),
        ("2", "1", "0", "0", "70.00 GiB"),
        ("3", "1", "0", "1", "40.00 GiB"),
    ]
    alone = {**START, "layout": {"data_parallel_size": 1, "tensor_parallel_size": 1}}
    equal = {**about, "slowest_rank": 1, "slowest_seconds": 0.3}
    assert "node7" not in ParsedPage(run_page("own", [alone, step(5, **equal)]).html()).text


def test_ranks_are_numbered_with_the_last_axis_fastest() -> None:
    rows = [[int(cell) for cell in row] for row in rank_rows(AXES, None)]
    assert [row[0] for row in rows] == [*range(24)]
    assert [(p * 3 + d) * 4 + t for _, p, d, t in rows] == [*range(24)]
    assert [max(column) for column in zip(*rows, strict=True)] == [23, 1, 2, 3]


def test_an_end_is_shown_until_the_run_goes_on() -> None:
    ended = [START, step(1, seconds_left=60.0), {"step": 1, "ended": "SIGTERM", "exit_code": 75}]
    page = run_page("own", ended)
    assert "SIGTERM" in page.lead
    assert "75" in page.lead
    assert "60 s" not in [number.value for number in page.numbers]
    page = run_page("own", [*ended, {**START, "step": 1}, step(2, seconds_left=60.0)])
    assert "SIGTERM" not in page.lead
    assert "60 s" in [number.value for number in page.numbers]


def test_a_record_of_another_program_is_shown_as_far_as_it_goes() -> None:
    for lines in ([{"step": 1, "loss": 2.0}], [{"step": 3, "validation_loss": None}]):
        assert ParsedPage(run_page("own", lines).html())
    unknown = {**START, "config": {"parallel": {"removed_setting": 1}, "model": {}}}
    assert ParsedPage(run_page("own", [unknown, step(1)]).html())


def test_ports_that_cannot_be_had(tmp_path: Path) -> None:
    with Dashboard(tmp_path) as server:
        for port in (server.server_port, -1, 70_000):
            words = [str(tmp_path), "--port", str(port)]
            call = lambda given: parse_call(dashboard, given, {})()  # noqa: E731
            assert refused(call, words, retry=lambda given: None) == "--port"


def test_ctrl_c_ends_it_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.dashboard", str(tmp_path)]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()
        assert re.search(r"http://127\.0\.0\.1:\d+/", line)
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_a_page_has_the_profile_and_the_memory_that_the_record_had_last() -> None:
    ranks = [{"matmul": 0.3, "host": 0.1}, {"matmul": 0.1, "idle in the pipeline": 0.3}]
    old, new = ({"peak_memory_bytes_by_rank": [number * 2**30] * 4} for number in (1, 2))
    profile = {"step": 6, "profile": ranks}
    page = run_page("own", [START, step(2, **old), step(4, **new), profile, step(6)])
    found, layout, *_ = (table.rows for table in tables_of(page))
    assert [(name, mean, cell.share, *each) for name, mean, cell, *each in found] == [
        ("matmul", "200.0", pytest.approx(0.5), "300.0", "100.0"),
        ("idle in the pipeline", "150.0", pytest.approx(0.375), "0.0", "300.0"),
        ("host", "50.0", pytest.approx(0.125), "100.0", "0.0"),
    ]
    assert {row[4] for row in layout} == {"2.00 GiB"}


def test_only_the_newest_layout_counts() -> None:
    about = timed("median", 0, 0.3, "h", p2p=0.0004) | timed("slowest", 1, 0.6, "h")
    old = [step(number, peak_memory_bytes_by_rank=[2**40] * 4, **about) for number in (2, 4)]
    text = ParsedPage(run_page("own", [START, *old]).html()).text
    assert "2 of the last 2" in text
    assert "1024.00 GiB" in text
    assert "0 ms in p2p" not in text
    again = {**START, "step": 4}
    text = ParsedPage(run_page("own", [START, *old, again, step(6, **about)]).html()).text
    assert "of the last" not in text
    assert "1024.00 GiB" not in text


def test_a_record_of_fine_tuning() -> None:
    epoch = {"step": 5, "seed": 1, "epoch": 1, "train_loss": 1.25, "accuracy": 0.875}
    page = run_page("own", [{"step": 2, "loss": 1.5}, epoch])
    assert "tarted" not in page.lead
    text = ParsedPage(page.html()).text
    for part in ("train loss", "1.2500", "0.87500"):
        assert part in text


def test_a_figure_that_an_evaluation_lacks_is_no_fault() -> None:
    older = {"step": 1, "validation_loss": 2.0}
    text = ParsedPage(run_page("own", [older, {**older, "validation_new": 3.0}]).html()).text
    assert "not finite" not in text


def test_a_layout_without_a_picture_says_why() -> None:
    sizes = {"data_parallel_size": 1, "tensor_parallel_size": 1024}
    parallel = {"tensor_model_parallel_size": 1024}
    config = {"parallel": parallel, "model": {"num_layers": 2}}
    page = run_page("own", [{**START, "layout": sizes, "config": config}, step(1)])
    assert "at most 512 ranks" in ParsedPage(page.html()).text


def test_any_line_has_an_answer(tmp_path: Path) -> None:
    no_steps = {**START, "config": {"training": {"train_iters": 0}}}
    folder = write(tmp_path / "odd", [{"loss": 1.0}, no_steps, step(1)])
    with serving(folder) as server:
        assert ask(server)[0] == 200
    folder = write(tmp_path / "wrong", [step(1, "a text")])
    with serving(folder) as server:
        assert ask(server)[0] == 500


def test_a_reader_that_leaves_is_no_error(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    with serving(tmp_path) as server:
        monkeypatch.setattr(Handler, "end_headers", Mock(side_effect=BrokenPipeError))
        with create_connection(("127.0.0.1", server.server_port)) as connection:
            connection.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            connection.makefile("rb").read()
    assert capfd.readouterr().err == ""


def test_a_slow_page_is_not_drawn_at_every_line(tmp_path: Path, monkeypatch: Any) -> None:
    now = [0.0]
    monkeypatch.setattr("tools.report.dashboard.time.monotonic", lambda: now[0])

    def slow(name: str, lines: Any, against: str) -> Page:
        now[0] += 5
        return Page(name, f"at {lines[-1]['step']}", [])

    monkeypatch.setattr("tools.report.dashboard.run_page", slow)
    with Dashboard(write(tmp_path, [step(1)])) as server:
        assert b"at 1" in server.content()
        write(tmp_path, [step(2)])
        now[0] += 49
        assert b"at 1" in server.content()
        now[0] += 2
        assert b"at 2" in server.content()
