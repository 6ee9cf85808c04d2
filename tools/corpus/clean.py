"""Text repaired by ftfy; documents kept that are English and long enough (section 4.1)."""

import multiprocessing
import os
import re
from dataclasses import dataclass
from pathlib import Path

import ftfy
import py3langid
from tokenizers.pre_tokenizers import ByteLevel

from tools.corpus.jsonl import Funnel, Record, placed, read_records, run, write_record

LANGUAGE_SAMPLE = 4000  # characters, half of them from the start, half from the middle
PRE_TOKENIZER = ByteLevel(add_prefix_space=False, use_regex=True)


@dataclass(frozen=True)
class Cleaned:
    record: Record
    before: str
    dropped: str | None  # the reason


def clean(
    input: tuple[Path, ...],
    output: Path,
    report: Path,
    min_pieces: int = 128,
    workers: int = len(os.sched_getaffinity(0)),
) -> None:
    """Repair text with ftfy and keep the English documents that are long enough.

    Args:
        input: jsonl files with a "text" in each line; other fields are kept as they are.
        output: the jsonl file to write, in the order of the input.
        report: a JSON file for what was dropped, and why.
        min_pieces: shortest document, in pieces of GPT-2's pre-tokenizer (there are no tokens
            before there is a tokenizer; a piece is one token or more).
        workers: processes.
    """
    funnel = Funnel("clean", language="en", min_pieces=min_pieces, unit="pre-tokenizer pieces")
    repaired = 0
    with placed(output) as file, multiprocessing.Pool(workers) as pool:
        jobs = ((record, min_pieces) for record in read_records(input, funnel))
        for result in pool.imap(examine, jobs, chunksize=32):
            if result.dropped is not None:
                funnel.drop(result.before, result.dropped)
                continue
            repaired += result.record["text"] != result.before
            write_record(file, result.record, funnel)
        funnel.check_output(f"English documents of {min_pieces} pieces or more would work")
    funnel.write(report, repaired_documents=repaired)


def examine(job: tuple[Record, int]) -> Cleaned:
    """Repair one document and find the reason to drop it, if there is one."""
    record, min_pieces = job
    text = repair(record["text"])
    reason = None
    if not is_english(text):
        reason = "not English"
    elif not has_pieces(text, min_pieces):
        reason = f"under {min_pieces} pieces"
    return Cleaned({**record, "text": text}, record["text"], reason)


# Lines of printable ASCII without an entity: ftfy leaves them as they are, at six times the cost.
PLAIN = re.compile(r"(?:[\t\x20-\x25\x27-\x7e]|&(?![#0-9A-Za-z]))*\n?")


def repair(text: str) -> str:
    """`ftfy.fix_text`, which works line by line, on the lines that it could change.

    Once a "<" has been seen ftfy takes the text for HTML and leaves its entities alone.
    """
    lines, markup = [], False
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        markup = markup or "<" in line
        plain = PLAIN.fullmatch(line)
        lines.append(line if plain else ftfy.fix_text(line, unescape_html=not markup))
    return "".join(lines)


def is_english(text: str) -> bool:
    """Whether English is the likeliest language of the document's start and middle."""
    half, middle = LANGUAGE_SAMPLE // 2, len(text) // 2
    sample = text if len(text) <= 2 * half else text[:half] + text[middle : middle + half]
    return py3langid.classify(sample)[0] == "en"


def has_pieces(text: str, least: int) -> bool:
    """Whether GPT-2's pre-tokenizer cuts the text into at least that many pieces.

    A prefix settles it for most long documents: cutting a text off can split its last piece only.
    """
    prefix = text[: 16 * least]
    if len(pieces(prefix)) > least:
        return True
    return len(pieces(text)) >= least


def pieces(text: str) -> list[tuple[str, tuple[int, int]]]:
    return PRE_TOKENIZER.pre_tokenize_str(text)


if __name__ == "__main__":
    run(clean)
