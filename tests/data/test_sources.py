"""--data-path: what it names, and what does not fit together; files that appear whole or not at
all."""

import errno
import hashlib
import json
import warnings
from fractions import Fraction
from pathlib import Path
from random import Random
from typing import Any

import pytest

from megatron.data.files import PIECE, PIECES, atomic_writer, sampled_sha256, write_atomically
from megatron.data.sources import SAMPLED_CHUNK, SAMPLED_CHUNKS, find_tokenizer, open_corpus
from tests.data.samples import (
    PlainTokenizer,
    change,
    forget_samples,
    write_data,
    write_data_of_tokenizer,
    write_sentences,
)
from tests.refusals import field_of, refusal


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_data(tmp_path / "p", [[1, 2, 99, 0]])
    return str(tmp_path / "p")


def test_data_set_and_tokenizer(prefix: str) -> None:
    Path(prefix).mkdir()  # a folder of its name is not read in its place
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tokenizer, size in [(PlainTokenizer(), None), (PlainTokenizer(), 128), (None, 100)]:
            corpus = open_corpus([prefix], tokenizer, size)
            assert (corpus.vocab_size, corpus.eod, corpus.fingerprint) == (size or 100, 0, "f")
    corpus = open_corpus(["0.3", prefix, "7e-1", prefix], None)
    assert [source.weight for source in corpus.sources] == [Fraction(3, 10), Fraction(7, 10)]


def test_identity(tmp_path: Path, prefix: str) -> None:
    """Moved files and weights of the same ratio are the same; other tokens or weights are not."""
    write_data(tmp_path / "q", [[1, 2, 99, 0]])
    write_data(tmp_path / "r", [[1, 2, 98, 0]])
    same, other = str(tmp_path / "q"), str(tmp_path / "r")
    first = open_corpus(["1", prefix, "3", other], PlainTokenizer()).identity
    assert first["tokenizer"] == "f"
    assert [each[:14] for each in first["data"]] == ["1/4 of SHA-256", "3/4 of SHA-256"]
    assert open_corpus(["0.25", same, "0.75", other], PlainTokenizer()).identity == first
    for paths in (["2", prefix, "3", other], ["1", other, "3", other], [prefix]):
        assert open_corpus(paths, PlainTokenizer()).identity["data"] != first["data"]


@pytest.mark.parametrize(
    ("suffix", "changes"),
    [  # another token, or two documents that are cut elsewhere
        (".bin", [(0, b"\x05\0")]),
        (".idx", [(34 + 8 + 8, b"\x04\0"), (34, b"\x02\0\0\0\x03\0\0\0")]),
    ],
)
@pytest.mark.filterwarnings("ignore:.*json is not there")
def test_file_exchanged_under_its_sidecar(
    tmp_path: Path, suffix: str, changes: list[tuple[int, bytes]]
) -> None:
    """With samples in the sidecar it is refused, with both values, as a program without this
    project counts them; with an older sidecar, or none, the data set is another one."""
    prefix, file = tmp_path / "p", tmp_path / f"p{suffix}"

    def sample() -> str:
        content = file.read_bytes()
        return hashlib.sha256(str(len(content)).encode() + content).hexdigest()

    def identity() -> str:
        (found,) = open_corpus([str(prefix)], PlainTokenizer()).identity["data"]
        return str(found)

    for kind in ("new", "older", "none"):
        write_data(prefix, [[1, 2, 0], [3, 0]])
        if kind == "older":
            forget_samples(prefix)
        elif kind == "none":
            Path(f"{prefix}.json").unlink()
        before, was = identity(), sample()
        assert identity() == before
        for place, content in changes:
            change(prefix, suffix, place, content)
        if kind == "new":
            refusal(identity, str(file), sample(), was, field="--data-path")
        else:
            assert identity() != before
            assert identity().partition("; ")[0] == before.partition("; ")[0]


