"""The tokenizers: ids by hand, what marks and casing do, and files that do not fit."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.text_checks import count_casing
from megatron.data.tokenizer import (
    MARKS,
    BertTokenizer,
    BertWordPieceCase,
    BertWordPieceLowerCase,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    Tokenizer,
    build_tokenizer,
    file_flags,
    file_names,
    read_tokenizer,
)
from tests.data.samples import write_tokenizer, write_tokenizer_json, write_wordpiece
from tests.refusals import field_of, refusal
from tools.corpus.tokenize.encoders import PROBES

BPE, LOWER, CASED = "GPT2BPETokenizer", "BertWordPieceLowerCase", "BertWordPieceCase"
JSON = "HuggingFaceTokenizer"
TEXTS = [
    "the thing in the inn, then the end.",
    "  two  blanks\n\n\ttabs and <|endoftext|> spelled out; it's we'll 1234567",
    "Ünïcödé, 漢字, emoji 👩‍👩‍👧 and a nul \x00 byte",
    "",
]


@pytest.fixture
def bpe(tmp_path: Path) -> GPT2BPETokenizer:
    return GPT2BPETokenizer(*write_tokenizer(tmp_path))


@pytest.fixture
def wordpiece(tmp_path: Path) -> BertWordPieceLowerCase:
    return BertWordPieceLowerCase(write_wordpiece(tmp_path, "thing", "inn", "ea", "sep"))


@pytest.fixture
def described(tmp_path: Path) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(write_tokenizer_json(tmp_path / "json", config={}))


def test_merges_by_hand(bpe: GPT2BPETokenizer, tmp_path: Path) -> None:
    ids = json.loads((tmp_path / "vocab.json").read_text())
    tokens = ["the", "Ġ", "th", "in", "g"]
    assert bpe.encode("the thing") == [ids[token] for token in tokens]
    assert bpe.encode("in the") == [ids["in"], ids["Ġthe"]]
    assert (bpe.vocab_size, bpe.eod) == (261, 260)
    batch = bpe.encode_batch(TEXTS)
    assert batch == [bpe.encode(text) for text in TEXTS]
    assert [bpe.decode(each) for each in batch] == TEXTS
    assert not any(bpe.eod in each for each in batch)
    assert bpe.decode([bpe.eod]) == "<|endoftext|>"


def test_pieces_by_hand(wordpiece: BertWordPieceLowerCase, tmp_path: Path) -> None:
    tokens = (tmp_path / "vocab.txt").read_text().splitlines()
    ids = {token: number for number, token in enumerate(tokens)}
    expected = ["the", "thing", "##s", ",", "in", "##q", "e", "##l", "##a", "##n", "ea", "[UNK]"]
    assert wordpiece.encode("The things, INQ élan Éa 漢") == [ids[each] for each in expected]
    found = wordpiece.encode("[SEP] [sep]")  # text, not a mark
    assert [tokens[number] for number in found] == ["[", "sep", "]"] * 2
    assert wordpiece.vocab_size == len(tokens)
    marks = (wordpiece.pad, wordpiece.unknown, wordpiece.cls, wordpiece.sep, wordpiece.mask)
    assert marks == tuple(map(ids.__getitem__, MARKS))
    assert wordpiece.eod == wordpiece.sep
    assert wordpiece.is_continuation.tolist() == [token.startswith("##") for token in tokens]
    assert wordpiece.decode([ids["thing"], ids["##s"], ids["in"]]) == "things in"
    _, sizes = wordpiece.encode_arrays(["the", "\u200b \x00", "", "in"])
    assert sizes.tolist() == [1, 0, 0, 1]
    text = "  E\u0301a\x00 THINGS\t漢the"
    _, spans = wordpiece.offsets(text)
    pieces = [text[start:end] for start, end in spans]
    assert pieces == ["E\u0301a", "THING", "S", "漢", "the"]


def test_tokenizer_json_by_hand(described: HuggingFaceTokenizer, bpe: GPT2BPETokenizer) -> None:
    assert (described.vocab_size, described.eod, described.pad_id) == (263, 1, 2)
    for text in (*TEXTS, *PROBES, "a[EOT]b [PAD][BOT]"):
        ids = described.encode(text)
        assert ids == [number + 3 for number in bpe.encode(text)]
        assert described.encode_arrays([text])[0].tolist() == ids
        assert described.decode(ids) == text
    ends = [described.token_id("[BOT]"), *described.encode("in"), described.eod]
    assert described.decode(ends) == "[BOT]in[EOT]"


def test_token_ids(
    bpe: GPT2BPETokenizer, wordpiece: BertWordPieceLowerCase, described: HuggingFaceTokenizer
) -> None:
    table: list[tuple[Tokenizer, str, int, int | None, str]] = [
        (bpe, "<|endoftext|>", bpe.eod, None, "<|endoftext|"),
        (wordpiece, "[CLS]", wordpiece.cls, wordpiece.pad, "[CL]"),
        (described, "[BOT]", 0, 2, "[BOS]"),
    ]
    for tokenizer, token, number, pad, near in table:
        assert (tokenizer.token_id(token), tokenizer.pad_id) == (number, pad)
        assert token in str(refusal(lambda t=tokenizer, n=near: t.token_id(n)))
        assert "qqqqqqqqqq" in str(refusal(lambda t=tokenizer: t.token_id("qqqqqqqqqq")))


def change_json(folder: Path, **changes: Any) -> str:
    """The tokenizer.json in the folder, with these parts changed."""
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_bytes()) | changes))
    return str(file)


def added(*tokens: tuple[str, int], special: bool = True) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "added_tokens": [{"content": t, "id": n, "special": special, **flags} for t, n in tokens]
    }


def test_what_tokenizer_json_adds_cuts_and_pads(tmp_path: Path) -> None:
    folder = Path(write_tokenizer_json(tmp_path / "json"))
    plain = HuggingFaceTokenizer(str(folder))
    bot = {"SpecialToken": {"id": "[BOT]", "type_id": 0}}
    processor = {
        "type": "TemplateProcessing",
        "single": [bot, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"[BOT]": {"id": "[BOT]", "ids": [0], "tokens": ["[BOT]"]}},
    }
    padding = {"strategy": {"Fixed": 8}, "direction": "Right", "pad_to_multiple_of": None,
               "pad_id": 2, "pad_type_id": 0, "pad_token": "[PAD]"}  # fmt: skip
    truncation = {"max_length": 2, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}
    change_json(folder, post_processor=processor, padding=padding, truncation=truncation)
    other = HuggingFaceTokenizer(str(folder))
    assert other.encode_batch(TEXTS) == plain.encode_batch(TEXTS)
    assert other.encode_arrays(TEXTS)[1].tolist() == plain.encode_arrays(TEXTS)[1].tolist()
    assert other.fingerprint == plain.fingerprint


def test_mark_that_is_no_special_token(tmp_path: Path) -> None:
    folder = Path(write_tokenizer_json(tmp_path / "json"))
    file = change_json(folder, **added(("[EOT]", 1), ("[BOT]", 0), special=False))
    tokenizer = HuggingFaceTokenizer(file)
    assert tokenizer.eod == 1 not in tokenizer.encode("the[EOT]")
    assert tokenizer.encode("[BOT]") == [0]  # an added token like any other
    tokens = json.loads(Path(file).read_bytes())["added_tokens"]
    change_json(folder, added_tokens=[tokens[0], tokens[1] | {"special": True}])
    assert 0 not in HuggingFaceTokenizer(file).encode("[BOT]")


def test_ids_are_below_the_vocabulary_size(tmp_path: Path) -> None:
    folder = Path(write_tokenizer_json(tmp_path / "json"))
    file = change_json(folder, **added(("[EOT]", 1), ("<new>", 263), special=False))
    tokenizer = HuggingFaceTokenizer(file)
    assert tokenizer.vocab_size == 264
    assert tokenizer.encode("a<new>") == [tokenizer.token_id("a"), 263]
    model = json.loads(Path(file).read_bytes())["model"]
    with_a_gap = change_json(folder, model=model | {"vocab": model["vocab"] | {"zz": 290}})
    assert HuggingFaceTokenizer(with_a_gap).vocab_size == 291


EOS_BOT = {"eos_token": "[BOT]"}


@pytest.mark.parametrize(
    ("config", "special_map", "tokens", "marks"),
    [
        (None, None, [], ("[EOT]", "[PAD]")),
        (EOS_BOT, {"eos_token": "[PAD]"}, [], ("[BOT]", "[PAD]")),
        ({"eos_token": None}, {"eos_token": {"content": "[BOT]"}}, [], ("[BOT]", "[PAD]")),
        ({}, None, [("<pad>", 264), ("</s>", 263)], ("</s>", "<pad>")),
        ({}, None, [("<eos>", 263)], ("<eos>", "[PAD]")),  # [PAD] only in the vocabulary
    ],
)
def test_marks_of_the_files_beside(
    tmp_path: Path, config: Any, special_map: Any, tokens: Any, marks: tuple[str, str]
) -> None:
    folder = Path(write_tokenizer_json(tmp_path / "json", config=config))
    if special_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps(special_map))
    if tokens:
        change_json(folder, **added(*tokens))
    one, other = (HuggingFaceTokenizer(str(each)) for each in (folder, folder / "tokenizer.json"))
    assert one.files == other.files
    assert one.files.keys() == {file.name for file in folder.iterdir()}
    assert [one.eod, one.pad_id] == [one.token_id(mark) for mark in marks]


def test_marks_that_text_spells(tmp_path: Path) -> None:
    config = {"eos_token": {"content": "the"}, "pad_token": "th"}
    folder = write_tokenizer_json(tmp_path / "json", config=config)
    assert field_of(refusal(lambda: HuggingFaceTokenizer(folder))) == "--vocab-file"


def test_fingerprint_of_tokenizer_json(tmp_path: Path) -> None:
    folder = Path(write_tokenizer_json(tmp_path / "json"))
    file, content = folder / "tokenizer.json", json.loads((folder / "tokenizer.json").read_bytes())
    model = content["model"]
    same: list[dict[str, Any]] = [
        {"model": model | {"merges": [" ".join(pair) for pair in model["merges"]]}},
        {"model": {k: v for k, v in model.items() if v is not None and v is not False}},
        {"model": model | {"vocab": dict(reversed(model["vocab"].items()))}},
        {"decoder": None, "version": "1.0"},
    ]
    others: list[dict[str, Any]] = [
        {"model": model | {"merges": model["merges"][:-1]}},
        {"model": model | {"ignore_merges": True}},
        {"model": model | {"vocab": model["vocab"] | {"th": 262, "Ġthe": 260}}},
        {"normalizer": {"type": "NFC"}},
        {"pre_tokenizer": content["pre_tokenizer"] | {"add_prefix_space": True}},
        {"pre_tokenizer": content["pre_tokenizer"] | {"use_regex": False}},
        added(("[EOT]", 1), ("[PAD]", 2)),
    ]

    def fingerprint(changes: dict[str, Any]) -> str:
        file.write_text(json.dumps(content | changes, indent=3))
        return HuggingFaceTokenizer(str(file)).fingerprint

    first = fingerprint({})
    assert [fingerprint(changes) for changes in same] == [first] * len(same)
    assert len({first, *map(fingerprint, others)}) == 1 + len(others)
    file.write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "[PAD]"}')
    assert HuggingFaceTokenizer(str(file)).fingerprint != first


def test_fingerprint(tmp_path: Path) -> None:
    vocab_file, merge_file = map(Path, write_tokenizer(tmp_path))

    def fingerprint() -> str:
        return GPT2BPETokenizer(str(vocab_file), str(merge_file)).fingerprint

    first = fingerprint()
    vocabulary = json.loads(vocab_file.read_text())
    vocab_file.write_text(json.dumps(dict(reversed(vocabulary.items())), indent=1))
    merge_file.write_bytes(merge_file.read_bytes().replace(b"\n", b"\r\n"))
    assert fingerprint() == first
    merge_file.write_bytes(merge_file.read_bytes().replace(b"i n\r\n", b""))
    assert fingerprint() != first
    file, content = tmp_path / "vocab.txt", "\n".join([*MARKS, "1", "漢", ""]).encode()
    file.write_bytes(content)
    lower = BertWordPieceLowerCase(str(file)).fingerprint
    assert BertWordPieceCase(str(file)).fingerprint != lower
    file.write_bytes(content.replace(b"\n", b"\r\n"))
    again = BertWordPieceLowerCase(str(file))
    assert (again.fingerprint, again.vocab_size) == (lower, 7)


def test_made_again_from_its_files(
    bpe: GPT2BPETokenizer, wordpiece: BertTokenizer, described: HuggingFaceTokenizer, tmp_path: Path
) -> None:
    config = "tokenizer_config.json"
    expected = {BPE: ("vocab.json", "merges.txt"), LOWER: ("vocab.txt",), JSON: ("tokenizer.json",)}
    made: tuple[Tokenizer, ...] = (bpe, wordpiece, described)
    for tokenizer in made:
        assert file_names(tokenizer.kind) == expected[tokenizer.kind]
        assert tuple(n for n in tokenizer.files if n != config) == file_names(tokenizer.kind)
        origin = tmp_path / "json" if tokenizer is described else tmp_path
        folder = tmp_path / tokenizer.kind
        folder.mkdir()
        for name, content in tokenizer.files.items():
            assert content == (origin / name).read_bytes()
            (folder / name).write_bytes(content)
        again = read_tokenizer(tokenizer.kind, folder)
        assert (again.fingerprint, again.files) == (tokenizer.fingerprint, tokenizer.files)
        assert again.encode_batch(TEXTS) == tokenizer.encode_batch(TEXTS)
        name = file_names(tokenizer.kind)[-1]
        (folder / name).unlink()
        error = refusal(lambda kind=tokenizer.kind, place=folder: read_tokenizer(kind, place))
        assert all(each in str(error) for each in (folder.name, name, file_flags(tokenizer.kind)))


MARKED = "\n".join(MARKS)
NO_BYTES = {"type": "WordLevel", "vocab": {"[EOT]": 0, "a": 1, "[UNK]": 2}, "unk_token": "[UNK]"}
# The kind, its file, what stands in it (None: it is not given; of a tokenizer.json also the parts
# that are changed), and what the error names beside it.
REFUSED: list[tuple[str, str, bytes | dict[str, Any] | None, str]] = [
    (BPE, "merges.txt", None, ""), (BPE, "vocab.json", None, ""), (LOWER, "vocab.txt", None, ""),
    (JSON, "tokenizer.json", None, ""),
    *((BPE, "vocab.json", content, "or with --tokenizer-type HuggingFaceTokenizer")
      for content in (b"{", b"[]", b'{"a": 1}', b'{"a": [1]}', b'{"a": false}')),
    (BPE, "vocab.json", b'{"a": 0}', "vocab.json"),
    (BPE, "merges.txt", b"#version: 0.2\nq q\n", "line 2, 'q q'"),
    (BPE, "merges.txt", b"q\n", "line 1"),
    (BPE, "merges.txt", b"\xff\xfe", "merges.txt"),
    *((LOWER, "vocab.txt", content, "[MASK]")
      for content in (b"the\nin\n", b"[PAD]\n[UNK]\n[CLS]\n[SEP]\nthe\n", b'{"[PAD]": 0}', b"")),
    (LOWER, "vocab.txt", f"{MARKED}\nthe\nin\nthe\n".encode(), "'the' is in lines 6 and 8"),
    (LOWER, "vocab.txt", f"{MARKED}\n\nthe\n".encode(), "line 6"),
    (LOWER, "vocab.txt", b"\xff\xfe", "BERT's own vocab.txt"),
    (LOWER, "vocab.txt", f"{MARKED}\nThe\nin\na\n".encode(), CASED),
    (CASED, "vocab.txt", f"{MARKED}\nthe\nin\na\n".encode(), LOWER),
    *((JSON, "tokenizer.json", content, "tokenizer.json") for content in (b"{", b"[]", b"\xff")),
    *((JSON, "tokenizer.json", changes, "") for changes in (
        {"model": None}, {"model": {"type": "Other"}}, added(("[EOT]", -1)),
        {"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}, "added_tokens": []},
        {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []},
        {"model": NO_BYTES, "pre_tokenizer": {"type": "WhitespaceSplit"}},
    )),
    *((JSON, "tokenizer_config.json", content, "tokenizer_config.json") for content in (
        b'{"eos_token": "<none>"}', b'{"pad_token": ["[PAD]"]}', b"{", b"[]",
    )),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "content", "named"), REFUSED)
def test_files_that_do_not_fit(
    tmp_path: Path, kind: str, name: str, content: bytes | dict[str, Any] | None, named: str
) -> None:
    write_tokenizer(tmp_path)
    write_wordpiece(tmp_path)
    write_tokenizer_json(tmp_path)
    given: list[str | None] = [str(tmp_path / each) for each in file_names(kind)]
    flag = "--merge-file" if name == "merges.txt" else "--vocab-file"
    if content is None:
        index = file_names(kind).index(name)
        given[index] = "nowhere"
        refusal(lambda: build_tokenizer(kind, *[*given, None][:2]), "nowhere", field=flag)
        given[index] = None
    elif isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        change_json(tmp_path, **content)
    error = refusal(lambda: build_tokenizer(kind, *[*given, None][:2]))
    is_beside = name == "tokenizer_config.json"
    assert is_beside or field_of(error) == flag, error
    assert named in str(error)


def test_folders_that_do_not_fit(tmp_path: Path) -> None:
    folder = Path(write_tokenizer_json(tmp_path / "json"))
    model = json.loads((folder / "tokenizer.json").read_bytes())["model"]
    change_json(folder, model=model | {"dropout": 0.1})
    assert "dropout" in str(refusal(lambda: build_tokenizer(JSON, str(folder), None)))
    change_json(folder, model=model | {"dropout": 0.0})
    assert build_tokenizer(JSON, str(folder), None).eod == 1
    (folder / "tokenizer.json").unlink()
    assert field_of(refusal(lambda: build_tokenizer(JSON, str(folder), None))) == "--vocab-file"
    write_tokenizer(folder)
    assert BPE in str(refusal(lambda: build_tokenizer(JSON, str(folder), None)))


def test_flags_that_do_not_fit_the_kind() -> None:
    for kind in (CASED, JSON):
        refusal(lambda kind=kind: build_tokenizer(kind, "v", "m"), field="--merge-file")
    assert field_of(refusal(lambda: build_tokenizer("T5", "v", "m"))) == "--tokenizer-type"


def test_few_odd_tokens_make_no_cased_vocabulary(tmp_path: Path) -> None:
    """As <S> and <T> in the Chinese vocabulary."""
    words = [f"w{number}" for number in range(200)]
    vocab_file = write_wordpiece(tmp_path, "<S>", "<T>", *words)
    assert BertWordPieceLowerCase(vocab_file).vocab_size > 200


@pytest.mark.parametrize(("text", "counts"), [
    ("The cat", (1, 1)), ("the Cat", (1, 1)), ("the cat", (1, 0)), ("1 + 1 = 2", (0, 0)),
    ("\u043a\u043e\u0442 3", (1, 0)),  # Russian
    ("ThE 漢字かなカナ", (1, 1)), ("the 漢", (1, 0)), ("", (0, 0)),
    ("the 漢字かなカナ", (0, 0)),  # mostly letters that are never capitals
    ("საქართველო", (0, 0)),  # Georgian, whose capitals begin no word
])  # fmt: skip
def test_count_casing(text: str, counts: tuple[int, int]) -> None:
    assert count_casing([text]) == counts
    assert np.array_equal(count_casing([text, "", text]), 2 * np.array(counts))
