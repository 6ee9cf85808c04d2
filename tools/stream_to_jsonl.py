"""Write a stream of `datasets`, from the hub or from local files, to JSON lines.

    python tools/stream_to_jsonl.py --dataset-name allenai/c4 --dataset-config en \\
        --documents 100000 --output c4.jsonl
    python tools/stream_to_jsonl.py --dataset-name table.parquet --text-column body \\
        --output table.jsonl

Training does not read streams. The order of samples is a function of (seed, sample number), and a
stream has no access by number. A shuffled stream draws from a buffer, which a resumed run fills in
another order than the original run, and skipping what was read takes a pass over it. A file has
every document at a known position, so a run resumes exactly, at any layout.

Memory is bounded: it holds one row group of a parquet file. Only as much of the stream is read as
--documents needs. The file gets its name when it is complete; after a crash run the command again.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import glob
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from tqdm import tqdm

from megatron.config.parse import parse_call, whole_program
from megatron.data.files import atomic_writer
from megatron.data.json_lines import LONGEST_LINE
from megatron.data.map_style import check_column, load_named, one_line
from megatron.errors import UsageError
from megatron.libraries import Library

datasets, pa = Library("datasets"), Library("pyarrow")
orjson = Library("orjson")

NEW_FILE = "a new file named *.jsonl that no other run writes"


def stream_to_jsonl(
    dataset_name: str,
    output: Path,
    dataset_config: str | None = None,
    dataset_split: str | None = None,
    text_column: str = "text",
    documents: int | None = None,
) -> None:
    """Write a stream of documents to JSON lines {"text": ...}.

    Args:
        dataset_name: a data set on the hub, or a local folder or file (JSON, CSV, parquet, text).
        output: the file to write, FILE.jsonl; must not exist.
        dataset_config: the configuration, for a data set that has several.
        dataset_split: the split, by default train; train+test is possible, too.
        text_column: the column with the text.
        documents: write only this many documents, the first of the stream; by default all.
    """
    if documents is not None and documents < 1:
        raise UsageError("--documents", documents, "above 0")
    if output.suffix != ".jsonl" or output.exists():
        raise UsageError("--output", output, NEW_FILE)
    name = f"--dataset-name {dataset_name}"
    stream = load_named(dataset_name, config=dataset_config, split=dataset_split, streaming=True)
    texts = read_texts(stream, text_column, name)
    bytes_written = without = too_long = 0
    progress = partial(tqdm, unit=" documents", total=documents)
    with alone(output), atomic_writer(output) as file, progress() as bar:
        for text in texts:
            if not isinstance(text, str) or not text or text.isspace():
                without += 1
                continue
            line = orjson.dumps({"text": text}, option=orjson.OPT_APPEND_NEWLINE)
            if len(line) > LONGEST_LINE:  # readers of JSON lines would refuse it
                too_long += 1
                continue
            bytes_written += file.write(line)
            bar.update()
            if bar.n == documents:
                break
        if not bar.n:
            rows = f"{without + too_long} rows ({too_long} are longer than {LONGEST_LINE} bytes)"
            raise ValueError(
                f"{name} holds no text in any of its {rows}; another --text-column would work"
            )
    for number, why in ((without, "hold no text"), (too_long, f"are over {LONGEST_LINE} bytes")):
        if number:
            print(f"warning: {number} rows {why} and are left out", file=sys.stderr)
    print(f"{bar.n} documents, {bytes_written} bytes, in {output}")
    print(f"next: python pretrain_gpt2.py --data-path {shlex.quote(str(output))} --pad")


@contextmanager
def alone(output: Path) -> Iterator[None]:
    """Make this the only run that writes the file, and remove the remains of a killed run.

    Raises UsageError if another run is writing the file, or if it exists.
    """
    output.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(output.with_name(f".{output.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UsageError("--output", output, NEW_FILE) from None
    try:
        if output.exists():
            raise UsageError("--output", output, NEW_FILE)
        for left in output.parent.glob(f"{glob.escape(output.name)}.*.part"):
            left.unlink()
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def read_texts(stream: Any, column: str, name: str) -> Iterator[object]:
    """The value of the column in each row.

    Raises ValueError, naming the flag, if there is no such column, or if the stream breaks off.
    """
    rows = iter(stream)
    for number in count():
        try:
            row = next(rows, None)
        except (OSError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            reason = one_line(error.__cause__ or error)
            raise ValueError(f"{name} breaks off after {number} rows: {reason}") from error
        if row is None:
            return
        if not number:  # the first row shows the columns if the stream does not list them
            known = stream.features
            schema = known.arrow_schema if known else pa.Table.from_pylist([row]).schema
            check_column(column, schema, name)
        yield row.get(column)


if __name__ == "__main__":
    with whole_program(os.environ):
        parse_call(stream_to_jsonl, sys.argv[1:], os.environ)()
