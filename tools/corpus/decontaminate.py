"""Removes evaluation text from a training corpus, and measures how much is there (section 4.1).

    python tools/corpus.py decontaminate --input clean --output kept --evaluation wiki.test.tokens
    python tools/corpus.py decontaminate --input clean --output kept --workers 8 \\
        --evaluation RACE lambada.jsonl

A Wikipedia article is dropped if it has the title of an article of the evaluation files (WikiText's
` = Title = `; compared, without case and white space, with the record's "title" or else the first
line of its text), or if one evaluation file has more than --article-overlap of its n-grams.  Such
a document is an evaluation article too: no two of WikiText103's validation articles share a
13-gram, and an article with one word in ten replaced still shares 19 % of its own (the median).

Any other text that has an n-gram of an evaluation file is cut there, as for GPT-3 (Brown et al.
2020, appendix C): the n-gram is removed with 200 characters on either side, and so are pieces under
--min-tokens.  Removed ranges that touch are one cut; a document with more than 10 cuts is dropped
as a whole.  Kept pieces have the ids ID-0, ID-1, ...; a single piece keeps ID.

Leakage is the share of an evaluation file's 8-grams that are found in the corpus, of all 8-grams
and of the distinct ones, before and after this step.  The paper found at most 10.8 % of
WikiText103's test set and 1.4 % of LAMBADA's.  tools/corpus/ngrams.py defines words and n-grams,
tools/corpus/evaluation.py defines evaluation files.
"""

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from megatron.config.checks import at_least, share
from megatron.data.json_lines import WORK
from megatron.errors import UsageError
from tools.corpus import files
from tools.corpus.clean import has_tokens, token_counter
from tools.corpus.engine import StepRun, map_units
from tools.corpus.evaluation import Evaluation, load_evaluation, normalise_title
from tools.corpus.ngrams import Found, Indices, Words, split_words
from tools.corpus.settings import LengthSettings, program, say, warn_of_unknown
from tools.report.numbers import aligned


@dataclass(frozen=True, kw_only=True)
class Settings(LengthSettings):
    evaluation: tuple[Path, ...]
    """Evaluation files: WikiText, LAMBADA, JSON, JSON lines, plain text."""

    ngram: int = 13
    """Length in words of the n-grams that a text may not share with an evaluation file."""

    on_overlap: Literal["cut", "drop"] = "cut"
    """Cut a document where it shares an n-gram, or drop it as a whole."""

    margin: int = 200
    """Characters that are removed on either side of an n-gram."""

    max_cuts: int = 10
    """A document with more cuts is dropped as a whole."""

    titles: tuple[Path, ...] = ()
    """More files with titles of articles to drop: WikiText, or one title per line."""

    article_sources: tuple[str, ...] = ("wikipedia",)
    """Sources from which evaluation articles are dropped."""

    article_overlap: float = 0.1
    """Share of n-grams above which a document of --article-sources is an evaluation article."""

    leakage_ngram: int = 8
    """Length in words of the n-grams that the leakage table counts."""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(self, ngram=1, leakage_ngram=1, margin=0, max_cuts=0)
        if not self.evaluation:
            raise UsageError(
                "--evaluation", None, "followed by files, such as WikiText's wiki.test.tokens"
            )
        share(self, "article_overlap")

    def load_evaluation(self) -> Evaluation:
        return load_evaluation(self.evaluation, self.titles, self.ngram, self.leakage_ngram)


def check(settings: Settings) -> None:
    token_counter(settings)  # raises an error if the files are no vocabulary
    settings.load_evaluation()


def run(settings: Settings) -> None:
    check(settings)
    evaluation = settings.load_evaluation()
    for each in evaluation.sets:
        if each.not_searched:
            say(
                f"warning: {each.name}: {each.not_searched} of {each.passages} passages have no "
                f"{settings.ngram} words in a row and are not searched for"
            )
    with StepRun("decontaminate", settings) as step:
        if step.done:
            return
        accounting, shards, counters = map_units(step, decontaminate_unit)
        leakage = leakage_table(evaluation, [marks_file(settings, unit) for unit in step.units])
        show(leakage, settings.leakage_ngram)
        step.finish(
            accounting,
            shards,
            evaluation=[each.facts() for each in evaluation.sets],
            titles={"known": len(evaluation.titles), "with_unk": evaluation.unknown_titles},
            documents_cut=counters["documents cut"],
            cuts=counters["cuts"],
            characters_cut=counters["characters cut"],
            leakage=leakage,
        )
        if settings.article_sources != Settings.article_sources:
            warn_of_unknown("--article-sources", settings.article_sources, accounting.input)


def marks_file(settings: Settings, unit: files.Unit) -> Path:
    return settings.output / WORK / "marks" / f"{unit.name}.zlib"


