"""Documents in, whatever stands in the lines, and books that show when one is lost."""

import hashlib
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from megatron.data.json_lines import DEEPEST, parse_record
from tests.refusals import refusal
from tools.corpus.files import (
    Funnel,
    cut,
    document_id,
    dump_record,
    keyed_hash,
    read_documents,
    source_of,
)

EMPTY = [b'{"text": ""}', b'{"text": " \\n\\t\\u2003"}']
BAD = [
    *EMPTY,
    b"not json",
    b'{"text": "two"} {"text": "records"}',
    b'["a list"]',
    b"null",
    b'{"body": "no text"}',
    b'{"text": null}',
    b'{"text": ["a"]}',
    b'{"text": "\xff"}',
    b'{"text": "half \\ud83d"}',
    b'{"text": "\\ude00 half"}',
    b'{"text": "good", "title": "\\ud800"}',
    b'{"text": "good", "\\ud800": 1}',
    b'{"text": "good", "more": [{"a": ["\\ud800"]}]}',
    b'{"text": "raw \x00 byte"}',
    b'\x00{"text": "good"}',
    b"\x00" * 40,
    '{"text": "good"}'.encode("utf-16-le"),
    b'{"text": "good", "n": ' + b"1" * 5000 + b"}",
    b'{"text": "good", "n": 1e30, "more": ' + b"[" * 201 + b"]" * 201 + b"}",
]


def nested(depth: int) -> bytes:
    """A record of that many levels, itself the first."""
    return b'{"text": "good", "more": ' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


@pytest.mark.parametrize("depth", [DEEPEST + 2, 254, 255, 1000, 1023, 1024, 1025, 10**6])
def test_deep_nesting_is_set_aside_and_ends_no_run(depth: int) -> None:
    assert str(DEEPEST) in str(refusal(partial(parse_record, nested(depth))))


def test_what_is_read_can_be_written_at_any_depth_that_is_taken() -> None:
    for depth in range(2, DEEPEST + 2):
        for more in (b"", b', "n": 123456789012345678901234567890'):
            record = parse_record(nested(depth)[:-1] + more + b"}")
            assert parse_record(dump_record(record)) == record


@pytest.mark.parametrize(
    "more",
    [
        b'"n": 18446744073709551615',
        b'"n": 18446744073709551616',
        b'"n": -9223372036854775809',
        b'"n": [0, {"a": 123456789012345678901234567890123456789}]',
        b'"n": 123456789012345678901234567890, "name": "sch\xc3\xb6n"',
        b'"n": 1e300, "m": -0.0, "k": 1.5, "b": true, "z": null',
        b'"a": {"b": [{"c": "\xe2\x80\xa8 \\u0000 \\ud83d\\ude00"}, []], "": {}}',
        b'"a": "\\n \\r \\u000b \xc2\x85 \xe2\x80\xa8"',
        b'"a": "\\n \\r \\u000b \xc2\x85 \xe2\x80\xa8", "n": 123456789012345678901234567890',
    ],
)
def test_other_fields_survive_on_one_line(more: bytes) -> None:
    line = b'{"text": "good", ' + more + b"}"
    expected = json.loads(line)
    record = parse_record(line)
    assert repr(record) == repr(expected)
    written = dump_record(record)
    assert repr(json.loads(written)) == repr(expected)
    assert len(written.splitlines()) == 1


def test_numbers_that_json_does_not_have_do_not_cost_the_document() -> None:
    for number in (b"NaN", b"-Infinity", b"1e400"):
        record = parse_record(b'{"text": "good", "n": ' + number + b"}")
        assert json.loads(dump_record(record)) == {"text": "good", "n": None}


def test_the_last_of_duplicate_keys_counts_whoever_parses() -> None:
    assert parse_record(b'{"text": "a", "text": "b"}') == {"text": "b"}
    assert parse_record(b'{"text": "a", "text": "b", "n": NaN}')["text"] == "b"
    refusal(partial(parse_record, b'{"text": "a", "text": 3}'))


