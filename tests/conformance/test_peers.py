"""The program that makes environments of other trainers and runs their rows."""

import ast
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from conformance import peers
from conformance.run import options_of

RESULT: dict[str, Any] = {
    "status": 0,
    "reason": "",
    "fault": None,
    "largest": {name: {"size": 2e-16} for name in peers.FIGURES},
    "division": [{name: {"times": 1.0} for name in peers.SHARES}],
    "versions": {"torch": "2.13.0"},
}


@pytest.mark.parametrize("row", peers.ROWS, ids=lambda row: row.name)
def test_every_row_can_be_run(row: peers.Row) -> None:
    """Its arguments are right, and its adapter is there; the library may not be."""
    options = options_of(row.arguments)
    module, _, name = options.adapter.partition(":")
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    assert name in {each.name for each in tree.body if isinstance(each, ast.ClassDef)}
    assert row.peer in peers.PEERS
    assert len({each.name for each in peers.ROWS}) == len(peers.ROWS)


def test_an_environment_that_cannot_be_made_is_the_reason_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    environment = tmp_path / "peer"
    lack = peers.make(environment, ["no-such-distribution==1"], tmp_path)
    assert "no-such-distribution" in lack
    (own,) = environment.glob("lib/python*/site-packages")
    assert (own / "torch.pth").read_text() == f"{tmp_path}\n"
    row = peers.ROWS[0]
    file = tmp_path / f"{row.name}.json"
    peers.run(row, environment / "bin" / "python", file, 300, lack)
    said = peers.table(tmp_path).splitlines()
    assert lack in said[0]
    assert said[0].count("|") == 10
    assert said[-1].split()[2:] == ["conformance.run", *row.arguments]


def test_a_row_without_a_record_keeps_what_was_said(tmp_path: Path) -> None:
    row = peers.ROWS[0]._replace(layout="tensor=0")
    file = tmp_path / "row.json"
    peers.run(row, Path("python"), file, 300, "")
    assert "tensor has no ranks" in json.loads(file.read_text())["models"]["bert"]["reason"]


def test_models_of_one_verdict_share_a_line() -> None:
    fault = {"fault": "tie_lost", "distance": 0.021}
    differs = {**RESULT, "status": 1, "fault": fault}
    ignored = {**RESULT, "status": 3, "reason": "all is ignored"}
    failed = {"status": 2, "reason": "the trainer fails: E\nTraceback", "versions": {}}
    row = peers.ROWS[0]
    record = {"models": {"gpt2": RESULT, "llama": RESULT, "bert": differs}}
    one, other = peers.lines(row, record)
    assert "| gpt2, llama | 2e-16 | 2e-16 | 2e-16 | 2e-16 | 1.00 / 1.00 / 1.00 | agrees |" in one
    assert "tie_lost at distance 0.02" in other
    worse = {**RESULT, "largest": {name: {"size": 3e-10} for name in peers.FIGURES}}
    (line,) = peers.lines(row, {"models": {"gpt2": RESULT, "llama": worse, "bert": RESULT}})
    assert "| all | 3e-10 | 3e-10 |" in line
    record = {"models": {"gpt2": ignored, "llama": failed}}
    one, other = peers.lines(row._replace(models="gpt2 llama"), record)
    assert "no content: all is ignored" in one
    assert other.endswith("| llama | | | | | | the trainer fails: E |")
