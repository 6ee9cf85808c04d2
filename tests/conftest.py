"""Fixtures of all tests, and the count of those that read real data."""

import gc
import os
import resource
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.dist import Pool

VARIABLE = "MEGATRON_TEST_DATA"
LONGEST = 60  # seconds that a test may take


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("layouts")
    group.addoption(
        "--device", default="cpu", help="where tests/layouts and tests/gpu compute: cpu or cuda"
    )
    group.addoption("--full-matrix", action="store_true", help="every case of tests/layouts")
    group.addoption("--part", default="1/1", help="I/N: the Ith of N parts of tests/layouts")
    parser.addoption("--slowest", action="store_true", help="print what takes longest")


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The folder of real files; a test that asks for it is marked real_data."""
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} is not set to a folder of real data")
    return Path(os.environ[VARIABLE])


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of 1 MiB, or of the size in the fixture's parameter; where none may be mounted
    a limit of 100 kB on every file."""
    place, size = tmp_path / "disk", getattr(request, "param", "1m")
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
    if shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0:
        yield place
        subprocess.run(["umount", str(place)], check=True)
        return
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    yield place
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


@pytest.fixture
def datasets_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Where `datasets` copies to, here and in programs; these do not wait for the hub either."""
    import datasets

    place = tmp_path_factory.mktemp("datasets_cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", place)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(place))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return place


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> Any:
    """That of --device, a torch.device."""
    import torch

    return torch.device(request.config.getoption("--device"))


@pytest.fixture(scope="session")
def gloo() -> Iterator[Pool]:
    pool = Pool(8)
    yield pool
    pool.close()


class RealData:
    """Counts the real-data tests; a skipped one fails the session where the data is there."""

    def __init__(self) -> None:
        self.ran = 0
        self.skipped = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "real_data" in report.keywords:
            self.skipped += report.skipped
            self.ran += report.when == "call" and not report.skipped

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.skipped and VARIABLE in os.environ and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        place = os.environ.get(VARIABLE, "not set")
        line = f"real-data tests: {self.ran} ran, {self.skipped} skipped ({VARIABLE}: {place})"
        terminalreporter.write_line(line)
        if self.skipped and VARIABLE in os.environ:
            terminalreporter.write_line(f"error: {VARIABLE} is set, so none may be skipped")


class SlowestFiles:
    """Seconds of each test, set-up included; the files that take longest, and tests that take too
    long, are printed at the end."""

    def __init__(self) -> None:
        self.seconds, self.tests = Counter[str](), Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        self.tests[report.nodeid.partition("::")[0]] += report.when == "call"

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        seconds = Counter[str]()
        for test, each in self.seconds.items():
            seconds[test.partition("::")[0]] += each
        total = seconds.total()
        terminalreporter.section("slowest files")
        for file, each in seconds.most_common(40):
            share = f"{each / total:6.1%}"
            terminalreporter.write_line(f"{each:7.0f} s {share} {self.tests[file]:5d} {file}")
        terminalreporter.write_line(f"{total:7.0f} s of {self.tests.total()} tests")
        terminalreporter.section(f"tests of more than {LONGEST} s")
        for test, each in self.seconds.most_common():
            if each > LONGEST:
                terminalreporter.write_line(f"{each:7.0f} s {test}")


def pytest_configure(config: pytest.Config) -> None:
    folder = os.environ.get(VARIABLE)
    if folder is not None and not Path(folder).is_dir():
        raise pytest.UsageError(f"{VARIABLE}={folder} is not a folder; unset it to skip real data")
    if config.getoption("--device") == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--device cuda: there is no GPU here; --device cpu works")
    config.pluginmanager.register(RealData())
    if config.getoption("--slowest"):
        config.pluginmanager.register(SlowestFiles())
    # A shell starts what runs in the background with SIGINT ignored, and so would be every program
    # that a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    gc.freeze()  # the modules of all tests, which each collection would look through


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "test_data" in getattr(item, "fixturenames", ()):
            item.add_marker("real_data")
    # Files go to the workers, whole and in this order: the longest must not come last.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