def test_sample_of_a_large_file(tmp_path: Path) -> None:
    file, count = tmp_path / "large", 3 * PIECES * PIECE + 5
    content = Random(0).randbytes(count)
    places = [(count - PIECE) * number // (PIECES - 1) for number in range(PIECES)]
    read = b"".join(content[place : place + PIECE] for place in places)
    assert read.endswith(content[-1:])
    file.write_bytes(content)
    expected = hashlib.sha256(str(count).encode() + read).hexdigest()
    assert sampled_sha256(file) == expected
    with file.open("r+b") as stream:
        stream.truncate(2**40)  # so long that reading all of it would never end
    assert sampled_sha256(file) != expected


@pytest.mark.parametrize(
    ("paths", "tokenizer", "size", "named"),
    [
        ("p", {"fingerprint": "other"}, None, "other p.json"),
        ("p", {"vocab_size": 200}, None, "200 100 p.json"),
        ("p", {"kind": "words"}, None, "words test p.json"),
        ("1 p 1 q", None, None, "100 p.json 300 q.json"),
        ("p", {}, 99, "99 --vocab-size 100"),
        ("nowhere", None, None, "nowhere.idx"),
        (".", None, None, "p q"),
        *((words, None, None, "0.3") for words in ("a b", "0.3 a 0.7", "0 a 1 b", "-1 a", "nan a")),
        ("", None, None, ""),
    ],
)
def test_refusals(
    tmp_path: Path,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
    paths: str,
    tokenizer: dict[str, Any] | None,
    size: int | None,
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_data(Path("q"), [[1]], vocab_size=300)
    made = None if tokenizer is None else PlainTokenizer(**tokenizer)
    error = refusal(lambda: open_corpus(paths.split(), made, size))
    assert field_of(error) == ("--vocab-size" if size else "--data-path")
    assert all(each in str(error) for each in named.split()), error


def test_without_sidecar(prefix: str) -> None:
    Path(f"{prefix}.json").unlink()
    with pytest.warns(UserWarning, match="p.json") as caught:
        corpus = open_corpus([prefix], PlainTokenizer())
    assert len(caught) == 1
    assert (corpus.vocab_size, corpus.eod, corpus.fingerprint) == (100, 0, "f")
    assert [each.partition("; ")[0] for each in corpus.identity["data"]] == ["1 of 8 bytes"]
    assert "--vocab-size" in str(refusal(lambda: open_corpus([prefix], None)))


@pytest.mark.parametrize("place", [0, 30 * SAMPLED_CHUNK, -1])
def test_ids_without_sidecar(tmp_path: Path, place: int) -> None:
    ids = [1] * (SAMPLED_CHUNKS * SAMPLED_CHUNK)
    ids[place] = 99
    write_data(tmp_path / "p", [ids])
    (tmp_path / "p.json").unlink()
    with pytest.warns(UserWarning, match="p.json"):
        error = refusal(lambda: open_corpus([str(tmp_path / "p")], None, 99))
    assert "id 99" in str(error)


@pytest.mark.parametrize("shuffled", [None, False, "older"])
def test_unshuffled_documents(tmp_path: Path, prefix: str, shuffled: bool | str | None) -> None:
    """An older sidecar has no entries for shards and shuffling."""
    paths = [str(tmp_path / name) for name in ("q", "r")]
    for path in paths:
        write_data(Path(path), [[1, 0]], shuffled=None if shuffled == "older" else shuffled)
        if shuffled == "older":
            content = json.loads(Path(f"{path}.json").read_text())
            del content["shards"], content["shuffled"]
            Path(f"{path}.json").write_text(json.dumps(content))
    # A sample of sentences is of one document.
    sentences = [[[1, 2], [3]]]
    write_sentences(tmp_path / "s", sentences, tokenizer_type="test", eod=0, shuffled=False)
    several = [paths[0], prefix, str(tmp_path / "s"), paths[1]]
    data_path = [word for path in several for word in ("1", path)]
    with pytest.warns(UserWarning, match=f"{paths[0]}, {paths[1]}: ") as caught:
        open_corpus(data_path, PlainTokenizer())
    assert len(caught) == 1


def test_end_marks(tmp_path: Path, prefix: str) -> None:
    write_data(tmp_path / "q", [[1, 2, 3]], eod=None)
    assert open_corpus(["1", prefix, "1", str(tmp_path / "q")], PlainTokenizer()).eod is None
    assert open_corpus(["1", prefix, "1", prefix], PlainTokenizer()).eod == 0


def test_tokenizer_beside_the_data(tmp_path: Path) -> None:
    for name, beside in (("a", False), ("b", True), ("c", True)):
        tokenizer = write_data_of_tokenizer(tmp_path / name, [[1, 2, 260]], beside=beside)
    (tmp_path / "c.tokenizer" / "vocab.json").write_text("never looked at")
    a, b, c = (str(tmp_path / name) for name in "abc")
    found = find_tokenizer(open_corpus(["1", a, "1", b, "1", c], None))
    assert (found.kind, found.fingerprint) == (tokenizer.kind, tokenizer.fingerprint)
    assert find_tokenizer(open_corpus([a], None)) is None
    (tmp_path / "b.json").unlink()  # a folder without it says nothing of the data set
    with pytest.warns(UserWarning, match="b.json"):
        assert find_tokenizer(open_corpus([b], None, 261)) is None


def test_another_tokenizer_beside_the_data(tmp_path: Path) -> None:
    write_data_of_tokenizer(tmp_path / "a", [[1, 2, 260]])
    corpus = open_corpus([str(tmp_path / "a")], None)
    merges = tmp_path / "a.tokenizer" / "merges.txt"
    merges.write_text(merges.read_text("utf-8").replace("i n\n", ""), encoding="utf-8")
    assert "a.tokenizer" in str(refusal(lambda: find_tokenizer(corpus)))
    merges.unlink()
    assert "merges.txt" in str(refusal(lambda: find_tokenizer(corpus)))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_full_disk(tmp_path: Path, code: int) -> None:
    file = tmp_path / "file"
    write_atomically(file, b"before")

    def fill() -> None:
        with atomic_writer(file) as stream:
            stream.write(b"twelve bytes")
            stream.flush()
            raise OSError(code, "as a write raises it")

    with pytest.raises(OSError, match="12") as stop:
        fill()
    assert (stop.value.errno, stop.value.filename) == (code, str(file))
    assert file.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [file]


def test_error_of_another_file(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, "full", "another")
    with pytest.raises(OSError, match="another") as stop, atomic_writer(tmp_path / "file"):
        raise error
    assert stop.value is error
