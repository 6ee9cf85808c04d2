"""What the tasks refuse: settings, each tried again with what its error says works, and files."""

import contextlib
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron.config.checks import UsageError
from megatron.config.parse import parse
from megatron.data.tokenizer import build_tokenizer
from tasks.main import find_module, main
from tests.data.samples import write_data, write_tokenizer, write_wordpiece
from tests.tasks.made import small_section, write_files, write_model
from tests.tasks.program import FEW, TASK
from tests.tasks.squads import question, squad_of, write_squad, write_v2
from tests.tasks.test_race import OTHER, PASSAGE
from tests.tiny import tiny_section

# Arguments after --task, in which {name} is a path of `paths`, and the flag that the error names.
# MADE and the files of `tests/tasks/made.py` stand for any fine-tuned task.
ROWS = [
    # The task, the paper's tables, where the result goes.
    ("PTB --load {pre} --valid-data {near}", "--task"),
    ("tasks.nothing --load {pre} --valid-data {near}", "--task"),
    ("os.path --load {pre} --valid-data {near}", "--task"),
    ("HELDOUT --load {gpt2} --input {near} --train-data {near} --compare-paper", "--compare-paper"),
    ("MADE --load {pre} {files} --compare-paper", "--compare-paper"),
    ("MADE --answers {near} --valid-data {near} --compare-paper", "--compare-paper"),
    ("MADE --load {pre} {files} --output {folder}/none/x.json", "--output"),
    ("MADE --load {pre} {files} --output {folder}", "--output"),
    # The model.
    ("MADE --load {folder}/none {files}", "--load"),
    ("MADE --load {gpt2} {files}", "gpt2"),
    ("WIKITEXT103 --load {pre} --valid-data {near}", "gpt2"),
    ("LAMBADA --load {pre} --valid-data {near}", "gpt2"),
    ("MADE --load {pre} --valid-data {near}", "--load"),
    ("MADE --load {fine} {files}", "--load"),
    ("MADE --load {save} --valid-data {near}", "--load {fine}"),
    ("MADE --load {fine} --valid-data {near} --head span", "span"),
    ("MADE --load {fine} --valid-data {near} --names more", "(alike, key)"),
    ("MADE --load {pre} --ensemble {fine} --valid-data {near}", "--load"),
    ("MADE {files}", "--load"),
    ("MADE --valid-data {near}", "--answers"),
    ("MADE --ensemble {fine} {files}", "--ensemble"),
    ("MADE --ensemble {fine} {pre} --valid-data {near}", "--ensemble"),
    ("MADE --ensemble {fine} {save} --valid-data {near}", "--ensemble {fine}"),
    ("MADE --ensemble {fine} {alien} --valid-data {near}", "--ensemble"),
    # Settings of training and of models, where there is none.
    ("MADE --load {fine} --valid-data {near} --save x", "--save"),
    ("MADE --load {fine} --valid-data {near} --seeds 2", "--seeds"),
    ("MADE --load {fine} --valid-data {near} --seed 2", "--seed"),
    ("MADE --load {fine} --valid-data {near} --lr 1 --clip-grad 2", "--clip-grad"),
    ("MADE --load {fine} --valid-data {near} --sequence-parallel", "--sequence-parallel"),
    ("MADE --load {fine} --valid-data {near} --zero-stage 1", "--zero-stage"),
    (
        "MADE --load {fine} --valid-data {near} --use-distributed-optimizer",
        "--use-distributed-optimizer",
    ),
    ("MADE --answers {near} --valid-data {near} --seeds 5 --lr 3", "--seeds"),
    ("MADE --answers {near} --valid-data {near} --seq-length 20", "--seq-length"),
    ("MADE --answers {near} --valid-data {near} --dtype bf16", "--dtype"),
    # Numbers.
    ("MADE --load {pre} {files} --seq-length 25", "--seq-length"),
    ("MADE --load {pre} {files} --lr-warmup-fraction 1.5", "--lr-warmup-fraction"),
    ("MADE --load {pre} {files} --epochs 0", "--epochs"),
    ("MADE --load {pre} {files} --max-truncated 25", "--max-truncated"),
    ("MADE --load {pre} {files} --max-unknown -1", "--max-unknown"),
    ("WIKITEXT103 --load {gpt2} --valid-data {near} --window 8 --overlapping-eval 0", "--overlapp"),
    ("WIKITEXT103 --load {gpt2} --valid-data {near} --overlapping-eval 17", "--overlapping-eval"),
    ("WIKITEXT103 --load {gpt2} --valid-data {near} --window 17", "--window"),
    ("MNLI --load {pre} --valid-data {near} --seq-length 4", "--seq-length"),
    ("QQP --load {pre} --valid-data {near} --seq-length 2", "--seq-length"),
    ("RACE --load {pre} --valid-data {near} --seq-length 4", "--seq-length"),
    ("RACE --load {pre} --valid-data {near} --seq-length 64 --max-qa-length 61", "--seq-length"),
    (
        "RACE --load {pre} --train-data {near} --valid-data {near} --seq-length 20 "
        "--max-qa-length 18",
        "--seq-length",
    ),
    ("RACE --load {pre} --valid-data {near} --max-qa-length 0", "--max-qa-length"),
    # Data.
    ("MADE --load {pre} --train-data {empty} --valid-data {near}", "--train-data"),
    ("MADE --load {fine} --valid-data {near} {empty}", "--valid-data"),
    ("QQP --load {fine} --valid-data {near} {folder}/other/near --seq-length 24", "--valid-data"),
    # SQuAD's own.
    ("SQUAD --valid-data {v2}", "--predictions"),
    ("SQUAD --load {fine} --valid-data {v2} --predictions {near}", "--predictions"),
    ("SQUAD --valid-data {v2} --predictions {near} --doc-stride 9", "--doc-stride"),
    ("SQUAD --load {fine} --valid-data {v2} --na-prob-file {near}", "--na-prob-file"),
    ("SQUAD --load {fine} --valid-data {v2} --na-prob-thresh 0.5", "--na-prob-thresh"),
    ("SQUAD --load {pre} --train-data {v2} --valid-data {v2} --save-predictions p", "--save-pred"),
    ("SQUAD --load {pre} --train-data {v2} --valid-data {v2} --save-null-odds p", "--save-null"),
    ("SQUAD --load {fine} --valid-data {v2} --save-predictions {folder}/none/p", "--save-pred"),
    ("SQUAD --load {fine} --valid-data {v2} --doc-stride 0", "--doc-stride"),
    ("SQUAD --load {fine} --valid-data {v2} --max-answer-length 0", "--max-answer-length"),
    ("SQUAD --load {fine} --valid-data {v2} --seq-length 16", "--max-query-length"),
    ("SQUAD --load {fine} --valid-data {v2} {v1}", "--valid-data"),
    ("SQUAD --load {pre} --train-data {v1} --valid-data {v2} {small}", "1.1"),
    ("SQUAD --load {fine} --valid-data {v1} {small} --save-null-odds {folder}/o", "--save-null"),
    (
        "SQUAD --load {fine} --valid-data {v1} {small} --null-score-diff-threshold 1",
        "--null-score-diff-threshold",
    ),
]


