"""The page of tools.corpus.report: what it says, and that texts stay texts on it."""

import hashlib
import json
import random
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.tools.corpus.lines import write_jsonl
from tools.corpus import clean, decontaminate, dedup, split
from tools.corpus.records import Count, Funnel
from tools.corpus.report import Settings, run
from tools.corpus.report.steps import Loss, follow, read_steps

VOID = {"meta", "br"}
STAGE = {"stage": "shards", "tasks": 2, "seconds": 4.0, "cpu_seconds": 8.0, "peak_bytes": 5 * 10**7}
Sources = dict[str, tuple[int, int]]


class Page(HTMLParser):
    """Tags, text and whether every element is closed where it should be."""

    def __init__(self, content: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.links: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(content)
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def counts(sources: Sources) -> dict[str, Count]:
    return {name: Count(documents, size) for name, (documents, size) in sources.items()}


def write_step(
    folder: Path,
    step: str,
    into: Sources,
    out: Sources,
    dropped: dict[str, Sources] | None = None,
    **more: Any,
) -> Path:
    """An output folder with one shard, its manifest and its run.json."""
    folder.mkdir(parents=True)
    shard = f"what {folder.name} wrote".encode()
    (folder / "part-00000.jsonl").write_bytes(shard)
    funnel = Funnel(counts(into), counts(out), {k: counts(v) for k, v in (dropped or {}).items()})
    facts = {"name": "part-00000.jsonl", "documents": 1, "bytes": len(shard)}
    manifest = {
        "step": step,
        "settings": {"unit": "32MB"},
        "versions": {"python": "3.11"},
        "inputs": [],
        **funnel.to_json(),
        **more,
        "shards": [{**facts, "sha256": hashlib.sha256(shard).hexdigest()}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    (folder / "run.json").write_text(json.dumps({"stages": [STAGE], "settings": {"workers": 2}}))
    return folder


def write_pipeline(root: Path) -> Path:
    raw: Sources = {"news": (900, 9_000_000), "wiki": (100, 3_000_000)}
    left: Sources = {"news": (600, 6_000_000), "wiki": (99, 2_900_000)}
    kept: Sources = {"news": (300, 3_000_000), "wiki": (99, 2_900_000)}
    for source in raw:
        one = {source: raw[source]}
        write_step(root / "extract" / source, "extract", one, one)
    write_step(
        root / "clean", "clean", raw, left,
        {"under 128 tokens": {"news": (300, 3_000_000)}, "another language": {"wiki": (1, 60_000)}},
    )  # fmt: skip
    write_step(root / "dedup", "dedup", left, kept, {"near-duplicate": {"news": (300, 3_000_000)}})
    return root


def report(tmp_path: Path, *folders: Path, **settings: Any) -> Page:
    output = tmp_path / "report.html"
    run(Settings(input=folders, output=output, workers=1, **settings))
    return Page(output.read_text())


def test_the_page_is_one_file_that_runs_nothing_and_asks_no_network(tmp_path: Path) -> None:
    page = report(tmp_path, write_pipeline(tmp_path / "run"))
    content = (tmp_path / "report.html").read_text()
    assert not page.links
    assert not page.tags & {"script", "link", "img", "iframe", "object", "base", "form"}
    assert "svg" in page.tags
    assert "default-src 'none'" in content
    assert not any(word in content for word in ("url(", "@import", "http://", "https://"))
    assert "prefers-color-scheme: dark" in content


def test_a_run_folder_is_read_in_the_order_of_the_pipeline(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path)
    assert [step.name for step in read_steps([root])] == ["extract", "clean", "dedup"]
    given = [root / "dedup", root / "clean"]
    assert [step.name for step in read_steps(given)] == ["dedup", "clean"]


def test_the_sides_of_a_split_are_no_steps(tmp_path: Path) -> None:
    sides = {"train": {"documents": 29, "bytes": 2900}, "valid": {"documents": 1, "bytes": 100}}
    some: Sources = {"news": (30, 3000)}
    folder = write_step(tmp_path / "run" / "split", "split", some, some, sides=sides)
    (folder / "train").mkdir()
    (folder / "train" / "manifest.json").write_text('{"step": "split", "shuffled": true}')
    page = report(tmp_path, tmp_path / "run")
    assert len(read_steps([tmp_path / "run"]).folders) == 1
    assert "train: 29 documents, 2.9 kB" in page.text


def test_an_unfinished_step_of_a_run_is_left_out_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write_pipeline(tmp_path)
    (root / "split" / ".work").mkdir(parents=True)
    assert [step.name for step in read_steps([root])] == ["extract", "clean", "dedup"]
    assert "split is left out, its step has not finished" in capsys.readouterr().err


def test_folders_of_one_step_count_as_one_but_not_where_one_read_the_other(tmp_path: Path) -> None:
    a: Sources = {"news": (10, 1000)}
    first = write_step(tmp_path / "a", "dedup", a, a)
    second = write_step(tmp_path / "b", "dedup", a, a)
    (joined,) = read_steps([first, second])
    assert joined.funnel.input["news"].documents == 20
    shards = json.loads((first / "manifest.json").read_text())["shards"]
    manifest = json.loads((second / "manifest.json").read_text())
    (second / "manifest.json").write_text(json.dumps({**manifest, "inputs": shards}))
    assert len(read_steps([first, second])) == 2


def test_a_source_that_a_step_does_not_read_passes_it_by(tmp_path: Path) -> None:
    both: Sources = {"news": (10, 1000), "wiki": (5, 500)}
    wiki = write_step(tmp_path / "a", "decontaminate", {"wiki": (5, 500)}, {"wiki": (4, 400)})
    end = write_step(
        tmp_path / "b", "dedup", {**both, "wiki": (4, 400)}, {**both, "wiki": (4, 400)}
    )
    first, last = follow(read_steps([wiki, end]))
    assert first.before == counts(both)
    assert first.after == last.after == counts({"news": (10, 1000), "wiki": (4, 400)})


def test_documents_that_a_step_was_not_given_are_no_silent_loss(tmp_path: Path) -> None:
    a = write_step(tmp_path / "a", "split", {"news": (30, 3000)}, {"news": (30, 3000)})
    b = write_step(tmp_path / "b", "tokenise", {"news": (29, 2900)}, {"news": (29, 2900)})
    assert follow(read_steps([a, b]))[1].losses == [Loss("not given to this step", 1, 100)]


HOSTILE = "<script>alert(1)</script>\"'&amp;<img src=x onerror=y>"


def test_whatever_the_corpus_holds_is_shown_as_text(tmp_path: Path) -> None:
    member = {"id": HOSTILE, "source": HOSTILE, "jaccard": 0.8, "text": HOSTILE * 3}
    other = {**member, "id": "b", "text": f"{HOSTILE} and more"}
    some: Sources = {HOSTILE: (2, 20)}
    folder = write_step(
        tmp_path / "<b>", "dedup", some, {HOSTILE: (1, 10)}, {HOSTILE: {HOSTILE: (1, 10)}},
        largest_clusters=[{"size": 2, "kept_id": HOSTILE, "members": [member, other]}],
        languages={HOSTILE: 2}, **{HOSTILE: 1},
        leakage={HOSTILE: dict.fromkeys(("before", "after", "before_distinct", "after_distinct",
                                         "ngrams", "distinct_ngrams"), 1)},
    )  # fmt: skip
    page = report(tmp_path, folder)
    assert not page.tags & {"script", "img"}
    assert page.text.count(HOSTILE) > 10


def test_what_is_no_unicode_does_not_end_the_report(tmp_path: Path) -> None:
    member = {"id": "a", "source": "s", "jaccard": None, "text": "half \ud800 of a pair, \x00"}
    cluster = {"size": 1, "kept_id": "a", "members": [member]}
    some: Sources = {"s": (1, 10)}
    folder = write_step(tmp_path / "dedup", "dedup", some, some, largest_clusters=[cluster])
    assert "half ? of a pair" in report(tmp_path, folder).text


def test_shards_that_changed_or_are_gone_are_found_by_verify(tmp_path: Path) -> None:
    root = write_pipeline(tmp_path / "run")
    assert "Every shard of every step is there" in report(tmp_path, root, verify=True).text
    (root / "clean" / "part-00000.jsonl").write_text("something else")
    (root / "dedup" / "part-00000.jsonl").unlink()
    with pytest.raises(ValueError, match="--verify"):
        report(tmp_path, root, verify=True)
    assert "dedup/part-00000.jsonl: gone" in (tmp_path / "report.html").read_text()
    assert "not read again" in report(tmp_path, root).text


def test_bad_input_is_named_with_what_would_work(tmp_path: Path) -> None:
    empty, cut_short, broken, other = (tmp_path / name for name in "abcd")
    for folder in (empty, cut_short / ".work", broken, other):
        folder.mkdir(parents=True)
    (broken / "manifest.json").write_text('{"step"')
    (other / "manifest.json").write_text('{"format": 1}')
    step = write_step(tmp_path / "e", "clean", {}, {})
    for folders, message in (
        ((tmp_path / "x",), "--input"),
        ((empty,), "--input .*a: .*manifest.json"),
        ((cut_short,), "--input"),
        ((broken,), "c/manifest.json is no JSON"),
        ((other,), "--input"),
        ((step, step), "--input"),
        ((), "--input"),
    ):
        with pytest.raises(ValueError, match=message):
            read_steps(folders)
    with pytest.raises(ValueError, match="--output"):
        Settings(input=(step,), output=tmp_path)
    with pytest.raises(ValueError, match="--workers 0"):
        Settings(input=(step,), output=tmp_path / "report.html", workers=0)


def test_the_command_writes_the_page_and_refuses_with_status_2(tmp_path: Path) -> None:
    root, output = write_pipeline(tmp_path / "run"), tmp_path / "report.html"
    command = [sys.executable, "-m", "tools.corpus.report", "--output", str(output), "--input"]
    folders = [str(root / name) for name in ("clean", "dedup")]
    subprocess.run([*command, *folders], check=True, capture_output=True)
    assert "2 steps read" in Page(output.read_text()).text
    output.unlink()
    failed = subprocess.run([*command, str(tmp_path / "no")], capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: --input")
    assert not output.exists()


COMMON_WORDS = (
    "the of and to in that was for it with as his on be at by this had not are but from or have "
    "they which one you were all her she there would their we him been has when who"
)


def write_texts(file: Path) -> Path:
    """A hundred texts of common words, one in ten a near copy of the one before."""
    words = COMMON_WORDS.split()
    chance = random.Random(1)
    texts: list[str] = []
    for number in range(100):
        fresh = " ".join(chance.choices(words, k=300))
        texts.append(f"{texts[-1]} the end" if number % 10 == 9 else fresh)
    rows = [{"text": text, "id": f"{k:03}", "source": "made"} for k, text in enumerate(texts)]
    return write_jsonl(file, rows)


def test_a_real_run_lacks_nothing_on_the_page(tmp_path: Path) -> None:
    raw, root = write_texts(tmp_path / "raw.jsonl"), tmp_path / "run"
    test = tmp_path / "test.txt"
    test.write_text("a test set of at least thirteen words that is not found in any text there\n")
    common = {"workers": 1, "memory": "300MB"}
    clean.run(clean.Settings(input=(raw,), output=root / "clean", **common))
    decontaminate.run(
        decontaminate.Settings(
            input=(root / "clean",), output=root / "decontaminate", evaluation=(test,), **common
        )
    )
    dedup.run(dedup.Settings(input=(root / "decontaminate",), output=root / "dedup", **common))
    split.run(
        split.Settings(input=(root / "dedup",), output=root / "split", shard_size="9MB", **common)
    )
    page = report(tmp_path, root, verify=True)
    assert "No manifest of these" not in page.text
    assert "near-duplicate10" in page.text
    assert "mark" in page.tags
    assert "Every shard of every step is there" in page.text
