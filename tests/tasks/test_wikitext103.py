"""WikiText103: the figures of a plain loop over transformers; the rules."""

import json
import re
from dataclasses import replace
from math import exp, log
from pathlib import Path

import numpy as np
import pytest

from megatron.config.checkpoint import TrainedConfig
from megatron.data.tokenizer import build_tokenizer
from tasks.protocol import Scores
from tasks.wikitext103 import Settings, choose_window, cut_articles, detokenise, prepare
from tests.data.samples import write_tokenizer
from tests.tasks.peer import POSITIONS, Peer, some_articles
from tests.tasks.program import figures_of, without_words


def nll_of_stream(peer: Peer, ids: list[int], length: int, stride: int) -> float:
    """The loop of the paper's appendix E: each token but the first once, in windows that start
    at the multiples of the stride."""
    total, done = 0.0, 1
    for start in range(0, len(ids), stride):
        window = ids[start : start + length + 1]
        end = start + len(window)
        if end <= done:
            break
        given = peer.log_probabilities(window[:-1])
        for place in range(done, end):
            total -= given[place - start - 1, ids[place]].item()
        done = end
    assert done == len(ids)
    return total


def nll_alone(peer: Peer, ids: list[int], length: int) -> float:
    """One article after an end mark, cut into windows of which the last reaches back."""
    total, done = 0.0, 0
    marked = [peer.tokenizer.eos_token_id, *ids]
    while done < len(ids):
        end = min(len(ids), done + length)
        first = max(0, end - length)
        given = peer.log_probabilities(marked[first:end])
        total -= sum(given[place - first, ids[place]].item() for place in range(done, end))
        done = end
    return total


@pytest.mark.parametrize(("length", "stride"), [(POSITIONS, POSITIONS), (96, 20)])
def test_figures_of_a_plain_loop(
    peer: Peer, test_data: Path, tmp_path: Path, length: int, stride: int
) -> None:
    text, file = some_articles(test_data), tmp_path / "wiki.tokens"
    file.write_text(text, encoding="utf-8")
    ids = peer.encode(detokenise(text))
    nll = nll_of_stream(peer, ids, length, stride)
    articles = cut_articles(text)
    alone = sum(nll_alone(peer, peer.encode(detokenise(each)), length) for each in articles)
    original = len(text.strip().split(" "))
    expected = {
        "token_perplexity": exp(nll / (len(ids) - 1)),
        "word_perplexity": exp(nll / original),
        "word_perplexity_authors_code": exp(nll / (original - 1)),
        "word_perplexity_plain_words": exp(nll / len(text.split())),
        "word_perplexity_per_document": exp(
            alone / sum(len(re.split(r"\s+", each)) for each in articles)
        ),
        "bits_per_byte": nll / log(2) / len(text.encode()),
        "bits_per_byte_detokenised": nll / log(2) / len(detokenise(text).encode()),
        "bits_per_byte_per_document": alone / log(2) / sum(len(a.encode()) for a in articles),
        "nll": nll,
    }
    words = ["--valid-data", str(file), "--load", str(peer.checkpoint), "--window", str(length)]
    words += ["--overlapping-eval", str(stride), "--per-document"]
    figures = figures_of("WIKITEXT103", 1, *words)
    assert {key: figures[key] for key in expected} == pytest.approx(expected, rel=1e-6)
    assert (figures["num_tokens"], figures["num_scored_tokens"]) == (len(ids), len(ids) - 1)
    assert (figures["window"], figures["stride"]) == (length, stride)
    assert figures["num_documents"] == len(articles) == 3
    assert len(without_words(figures)) == 19
    json.dumps(figures)
    once = figures_of("WIKITEXT103", 1, *words[:-1])  # the stream alone
    kept = {key: figures[key] for key in without_words(once)}
    assert without_words(once) == pytest.approx(kept, rel=1e-12)
    assert {key for key in without_words(figures) if "per_document" in key} == {
        *figures.keys() - once.keys()
    }


@pytest.mark.filterwarnings("error")
def test_window(tmp_path: Path) -> None:
    config = {"model": {"max_position_embeddings": 64}, "data": {"seq_length": 32}}
    settings = Settings(trained=TrainedConfig(load=""), valid_data=tmp_path)
    with pytest.warns(UserWarning, match="--window 32"):
        assert choose_window(settings, {"config": config}) == (64, 64)
    narrow = replace(settings, window=32, overlapping_eval=8)
    assert choose_window(narrow, {"config": config}) == (32, 8)


TEXTS = {
    "the lobsters ' claws": "the lobsters' claws",
    "it 's Mary 's": "it's Mary's",
    "60 @-@ year , 1 @,@ 200 m , 2 @.@ 5 km": "60-year, 1,200 m, 2.5 km",
    "one : two ; three . Four ! Five ? Six , x": "one: two; three. Four! Five? Six, x",
    "60 cm ( 24 in ) and [ sic ] or { x }": "60 cm (24 in) and [sic] or {x}",
    'only " lobster red " on': 'only "lobster red" on',
    "the ' quoted ' word": "the 'quoted' word",
    " \n = Title = \n \n = = Section = = \n": "\n= Title =\n\n== Section ==\n",
    "= = = Deep = = = \n= = = = Deeper = = = =": "=== Deep ===\n==== Deeper ====",
    "at 40 ° N 7 ° W": "at 40°N 7°W",
    "at 40 N 7 W": "at 40 1 7 W",
    "the end .": "the end .",
}


def test_detokenise() -> None:
    assert {text: detokenise(text) for text in TEXTS} == TEXTS


def test_cut_articles() -> None:
    text = " \n = One = \n \n text = x \n = = Part = = \n more \n = Two = \n end \n"
    one = " = One = \n \n text = x \n = = Part = = \n more "
    assert cut_articles(text) == [one, " = Two = \n end \n"]
    assert cut_articles("before \n = A = \n") == ["before ", " = A = \n"]


def test_perplexities(tmp_path: Path) -> None:
    """Every token has the log-probability -1. The paper counts the words of the file as released,
    which single blanks part."""
    text = " \n = Title = \n \n one  two three , four \n"
    (tmp_path / "wiki").write_text(text)
    trained, file = TrainedConfig(load=""), tmp_path / "wiki"
    settings = Settings(trained=trained, valid_data=file, per_document=True)
    tokenizer = build_tokenizer("GPT2BPETokenizer", *write_tokenizer(tmp_path))
    config = {"model": {"max_position_embeddings": 8}, "data": {"seq_length": 8}}
    task = prepare(settings, {"config": config}, tokenizer)
    counts = np.array([len(each.labels) - each.first for each in task.windows])
    figures = task.score(Scores(-1.0 * counts, counts, 0 * counts, counts < 0), [])
    tokens = len(tokenizer.encode(detokenise(text))) - 1  # the first is not predicted
    alone = sum(len(tokenizer.encode(detokenise(each))) for each in cut_articles(text))
    released = ["=", "Title", "=", "\n", "\n", "one", "", "two", "three", ",", "four"]
    expected = {
        "token_perplexity": exp(1),
        "word_perplexity": exp(tokens / len(released)),
        "word_perplexity_authors_code": exp(tokens / (len(released) - 1)),
        "word_perplexity_plain_words": exp(tokens / 8),
        "word_perplexity_per_document": exp(alone / (8 + 2)),
        "bits_per_byte": tokens / log(2) / len(text),
    }
    assert {name: figures[name] for name in expected} == pytest.approx(expected)
