"""The report as one HTML page that needs no other file."""

from collections.abc import Sequence
from html import escape
from typing import Any

from tools.page import (
    CURVE_STYLE,
    FUNNEL_STYLE,
    NONE,
    commands,
    decimal,
    document,
    duration,
    funnel,
    megabytes,
    percent,
    row,
    section,
    table,
    tiles,
    whole,
)

Facts = dict[str, Any]

STYLE = (
    f"{FUNNEL_STYLE}{CURVE_STYLE}"
    """
tr.ours td { font-weight: 600; }
.pair td { white-space: normal; }
.pair td:last-child { overflow-wrap: anywhere; }
blockquote { margin: .8rem 0; padding: .7rem .9rem; background: var(--card);
  border-left: 3px solid var(--accent); border-radius: 0 .4rem .4rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font: .92rem/1.5 ui-serif, Georgia, serif; }
"""
)

CONVENTIONS = """
<p class="soft">Per token: exp of the mean negative log-likelihood over the {tokens} held-out
tokens of this run's tokenizer, each document's end mark included; GPT-2, bigram and unigram model
learnt from the same training tokens and predict the same tokens. Bigram: interpolated modified
Kneser-Ney. Per word: the same sum divided by the {words} words (between white space) of the text.
Bits per byte: the same sum in bits divided by the {bytes} UTF-8 bytes of the text; for xz, the
compressed size of the same text. Last-word cloze: the last word of a held-out paragraph,
told from what precedes it in the paragraph, counts when each of its tokens is the likeliest
one.</p>
"""


def page(facts: Facts, curve: str) -> str:
    """The whole page. facts: report.json; curve: an SVG element."""
    sections = [
        ("Corpus", funnel(facts["corpus"])),
        ("Loss", f'<div class="scroll">{curve}</div>'),
        ("Evaluation on held-out documents", evaluation(facts["evaluation"])),
        ("Samples", samples(facts["samples"])),
        ("Layout and throughput", layout(facts)),
        ("Commands", commands(facts["commands"])),
    ]
    body = "".join(section(title, content) for title, content in sections)
    return document("GPT-2 from raw text", STYLE, headline(facts) + body)


def headline(facts: Facts) -> str:
    scores, training, corpus = facts["evaluation"], facts["training"], facts["corpus"]
    ours, bigram = scores["token_perplexity"], scores["bigram_perplexity"]
    verdict = "beats" if ours < bigram else "<b>does not beat</b>"
    numbers = [
        (decimal(ours), "perplexity per token", f"bigram {decimal(bigram)}"),
        (decimal(scores["bits_per_byte"], 3), "bits per byte",
         f"xz -9 {decimal(scores['xz_bits_per_byte'], 3)}"),
        (percent(scores["cloze_accuracy"]), "last-word cloze", "every token the likeliest"),
        (whole(training["tokens_per_second"]), "tokens per second",
         f"{device(facts['layout'])}"),
        (megabytes(corpus["split"]["sides"]["train"]["bytes"]), "of training text",
         f"{whole(corpus['split']['sides']['train']['documents'])} documents"),
        (duration(sum(facts["seconds"].values())), "in all", f"{training['steps']} steps"),
    ]  # fmt: skip
    return (
        f"<p>On documents it has not seen, the trained model {verdict} a bigram model of the same "
        f"training tokens: perplexity {decimal(ours)} against {decimal(bigram)}.</p>"
        + tiles(numbers)
    )


def evaluation(scores: Facts) -> str:
    rows = [
        row(
            (
                "GPT-2, this run",
                decimal(scores["token_perplexity"]),
                decimal(scores["word_perplexity"]),
                decimal(scores["bits_per_byte"], 3),
                percent(scores["cloze_accuracy"]),
            ),
            "ours",
        ),
        row(("bigram", decimal(scores["bigram_perplexity"]), NONE, NONE, NONE)),
        row(("unigram", decimal(scores["unigram_perplexity"]), NONE, NONE, NONE)),
        row(("xz -9", NONE, NONE, decimal(scores["xz_bits_per_byte"], 3), NONE)),
    ]
    head = ("", "perplexity per token", "per word", "bits per byte", "last-word cloze")
    sizes = {key: whole(scores[key]) for key in ("tokens", "words", "bytes")}
    return table(head, rows) + CONVENTIONS.format(**sizes)


def samples(texts: Sequence[Facts]) -> str:
    return "".join(
        f"<blockquote><b>{escape(s['prompt'])}</b>{escape(s['text'].removeprefix(s['prompt']))}"
        "</blockquote>"
        for s in texts
    )


def layout(facts: Facts) -> str:
    settings = facts["layout"] | facts["training"]
    if commit := settings.get("commit"):
        name, dirty, _ = commit.partition("-dirty")
        settings["commit"] = name[:12] + dirty
    rows = [row((key.replace("_", " "), shown(value))) for key, value in settings.items()]
    times = [row((name, duration(seconds))) for name, seconds in facts["seconds"].items()]
    tables = table(("run", ""), rows) + table(("stage", "time"), times)
    return f'<div class="pair">{tables}</div>'


def device(layout: Facts) -> str:
    model, data = layout["tensor_parallel_size"], layout["data_parallel_size"]
    return f"{layout['device']}, tensor-parallel {model}, data-parallel {data}"


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.4f}" if value < 100 else whole(value)
    return f"{value:,}" if isinstance(value, int) else str(value)
