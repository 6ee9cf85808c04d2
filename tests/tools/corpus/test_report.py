"""The page of tools.corpus.report: its facts, and that texts stay texts on it."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

from tests.refusals import field_of, refusal
from tests.tools.corpus.lines import dropped, manifest, read_jsonl, write_jsonl
from tests.tools.corpus.test_run import STEPS, description
from tests.tools.report.pages import HOSTILE, ParsedPage
from tools.corpus.files import Count, DocumentCounts
from tools.corpus.report import Settings, read_steps, run, verify
from tools.corpus.settings import program
from tools.report.corpus import Loss, accounting, accounting_of, find, follow, step_facts
from tools.report.numbers import NONE

STAGE = {"stage": "shards", "tasks": 2, "seconds": 4.0, "cpu_seconds": 8.0, "peak_bytes": 5 * 10**7}
Sources = dict[str, tuple[int, int]]
Losses = dict[str, Sources] | None


def counts(sources: Sources) -> dict[str, Count]:
    return {name: Count(documents, size) for name, (documents, size) in sources.items()}


def write_step(
    folder: Path, step: str, into: Sources, out: Sources, dropped: Losses = None, **more: Any
) -> Path:
    """An output folder with one shard, its manifest and its run.json."""
    folder.mkdir(parents=True)
    shard = f"what {folder.name} wrote".encode()
    (folder / "part-00000.jsonl").write_bytes(shard)
    accounting = DocumentCounts(
        counts(into), counts(out), {k: counts(v) for k, v in (dropped or {}).items()}
    )
    sha256 = hashlib.sha256(shard).hexdigest()
    shards = [{"name": "part-00000.jsonl", "bytes": len(shard), "sha256": sha256}]
    content = {"step": step, "settings": {"unit": "32MB"}, "inputs": [], "shards": shards}
    content |= {**accounting.to_json(), **more}
    (folder / "manifest.json").write_text(json.dumps(content))
    (folder / "run.json").write_text(json.dumps({"stages": [STAGE], "settings": {"workers": 2}}))
    return folder


def write_pipeline(root: Path) -> Path:
    raw: Sources = {"news": (900, 9_000_000), "wiki": (100, 3_000_000)}
    left: Sources = {"news": (600, 6_000_000), "wiki": (99, 2_900_000)}
    kept: Sources = {"news": (300, 3_000_000), "wiki": (99, 2_900_000)}
    for source in raw:
        one = {source: raw[source]}
        write_step(root / "extract" / source, "extract", one, one)
    losses: dict[str, Sources] = {
        "under 128 tokens": {"news": (300, 3_000_000)},
        "another language": {"wiki": (1, 60_000)},
    }
    write_step(root / "clean", "clean", raw, left, losses, repaired=7)
    write_step(root / "dedup", "dedup", left, kept, {"near-duplicate": {"news": (300, 3_000_000)}})
    return root


def report(tmp_path: Path, *folders: Path, **settings: Any) -> ParsedPage:
    output = tmp_path / "report.html"
    run(Settings(input=folders, output=output, workers=1, **settings))
    return ParsedPage(output.read_bytes())


def test_steps_of_a_run_are_read_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    """It leaves out a step that has not finished, and the sides of a split."""
    root = write_pipeline(tmp_path)
    (root / "urls" / ".work").mkdir(parents=True)
    sides = {"train": {"documents": 29, "bytes": 2900}, "valid": {"documents": 1, "bytes": 100}}
    folder = write_step(root / "split", "split", {"news": (30, 3)}, {"news": (30, 3)}, sides=sides)
    (folder / "train").mkdir()
    (folder / "train" / "manifest.json").write_text('{"step": "split", "shuffled": true}')
    steps = read_steps([root])
    assert [step.name for step in steps] == ["extract", "clean", "dedup", "split"]
    assert [len(step.folders) for step in steps] == [2, 1, 1, 1]
    assert find(steps, "sides") == sides
    given = [root / "dedup", root / "clean"]
    assert [step.name for step in read_steps(given)] == ["dedup", "clean"]


def test_folders_of_one_step_count_as_one_but_not_where_one_read_the_other(tmp_path: Path) -> None:
    a: Sources = {"news": (10, 1000)}
    first = write_step(tmp_path / "a", "dedup", a, a)
    second = write_step(tmp_path / "b", "dedup", a, a)
    (both,) = read_steps([first, second])
    assert both.counts.input["news"].documents == 20
    joined = {**manifest(second), "inputs": manifest(first)["shards"]}
    (second / "manifest.json").write_text(json.dumps(joined))
    assert len(read_steps([first, second])) == 2


def test_a_source_that_a_step_does_not_read_passes_it_by(tmp_path: Path) -> None:
    both: Sources = {"news": (10, 1000), "wiki": (4, 400)}
    wiki = write_step(tmp_path / "a", "decontaminate", {"wiki": (5, 500)}, {"wiki": (4, 400)})
    first, last = follow(read_steps([wiki, write_step(tmp_path / "b", "dedup", both, both)]))
    assert first.before == counts({**both, "wiki": (5, 500)})
    assert first.after == last.after == counts(both)
    renamed = write_step(tmp_path / "c", "extract", {"dump": (4, 900)}, {"wiki": (4, 400)})
    first, _ = follow(read_steps([renamed, write_step(tmp_path / "d", "clean", both, both)]))
    assert first.before == counts({"dump": (4, 900), "news": both["news"]})  # no wiki yet


def test_each_step_accounts_for_what_it_kept_and_dropped(tmp_path: Path) -> None:
    table = accounting(follow(read_steps([write_pipeline(tmp_path)])))
    rows = [tuple(map(str, row)) for row in table.rows]
    assert rows[2:7] == [
        ("Clean", "699", "8.9 MB", "74.17 %"),
        ("under 128 tokens", "\N{MINUS SIGN}300", "\N{MINUS SIGN}3.0 MB", "25.00 %"),
        ("another language", "\N{MINUS SIGN}1", "\N{MINUS SIGN}60.0 kB", "0.50 %"),
        (rows[5][0], NONE, "\N{MINUS SIGN}40.0 kB", "0.33 %"),
        (rows[6][0], "", "", ""),
    ]
    assert [rows[number][0] for number in table.marked] == [
        "Raw", "Extract", "Clean", "De-duplicate",
    ]  # fmt: skip
    facts = {name: step_facts(tmp_path / name / "manifest.json") for name in ("clean", "dedup")}
    assert accounting_of(facts).rows[1:] == table.rows[2:]


def test_documents_that_a_step_was_not_given_are_no_silent_loss(tmp_path: Path) -> None:
    both: Sources = {"news": (30, 3000), "wiki": (4, 400)}  # one passes the second step by
    a = write_step(tmp_path / "a", "split", both, both)
    b = write_step(tmp_path / "b", "tokenise", {"news": (29, 2900)}, {"news": (29, 2800)})
    *_, loss = follow(read_steps([a, b]))[1].losses
    assert loss == Loss(loss.reason, 1, 100)


def test_whatever_the_corpus_holds_is_shown_as_text(tmp_path: Path) -> None:
    member = {"id": HOSTILE, "source": HOSTILE, "jaccard": 0.8, "text": HOSTILE * 3}
    other = {**member, "id": "b", "text": f"{HOSTILE} and half \ud800 of a pair, \x00"}
    some: Sources = {HOSTILE: (2, 20)}
    folder = write_step(
        tmp_path / "<b>", "dedup", some, {HOSTILE: (1, 10)}, {HOSTILE: {HOSTILE: (1, 10)}},
        largest_clusters=[{"size": 2, "kept_id": HOSTILE, "members": [member, other]}],
        languages={HOSTILE: 2}, **{HOSTILE: 1},
        leakage={HOSTILE: dict.fromkeys(("before", "after", "before_distinct", "after_distinct",
                                         "ngrams", "distinct_ngrams"), 1)},
    )  # fmt: skip
    text = report(tmp_path, folder).text
    assert text.count(HOSTILE) > 10
    assert "half ? of a pair" in text


def test_shards_that_changed_or_are_gone_are_found_by_verify(tmp_path: Path) -> None:
    root, output = write_pipeline(tmp_path / "run"), tmp_path / "report.html"
    assert verify(read_steps([root]), 1) == []
    (root / "clean" / "part-00000.jsonl").write_text("something else")
    (root / "dedup" / "part-00000.jsonl").unlink()
    faults = verify(read_steps([root]), 1)
    assert [field_of(fault) for fault in faults] == [
        "clean/part-00000.jsonl", "dedup/part-00000.jsonl",
    ]  # fmt: skip
    words = ["--verify", "--output", str(output), "--input", str(root)]
    assert field_of(refusal(partial(program, "tools.corpus.report", words))) == "--verify"
    assert faults[1] in ParsedPage(output.read_bytes()).text


def test_folders_of_no_step_are_refused(tmp_path: Path) -> None:
    empty, cut_short, broken, other, listed = (tmp_path / name for name in "abcdl")
    for folder in (empty, cut_short / ".work", broken, other, listed):
        folder.mkdir(parents=True)
    (broken / "manifest.json").write_text('{"step"')
    (other / "manifest.json").write_text('{"format": 1}')
    (listed / "manifest.json").write_text('["step"]')
    step = write_step(tmp_path / "run" / "e", "clean", {}, {})
    for folders in ((tmp_path / "x",), (empty,), (cut_short,), (other,), (step, step), ()):
        assert field_of(refusal(partial(read_steps, folders))) == "--input"
    for folder in (broken, listed):
        assert field_of(refusal(partial(read_steps, [folder]))) == str(folder / "manifest.json")
    assert str(refusal(partial(read_steps, (step, step.parent)))).startswith(f"--input {step}: ")


def test_a_real_run_has_its_numbers(tmp_path: Path) -> None:
    test, root = tmp_path / "test.txt", tmp_path / "out"
    test.write_text("a test set of at least thirteen words that is not found in any text there\n")
    file = description(tmp_path, f"{STEPS}[decontaminate]\nevaluation = ['{test}']\n")
    first, *rest = read_jsonl(tmp_path / "raw.jsonl")
    near = {**first, "id": "near", "text": f"{first['text']} And more."}
    write_jsonl(tmp_path / "raw.jsonl", [first, near, *rest])
    program("tools.corpus.run", [str(file), "--no-plan"])
    steps = read_steps([root])
    for key in ("lengths", "languages", "leakage", "largest_clusters", "recall_curve", "sides"):
        assert find(steps, key), key
    losses = {account.step.name: account.losses for account in follow(steps)}
    gone = dropped(manifest(root / "dedup"))
    assert sum(loss.documents for loss in losses["dedup"]) == sum(gone.values()) > 1
    page = report(tmp_path, root, verify=True)
    assert {"svg", "mark"} <= page.tags
