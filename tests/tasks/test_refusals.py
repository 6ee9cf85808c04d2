"""Settings and files that the tasks refuse; the cure that an error suggests is tried."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from megatron.config.parse import parse
from megatron.data.tokenizer import build_tokenizer
from tasks.main import find_module
from tests.data.samples import write_data, write_tokenizer, write_wordpiece
from tests.refusals import by_last_flag, refusal, refused
from tests.tasks.made import small_config, write_files, write_model
from tests.tasks.program import FEW, TASK, run
from tests.tasks.test_race import OTHER, PASSAGE
from tests.tasks.test_squad import question, squad_of, write_squad, write_v2
from tests.tiny import tiny_config

# Arguments after --task, in which {name} is one of `paths`; MADE and the files of
# `tests/tasks/made.py` stand for any fine-tuned task. The last flag of each is refused.
LAST = """
MADE --answers {near} {valid} --seq-length 20 | {train} --seq-length 25
MNLI --load {pre} {valid} --seq-length 4 | QQP --load {pre} {valid} --seq-length 2
RACE --load {pre} {valid} --seq-length 4 | RACE --load {pre} {valid} --max-qa-length 0
HELDOUT --load {gpt2} --input {near} --train-data {near} --compare-paper
{train} --compare-paper | MADE --answers {near} {valid} --compare-paper
{train} --output {folder}/none/x.json | {train} --output {folder} | {judge} --save x
{judge} --seeds 2 | {judge} --seed 2 | {judge} --lr 1 --clip-grad 2 | {judge} --zero-stage 1
{judge} --sequence-parallel | {judge} --use-distributed-optimizer | {judge} --search lr=1
{train} --search seed=1,2 | {train} --search lr | {train} --search lr=high
{train} --search lr=1 lr=2 | {train} --search lr=1e-3,0 | {train} --lr-warmup-fraction 1.5
{train} --epochs 0 | {train} --max-truncated 25 | {train} --max-unknown -1
MADE --answers {near} {valid} --max-unknown 0.5 | MADE --answers {near} {valid} --dtype bf16
WIKITEXT103 --load {gpt2} {valid} --window 8 --overlapping-eval 0
WIKITEXT103 --load {gpt2} {valid} --overlapping-eval 17
WIKITEXT103 --load {gpt2} {valid} --window 17
SQUAD --valid-data {v2} --predictions {near} --doc-stride 9 | {squad} {v2} --doc-stride 0
SQUAD --load {pre} --train-data {v2} --valid-data {v2} --save-predictions p
SQUAD --load {pre} --train-data {v2} --valid-data {v2} --save-null-odds p
{squad} {v2} --save-predictions {folder}/none/p | {squad} {v2} --predictions {near}
{squad} {v1} {small} --save-null-odds {folder}/o | {squad} {v2} --na-prob-file {near}
{squad} {v1} {small} --null-score-diff-threshold 1 | {squad} {v2} --na-prob-thresh 0.5
{squad} {v2} --max-answer-length 0
"""
# By the field that the error names.
ROWS = {
    "--load": [
        "MADE --load {folder}/none {files}", "MADE --load {gpt2} {files}",
        "WIKITEXT103 --load {pre} {valid}", "LAMBADA --load {pre} {valid}",
        "MADE --load {pre} {valid}", "MADE --load {fine} {files}", "MADE --load {save} {valid}",
        "MADE --load {pre} --ensemble {fine} {valid}", "MADE {files}", "MADE {valid}",
        "SQUAD --valid-data {v2}",
    ],
    "--seq-length": [
        "RACE --load {pre} {valid} --seq-length 64 --max-qa-length 61",
        "RACE --load {pre} --train-data {near} {valid} --seq-length 20 --max-qa-length 18",
    ],
    "--ensemble": [
        "MADE --ensemble {fine} {files}", "MADE --ensemble {fine} {pre} {valid}",
        "MADE --ensemble {fine} {save} {valid}", "MADE --ensemble {fine} {alien} {valid}",
    ],
    "--task": [
        "PTB --load {pre} {valid}", "tasks.nothing --load {pre} {valid}",
        "os.path --load {pre} {valid}",
    ],
    "--valid-data": [
        "{judge} {empty}", "QQP --load {fine} {valid} {folder}/other/near --seq-length 24",
        "{squad} {v2} {v1}",
    ],
    "{fine}/step_00000012": ["{judge} --head span", "{judge} --names more"],
    "--seeds": ["MADE --answers {near} {valid} --seeds 5 --lr 3"],
    "--train-data": [
        "MADE --load {pre} --train-data {empty} {valid}",
        "SQUAD --load {pre} --train-data {v1} --valid-data {v2} {small}",
    ],
    "--max-query-length": ["{squad} {v2} --seq-length 16"],
}  # fmt: skip
CASES = [(row, field) for field, rows in ROWS.items() for row in rows] + by_last_flag(LAST)


@pytest.fixture(scope="module")
def paths(
    tmp_path_factory: pytest.TempPathFactory, tuned: tuple[Path, Any], pretrained: Path
) -> dict[str, str]:
    folder, (save, _) = tmp_path_factory.mktemp("refusals"), tuned
    (folder / "other").mkdir()
    files = write_files(folder, 16)
    alien = write_model(folder / "alien", small_config(), words=["word"])
    words = ["--load", str(alien), *files, *FEW, "--epochs", "1", "--save", str(folder / "saved")]
    run([TASK, *words])
    (folder / "empty").write_text("0 1", encoding="utf-8")
    (folder / "other" / "near").write_text("1 2", encoding="utf-8")
    write_data(folder / "data", [[1, 2, 0]])
    fine, near, given = save / "seed_1234", folder / "near", shlex.join(files)
    return {
        "pre": str(pretrained), "save": str(save), "fine": str(fine), "folder": str(folder),
        "alien": str(folder / "saved" / "seed_1234"), "files": given, "near": str(near),
        "gpt2": str(write_model(folder / "gpt2", tiny_config())), "empty": str(folder / "empty"),
        "v2": str(write_v2(folder / "v2.json")),
        "v1": str(write_squad(folder / "v1.json", question("q", {"Spain": 12}))),
        "judge": f"{TASK} --load {fine} --valid-data {near}",
        "train": f"{TASK} --load {pretrained} {given}",
        "squad": f"SQUAD --load {fine} --valid-data", "valid": f"--valid-data {near}",
        "small": "--seq-length 24 --max-query-length 8",
    }  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("words", "field"), CASES)
def test_settings(
    paths: dict[str, str], monkeypatch: pytest.MonkeyPatch, words: str, field: str
) -> None:
    monkeypatch.chdir(paths["folder"])  # in which what works may write
    given = words.format(**paths).replace("MADE ", f"{TASK} ")
    assert refused(run, given, whole=False) == field.format(**paths)


Q7 = question("q7", {"The": 0})
MARKED = question("q8", {"The": 0}, is_impossible=False)
LABELS = "sentence1\tsentence2\tgold_label\n"

# Task, what is in the file, and where in it the error says that something is wrong. A passage of
# RACE is the second one of its folder.
FILES = [
    *(("WIKITEXT103", *row) for row in [
        (None, ""), (b"", ""), (b" \n\n", ""),
        (b"= A =\n\xff\n", "line 2"),
        (b'{"text": "a b"}\n', "title"),
        (b"\nhe said no\n", "title"),
        (b"\n = A =\r\n", "line 2"),
        (b"\xef\xbb\xbf = A =\n", "line 1"),
    ]),
    *(("LAMBADA", *row) for row in [
        (None, ""), (b"\n", ""),
        (b'\xef\xbb\xbf{"text": "a b"}\n', "line 1"),
        (b"a b\r\n", "line 1"),
        (b"a b\n\xff\n", "line 2"),
        (b" \n = Title = \n \n a b \n", "line 2"),
        (b'{"text": "a b"}\n{"txt": "a b"}\n', "line 2"),
        (b'{"text": "a b"}\n["a b"]\n', "line 2"),
        (b'{"text": "a b"}\n{"text"\n', "line 2"),
        (b"a b\nalone\n", "line 2"),
        (b"a b\n\na b\n", "line 2"),
        (b"a b\na b \n", "line 2"),
        (b"a b\na " + b"0x" * 600 + b"\n", "line 2"),
    ]),
    *(("MNLI", *row) for row in [
        (None, ""), (b"", ""), (b"PK\x03\x04", ""),
        (b"\xff\xfe\n", "line 1"),
        (b"a\tb\nc\td\n", "line 1"),
        (b"index\tsentence1\tsentence2\n0\ta\tb\n", "gold_label"),
        (b"sentence1\tsentence1\tsentence2\tgold_label\n", "line 1"),
        (LABELS.encode(), "0 rows"),
        (f"{LABELS}a\tb\t-\n".encode(), "1 rows"),
        (f"{LABELS}a\tb\tneutral\na\tb\tNeutral\n".encode(), "line 3"),
        (f"{LABELS}a\tb\tneutral\na\tb\t\n".encode(), "line 3"),
        (f"{LABELS}a\tb\tneutral\na\tb\t0\n".encode(), "line 3"),
        (f"{LABELS}a\tb\tneutral\na\tb\n".encode(), "line 3"),
        (b"{}", "0 rows"),
        (b'{"0": {"text_a": "a", "label": "neutral"}}', "item 0"),
        (b'{"0": {"text_a": "a", "text_b": "b"}}', "item 0"),
        (b'{"text_a": 1, "text_b": "b", "label": "neutral"}', "line 1"),
        (b'["a", "b", "neutral"]', "line 1"),
        (b'{"text_a": "a", "text_b": "b", "label": "neutral"}\n{"text_a', "line 2"),
        (b'{"0": {', ""),
    ]),
    *(("RACE", *row) for row in [
        (b"{", ""), (b"{} {}", ""), (b"\xff", ""), (b"[]", ""),
        (PASSAGE | {"article": None}, "article"),
        ({"article": "a", "questions": []}, "options"),
        (PASSAGE | {"answers": ["A"]}, "answers"),
        (PASSAGE | {"questions": "Who?"}, "questions"),
        (OTHER | {"options": [["a", "b", "c"]]}, "question 1"),
        (OTHER | {"options": ["abcd"]}, "question 1"),
        (PASSAGE | {"answers": ["A", "E"]}, "question 2"),
        (OTHER | {"answers": [2]}, "question 1"),
        (OTHER | {"questions": [1]}, "question 1"),
        (OTHER | {"options": [["a", "b", "c", None]]}, "question 1"),
    ]),
    *(("SQUAD", *row) for row in [
        (None, ""), (b"{", ""), ([], "data"), (squad_of(), "questions"),
        ({"data": [{}]}, "article 1"),
        ({"data": [{"paragraphs": [{}]}]}, "article 1, paragraph 1"),
        ({"data": [{"paragraphs": [{"context": " ", "qas": []}]}]}, "article 1, paragraph 1"),
        (squad_of({**Q7, "id": 7}), "article 1, paragraph 1, question 1"),
        *((squad_of(entry), "question q7") for entry in [
            {**Q7, "question": None},
            {**Q7, "answers": None},
            question("q7", {}),
            question("q7", {"The": 0}, is_impossible=True),
            question("q7", {"The": 0}, is_impossible="no"),
            question("q7", {"The": "0"}),
            question("q7", {" ": 3}),
            question("q7", {"snow": 3}),
        ]),
        (squad_of(Q7, Q7), "q7"),
        (squad_of(Q7, MARKED), "q7"),
        (squad_of(question("q7", {"\u200b": 0}), passage="\u200b"), "question q7"),
    ]),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("task", "content", "place"), FILES)
def test_files(tmp_path: Path, task: str, content: Any, place: str) -> None:
    given = file = tmp_path / "input"
    if task == "RACE":
        given, file = tmp_path / "middle", tmp_path / "middle" / "2.txt"
        given.mkdir()
        (given / "1.txt").write_text(json.dumps(PASSAGE))
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    module = find_module(task)
    words = ["--load", "x", "--valid-data", str(given)]
    if task in ("WIKITEXT103", "LAMBADA"):
        tokenizer = build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))
    else:
        tokenizer = build_tokenizer("BertWordPieceLowerCase", write_wordpiece(tmp_path), None)
        words += ["--seq-length", "64"]
        words += ["--max-query-length", "8"] if task == "SQUAD" else []
    config = {"model": {"max_position_embeddings": 64}, "data": {"seq_length": 64}}
    settings = parse(module.Settings, words, {})
    error = refusal(lambda: module.prepare(settings, {"config": config}, tokenizer))
    named, _, said = str(error).partition(str(file))
    assert named == "--valid-data "
    assert place in said
