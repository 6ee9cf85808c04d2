import json
from pathlib import Path

from tools.corpus.evaluation import (
    Evaluation,
    hash_passage,
    load_evaluation,
    normalise_title,
    read_passages,
)
from tools.corpus.ngrams import split_words

WIKITEXT = """ 
 = M @-@ 82 ( Michigan highway ) = 
 
 One two <unk> three . 
 
 = = History = = 
 
 Four , five . 
 = Tikal <unk> = 
 
 Six . 
"""  # noqa: W291, W293, it is what such files are like


def place(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def load(*files: Path, ngram: int = 3, titles: tuple[Path, ...] = ()) -> Evaluation:
    return load_evaluation(files, titles, ngram, 2)


def test_an_article_of_wikitext_is_a_passage(tmp_path: Path) -> None:
    passages = read_passages(place(tmp_path, "wiki.tokens", WIKITEXT))
    assert [passage.split()[:4] for passage in passages] == [
        ["=", "M", "@-@", "82"],
        ["=", "Tikal", "<unk>", "="],
    ]
    assert "Four , five" in passages[0]


def test_titles_are_those_of_articles_without_unk(tmp_path: Path) -> None:
    listed = place(tmp_path, "more.txt", "Mount Elbert\n\nB of the Bang\n")
    found = load(place(tmp_path, "wiki.tokens", WIKITEXT), titles=(listed,))
    assert found.titles == {"m-82(michiganhighway)", "mountelbert", "bofthebang"}
    assert found.unknown_titles == 1


def test_titles_of_wikitext_and_of_wikipedia_agree() -> None:
    pairs = {
        "M @-@ 82 ( Michigan highway )": "M-82 (Michigan highway)",
        "Battle of Edson 's Ridge": "Battle of  Edson's Ridge ",
        "1 @,@ 000 Words": "1,000 words",
        "Section 2 @.@ 5": "Section 2.5",
    }
    for left, right in pairs.items():
        assert normalise_title(left) == normalise_title(right)
    assert normalise_title("C") != normalise_title("C++")


def test_plain_text_is_cut_at_blank_lines_or_else_at_lines(tmp_path: Path) -> None:
    paragraphs = place(tmp_path, "a.txt", "one\ntwo\n\nthree\n \nfour\n")
    assert read_passages(paragraphs) == ["one\ntwo", "three", "four"]
    assert read_passages(place(tmp_path, "b.txt", "one\ntwo\n")) == ["one", "two"]


def test_json_gives_its_text_or_else_all_its_strings(tmp_path: Path) -> None:
    lines = [
        {"text": "the text", "other": "left out"},
        {"article": "an article", "id": "x1", "options": [["a b", "c"]], "n": 3},
    ]
    expected = ["the text", "an article", "a b"]
    written = "".join(json.dumps(line) + "\n\n" for line in lines)
    assert read_passages(place(tmp_path, "a.jsonl", written)) == expected
    assert read_passages(place(tmp_path, "b.json", json.dumps(lines, indent=1))) == expected
    assert read_passages(place(tmp_path, "c.txt", json.dumps(lines[1]))) == expected[1:]


def test_tokenised_text_has_the_words_of_running_text() -> None:
    tokenised = "`` It was n't 0 @.@ 7 , '' said Edson 's well @-@ known dog ; they did N'T ."
    running = "\"It wasn't 0.7,\" said Edson's well-known dog; they didN'T."
    assert hash_passage(tokenised)[0].tolist() == split_words(running).hashes.tolist()


def test_an_unk_breaks_ngrams(tmp_path: Path) -> None:
    found = load(place(tmp_path, "a.txt", "a b c d <unk> e f g"))
    assert found.cut.find(split_words("a b c d e f g").hashes).positions.tolist() == [0, 1, 4]


def test_passages_that_are_too_short_are_counted(tmp_path: Path) -> None:
    path = place(tmp_path, "a.txt", "a b\nc d e\nf g <unk> h i\nj k l m\n")
    facts = load(path).sets[0].facts()
    assert facts == {
        "name": "a.txt",
        "passages": 4,
        "not_searched": 2,
        "words": 13,
        "distinct_ngrams": 3,
    }


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    path = place(tmp_path, "a.txt", "a b c")
    assert len(load(path).cut) == 1
    place(tmp_path, "a.txt", "a b c d e")
    assert len(load(path).cut) == 3