def decontaminate_unit(
    unit: files.Unit, settings: Settings, accounting: files.DocumentCounts, shard: files.ShardWriter
) -> dict[str, int]:
    """Write one shard, and the unit's marks.  Returns how much was cut."""
    evaluation = settings.load_evaluation()
    counters = Counter[str]()
    before, after = marks = np.zeros((2, len(evaluation.leak)), np.bool_)
    count_tokens = token_counter(settings)
    for document in files.read_documents(unit, accounting):
        record, text = document.record, document.text
        words = split_words(text)
        leaked = evaluation.leak.find(words.hashes).ids
        before[leaked] = True
        found = evaluation.cut.find(words.hashes)
        if reason := reason_to_drop(record, words, found, evaluation, settings):
            accounting.drop(record, reason)
            continue
        if not len(found.ids):
            after[leaked] = True
            accounting.keep(record)
            shard.write(document.line)
            continue
        cuts = find_cuts(words, found.positions, len(text), settings)
        if len(cuts) > settings.max_cuts:
            accounting.drop(record, f"over {settings.max_cuts} cuts")
            continue
        counters["documents cut"] += 1
        counters["cuts"] += len(cuts)
        counters["characters cut"] += sum(stop - start for start, stop in cuts)
        ends = [0, *(end for cut in cuts for end in cut), len(text)]
        pieces = [text[start:stop] for start, stop in zip(ends[::2], ends[1::2], strict=True)]
        pieces = [piece for piece in pieces if piece and not piece.isspace()]
        if not pieces:
            accounting.drop(record, "nothing left beside a cut")
            continue
        accounting.pieces += len(pieces) - 1
        kept = []
        for piece in pieces:
            if has_tokens(piece, settings.min_tokens, count_tokens):
                kept.append(piece)
            else:
                reason = f"piece under {settings.min_tokens} {settings.unit_of_length}"
                accounting.drop({**record, "text": piece}, reason)
        name = files.document_id(record)
        for k, text in enumerate(kept):
            piece = {**record, "id": f"{name}-{k}", "text": text}
            if len(kept) == 1:  # keeps the record's own id, of any type
                piece = {"id": name, **record, "text": text}
            after[evaluation.leak.find(split_words(piece["text"]).hashes).ids] = True
            accounting.keep(piece)
            shard.write(files.dump_record(piece))
    with files.scratch_writer(marks_file(settings, unit)) as file:
        file.write(zlib.compress(np.packbits(marks).tobytes(), 1))
    return counters


def reason_to_drop(
    record: files.Record, words: Words, found: Found, evaluation: Evaluation, settings: Settings
) -> str | None:
    """Reason to drop a document as a whole, before anything is cut; None to keep it."""
    if files.source_of(record) in settings.article_sources:
        title = record.get("title")
        if not isinstance(title, str) or not title:
            title = record["text"].lstrip().partition("\n")[0]
        if normalise_title(title) in evaluation.titles:
            return "title of an evaluation article"
        if overlap(words, found, evaluation) > settings.article_overlap:
            return "text of an evaluation article"
    if settings.on_overlap == "drop" and len(found.ids):
        return "evaluation text"
    return None


def overlap(words: Words, found: Found, evaluation: Evaluation) -> float:
    """Largest share of the document's n-grams that are in one evaluation set."""
    if not len(found.ids):
        return 0.0
    ngrams = len(words.hashes) - evaluation.cut.n + 1
    return max(float(np.isin(found.ids, each.ids).sum()) for each in evaluation.sets) / ngrams


def find_cuts(
    words: Words, positions: Indices, length: int, settings: Settings
) -> list[tuple[int, int]]:
    """Ranges to remove from a text, (start, stop) in characters; ranges that touch are merged.

    positions: word positions of the n-grams found, at least one.  length: of the text.
    """
    starts = np.maximum(words.starts[positions] - settings.margin, 0)
    stops = np.minimum(words.ends[positions + settings.ngram - 1] + settings.margin, length)
    apart = starts[1:] > stops[:-1]
    firsts = starts[np.append(True, apart)]
    lasts = stops[np.append(apart, True)]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


def leakage_table(
    evaluation: Evaluation, mark_files: Sequence[Path]
) -> dict[str, dict[str, float]]:
    """By evaluation set: its n-grams, and the shares of them that were found.

    mark_files: which of the leakage table's n-grams each unit has, bool [2, n]: before and after
    the step.
    """
    shape = (2, len(evaluation.leak))
    marks = np.zeros(shape, np.bool_)
    for path in mark_files:
        bits = np.frombuffer(zlib.decompress(path.read_bytes()), np.uint8)
        marks |= np.unpackbits(bits, count=marks.size).reshape(shape).astype(np.bool_)
    table: dict[str, dict[str, float]] = {}
    for each in evaluation.sets:
        before, before_distinct = each.leakage(marks[0])
        after, after_distinct = each.leakage(marks[1])
        table[each.name] = {
            "ngrams": int(each.leak_counts.sum()),
            "distinct_ngrams": len(each.leak_ids),
            "before": before,
            "before_distinct": before_distinct,
            "after": after,
            "after_distinct": after_distinct,
        }
    return table


def show(leakage: dict[str, dict[str, float]], n: int) -> None:
    columns = ("before", "before_distinct", "after", "after_distinct")
    rows = [["", *(column.replace("_", " ") for column in columns)]]
    rows += [[name, *(f"{facts[each]:.3%}" for each in columns)] for name, facts in leakage.items()]
    say(f"share of {n}-grams found in the corpus, of all and of the distinct ones:")
    say(aligned(rows, right=True))


if __name__ == "__main__":
    program("tools.corpus.decontaminate")
