"""The report as one HTML page that needs no other file."""

from collections.abc import Sequence
from html import escape
from typing import Any

from tools.page import (
    NONE,
    decimal,
    document,
    duration,
    percent,
    row,
    section,
    table,
    tiles,
    whole,
)

Facts = dict[str, Any]

STYLE = """
.funnel th:last-child, .funnel td:last-child { text-align: left; }
.funnel td:first-child { white-space: normal; min-width: 9rem; }
.funnel td:last-child { font-size: .88rem; color: var(--soft); white-space: normal;
  min-width: 14rem; }
tr.ours td { font-weight: 600; }
.bar { height: .35rem; margin-top: .3rem; background: var(--train); border-radius: .2rem; }
svg { width: 100%; min-width: 32rem; height: auto; display: block; }
blockquote { margin: .8rem 0; padding: .7rem .9rem; background: var(--card);
  border-left: 3px solid var(--accent); border-radius: 0 .4rem .4rem 0; white-space: pre-wrap;
  overflow-wrap: anywhere; font: .92rem/1.5 ui-serif, Georgia, serif; }
"""

# name in the funnel, title of its row
STEPS = {
    "harvest": "Collect from this Python",
    "clean": "Clean",
    "dedup": "De-duplicate",
    "split": "Split",
}

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


def funnel(corpus: Facts) -> str:
    largest = max(step["input"]["bytes"] for step in corpus.values()) or 1
    rows = []
    for name, step in corpus.items():
        before, after = step["input"], step["output"]
        width = 100 * after["bytes"] / largest
        rows.append(
            f'<tr><td>{STEPS[name]}<div class="bar" style="width:{width:.1f}%"></div></td>'
            f"<td>{whole(before['documents'])}</td><td>{whole(after['documents'])}</td>"
            f"<td>{megabytes(before['bytes'])}</td><td>{megabytes(after['bytes'])}</td>"
            f"<td>{'<br>'.join(map(escape, remarks(name, step)))}</td></tr>"
        )
    head = ("step", "documents in", "out", "text in", "out", "why")
    unit = corpus["clean"]["unit_of_length"]
    note = (
        f"Lengths are counted in {unit} of GPT-2's pre-tokenizer: there are no tokens before there "
        "is a tokenizer. Text is counted in UTF-8 bytes, without the jsonl around it; ftfy's "
        "repairs change it a little."
    )
    return table(head, rows, "funnel") + f'<p class="soft">{escape(note)}</p>'


def remarks(name: str, step: Facts) -> list[str]:
    """What a step dropped and why, or how it dealt the documents."""
    lines = [
        f"{reason}: {whole(count['documents'])} ({megabytes(count['bytes'])})"
        for reason, count in step["dropped"].items()
    ]
    lines += ["first: {file}, byte {offset}: {reason}".format(**bad) for bad in step["bad_lines"]]
    if name == "harvest":
        sources = step["output"]["sources"]
        lines += [f"{source}: {whole(count['documents'])}" for source, count in sources.items()]
    if name == "clean":
        lines.append(f"repaired by ftfy: {whole(step['repaired'])}")
    if name == "split":
        lines += [
            f"{side}: {whole(count['documents'])} ({megabytes(count['bytes'])})"
            for side, count in step["sides"].items()
        ]
    return lines


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
    rows = [row((key.replace("_", " "), shown(value))) for key, value in settings.items()]
    times = [row((name, duration(seconds))) for name, seconds in facts["seconds"].items()]
    tables = table(("run", ""), rows) + table(("stage", "time"), times)
    return f'<div class="pair">{tables}</div>'


def commands(by_stage: dict[str, list[str]]) -> str:
    note = '<p class="soft">From the root of the repository, in this order.</p>'
    return note + "".join(
        f"<h3>{escape(stage)}</h3>" + "".join(f"<pre>{escape(line)}</pre>" for line in lines)
        for stage, lines in by_stage.items()
        if lines
    )


def device(layout: Facts) -> str:
    model, data = layout["tensor_parallel_size"], layout["data_parallel_size"]
    return f"{layout['device']}, tensor-parallel {model}, data-parallel {data}"


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}" if value < 100 else whole(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


def megabytes(number: int) -> str:
    return f"{number / 1e6:.2f} MB"