@dataclass(frozen=True)
class Paths:
    words: dict[str, str]

    def fill(self, text: str) -> list[str]:
        return shlex.split(text.format(**self.words).replace("MADE ", f"{TASK} "))


@pytest.fixture(scope="module")
def paths(
    tmp_path_factory: pytest.TempPathFactory, tuned: tuple[Path, Any], pretrained: Path
) -> Paths:
    folder, (save, _) = tmp_path_factory.mktemp("refusals"), tuned
    (folder / "other").mkdir()
    files = write_files(folder, 16)
    alien = write_model(folder / "alien", small_section(), words=["word"])
    words = ["--load", str(alien), *files, *FEW, "--epochs", "1", "--save", str(folder / "saved")]
    main(["--task", TASK, *words], {})
    (folder / "empty").write_text("0 1", encoding="utf-8")
    (folder / "other" / "near").write_text("1 2", encoding="utf-8")
    write_data(folder / "data", [[1, 2, 0]])
    return Paths(
        {
            "pre": str(pretrained),
            "save": str(save),
            "fine": str(save / "seed_1234"),
            "alien": str(folder / "saved" / "seed_1234"),
            "gpt2": str(write_model(folder / "gpt2", tiny_section())),
            "folder": str(folder),
            "files": shlex.join(files),
            "near": str(folder / "near"),
            "empty": str(folder / "empty"),
            "v2": str(write_v2(folder / "v2.json")),
            "v1": str(write_squad(folder / "v1.json", question("q", {"Spain": 12}))),
            "small": "--seq-length 24 --max-query-length 8",
        }
    )


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """(the error, what is said) of a command that ends with status 2; None where it is accepted."""
    capsys.readouterr()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(pytest.raises(SystemExit, match="2"))
        main(["--task", *arguments], {})
        stack.pop_all()  # it is accepted
        return None
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    return stop.value.__cause__, said


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("arguments", "named"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_refused_and_what_works_instead_is_accepted(
    paths: Paths,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    named: str,
) -> None:
    monkeypatch.chdir(paths.words["folder"])  # in which what works may write
    words = paths.fill(arguments)
    error, said = refused(words, capsys)
    assert named.format(**paths.words) in said
    assert "warning: nothing of the models" not in said
    if isinstance(error, UsageError) and error.works:
        assert error.flag.startswith(named.partition(" ")[0])
        place = words.index(error.flag) if error.flag in words else len(words)
        rest = words[place + 1 :]
        while rest and not rest[0].startswith("--"):
            rest.pop(0)
        again = refused([*words[:place], *error.works, *rest], capsys)
        assert again is None or not again[1].startswith(f"error: {error.flag}")


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
        (b'[{"text_a": "a"}]', "item 0"),
        (b'[{"text_a": 1, "text_b": "b", "label": "neutral"}]', "item 0"),
        (b'[["a", "b", "neutral"]]', "item 0"),
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
def test_a_file_that_is_not_as_released_is_refused_by_its_name_and_place(
    tmp_path: Path, task: str, content: Any, place: str
) -> None:
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
    with pytest.raises((ValueError, OSError)) as refused:
        module.prepare(parse(module.Settings, words, {}), {"config": config}, tokenizer)
    named, _, said = str(refused.value).partition(str(file))
    assert named == "--valid-data "
    assert place in said