def test_every_line_is_a_document_or_set_aside_with_file_and_offset(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    good = b'{"text": "sch\\u00f6n", "source": "s"}'
    content, offsets = b"", []
    for line in BAD:
        content += good + b"\r\n\n"
        offsets.append(len(content))
        content += line + b"\n"
    path.write_bytes(content)
    for unit_bytes in (10, 300, 10**9):
        funnel = Funnel()
        documents = []
        for unit in cut([path], unit_bytes):
            for document in read_documents(unit, funnel):
                documents.append(document)
                funnel.keep(document.record)
        assert [document.line for document in documents] == [good] * len(BAD)
        assert all(content[each.offset :].startswith(good) for each in documents)
        rejected = list(funnel.rejected)
        assert [bad["offset"] for bad in rejected] == offsets
        assert {bad["file"] for bad in rejected} == {str(path)}
        assert all(bad["reason"] for bad in rejected)
        assert funnel.dropped["bad line"]["unnamed"].documents == len(BAD)
        assert funnel.input["s"].documents == funnel.output["s"].documents == len(BAD)
        assert funnel.input["s"].bytes == 6 * len(BAD)
        funnel.check("test")


def test_millions_of_bad_lines_are_listed_in_order_in_little_memory() -> None:
    funnel, more = Funnel(), Funnel()
    for k in range(30_000):
        funnel.set_aside("file", k, b"x", "no document")
    assert [bad["offset"] for bad in funnel.rejected] == list(range(30_000))
    more.set_aside("other", 7, b"x", "no document")
    next(iter(funnel.rejected))  # left in the middle
    funnel.add(more)
    *_, before, last = funnel.rejected
    assert (before["offset"], last["file"], len(funnel.rejected)) == (29_999, "other", 30_001)


def books(kept: int, dropped: int, pieces: int) -> Funnel:
    record = {"text": "a", "source": "s"}
    funnel = Funnel(pieces=pieces)
    for _ in range(5):
        funnel.enter(record)
    for _ in range(kept):
        funnel.keep(record)
    for _ in range(dropped):
        funnel.drop(record, "reason")
    return funnel


def test_books_balance_only_with_every_document_in_them() -> None:
    for kept, dropped, pieces in ((5, 0, 0), (2, 3, 0), (6, 1, 2), (0, 5, 0)):
        books(kept, dropped, pieces).check("step")
    for kept, dropped, pieces in ((4, 0, 0), (2, 4, 0), (5, 1, 0), (5, 0, 1)):
        with pytest.raises(RuntimeError):
            books(kept, dropped, pieces).check("step")


def test_funnels_add_up_and_travel_as_json() -> None:
    total = Funnel()
    for funnel in (books(2, 3, 0), books(6, 1, 2)):
        total.add(Funnel.from_json(json.loads(json.dumps(funnel.to_json()))))
    total.check("step")
    assert total.to_json() == {
        "input": {"documents": 10, "bytes": 10, "sources": {"s": {"documents": 10, "bytes": 10}}},
        "output": {"documents": 8, "bytes": 8, "sources": {"s": {"documents": 8, "bytes": 8}}},
        "dropped": {
            "reason": {"documents": 4, "bytes": 4, "sources": {"s": {"documents": 4, "bytes": 4}}}
        },
        "pieces": 2,
    }


@pytest.mark.parametrize("given", [None, ""])
def test_a_document_without_an_id_is_named_by_its_text(given: Any) -> None:
    text = "schön"
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    assert document_id({"text": text, "id": given}) == document_id({"text": text}) == name
    assert document_id({"text": "a", "id": "x"}) == "x"
    assert document_id({"text": "a", "id": 0}) == "0"
    assert source_of({"text": "a"}) == source_of({"text": "a", "source": None}) == "unnamed"


def test_keys_toss_independently_and_the_same_everywhere() -> None:
    assert keyed_hash("k", "schön") == 0x55D19794D2B4B4FFA15DED09C0ADF95E
    heads = [keyed_hash(key, str(k)) >> 127 for key in ("a", "b") for k in range(4000)]
    first, second = heads[:4000], heads[4000:]
    for tosses in (first, second, [a ^ b for a, b in zip(first, second, strict=True)]):
        assert abs(sum(tosses) - 2000) < 200
