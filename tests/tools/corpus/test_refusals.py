"""Settings that the steps of a corpus refuse: each row names the flag, and its cure is run."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.data.json_lines import find_shards
from tests.refusals import by_last_flag, field_of, refusal, refused
from tests.tools.corpus.lines import write_jsonl
from tools.corpus.settings import parse_settings, parse_size, program

PATHS = "--input x --output y"
ALWAYS = {  # what each takes at least
    **dict.fromkeys(("urls", "clean", "dedup", "split", "report"), PATHS),
    "decontaminate": f"{PATHS} --evaluation x",
    "extract": f"{PATHS} --format wet --source web",
    "harvest": "--output x",
    "plan": "", "run": "",
}  # fmt: skip
# The last flag of each row is refused.
LAST = """
clean --workers 0 | clean --unit 32 | clean --unit 99B | clean --unit fast | clean --memory 999B
clean --memory 0 | clean --shard 2/2 | clean --shard one | clean --shard 0/2 --overwrite
clean --scheduler nonsense | clean --min-tokens 0 | clean --language english | clean --language un
dedup --jaccard 0 | dedup --bands 26 | dedup --max-bucket 1 | dedup --max-source-loss 2
dedup --seed -1 | dedup --expected-removal -1 | decontaminate --ngram 0 | decontaminate --margin -1
decontaminate --article-overlap 1.5 | split --ratio 29 | split --ratio 1:0
split --shard-size many | extract --key body | extract --source= | report --workers 0
report --output . | harvest --max-bytes 0 | plan x --sample lots
"""
ROWS = by_last_flag(LAST)
ROWS += [("split --shard-size 500MB", "--memory"), ("decontaminate --evaluation", "--evaluation")]
ROWS += [(f"{name} {words}", "--input") for name in ("plan", "run")
         for words in ("", "--input x", "x --output y")]  # fmt: skip


@pytest.mark.parametrize(("row", "flag"), ROWS, ids=[row for row, _ in ROWS])
def test_settings_are_refused_by_flag(row: str, flag: str) -> None:
    step, _, words = row.partition(" ")
    parsed = partial(parse_settings, f"tools.corpus.{step}")
    assert refused(parsed, f"{ALWAYS[step]} {words}") == flag


LAST_OF_FILES = """
clean --input none.jsonl | clean --vocab-file none.json | clean --scheduler tcp://127.0.0.1
clean --scheduler ftp://127.0.0.1:9 | urls --domain-blacklist domains.txt
urls --extension-blacklist none | urls --input empty.txt | decontaminate --evaluation none
decontaminate --evaluation x.jsonl below/x.jsonl | decontaminate --evaluation bytes.txt
decontaminate --evaluation half.jsonl | decontaminate --evaluation dots.txt
decontaminate --evaluation x.jsonl --titles none
"""
FILES = [*by_last_flag(LAST_OF_FILES), ("clean --merge-file none.txt", "--vocab-file")]
FILES += [(f"extract --format {each} --source a", "--format") for each in ("text", "openwebtext")]


@pytest.mark.parametrize(("row", "flag"), FILES)
def test_files_are_refused_before_anything_is_written(
    row: str, flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("x.jsonl"), Path("below", "x.jsonl")):
        write_jsonl(path, [{"text": "some text"}])
    for name, content in (("domains.txt", b"imgur.com\nhttp://imgur.com"), ("empty.txt", b""),
                          ("bytes.txt", b"\xff\xfe"), ("dots.txt", b" ... \n"),
                          ("half.jsonl", b'{"text": "x"}\n{"text"')):  # fmt: skip
        Path(name).write_bytes(content)
    step, _, words = row.partition(" ")
    given: Any = "" if "--input" in words else "--input x.jsonl "
    left = sorted(tmp_path.iterdir())
    assert refused(partial(program, f"tools.corpus.{step}"), f"{given}--output out {words}") == flag
    assert sorted(tmp_path.iterdir()) == left or step == "extract"  # whose cure ran


def test_input_that_is_not_there_is_named(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "deep" / "below" / "a.jsonl", [])
    (tmp_path / "unfinished" / ".work").mkdir(parents=True)
    (tmp_path / "unfinished" / "part-00000.jsonl").touch()
    unfinished = tmp_path / "unfinished"
    for given in ([], [tmp_path / "none"], [tmp_path], [tmp_path / "deep"], [unfinished]):
        assert field_of(refusal(partial(find_shards, given))) == "--input"
    (unfinished / "manifest.json").touch()
    assert len(find_shards([unfinished])) == 1


@pytest.mark.parametrize("step", ["clean", "decontaminate", "dedup", "split"])
def test_the_first_line_is_named_where_none_is_a_document(step: str, tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('\n{"body": "of another key"}\n')
    write_jsonl(tmp_path / "evaluation.jsonl", [{"text": "some text"}])
    words = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out")]
    if step == "decontaminate":
        words += ["--evaluation", str(tmp_path / "evaluation.jsonl")]
    refusal(partial(program, f"tools.corpus.{step}", [*words, "--workers", "1"]), "byte 1")


def test_sizes_are_read_with_their_unit() -> None:
    sizes = {"32MB": 32 * 10**6, "1.5GB": 1_500_000_000, "7B": 7, "2K": 2000, "1tb": 10**12}
    for text, size in sizes.items():
        assert parse_size("--unit", text) == size
    for text in ("", "7", "1.5", "B", "-1MB", "1e", "MB", "1XB", "nan", "inf", "0.1B"):
        assert field_of(refusal(partial(parse_size, "--unit", text))) == "--unit"
