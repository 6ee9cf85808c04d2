"""The files that the programs in this folder read, from a folder laid out as MEGATRON_TEST_DATA."""

from collections.abc import Iterable
from pathlib import Path

RACE_TRAIN = "race/RACE_train.tar.xz"
RACE_DEV = "race/RACE_dev.tar.xz"
WIKITEXT103 = "wikitext103/wiki.valid.tokens"
LAMBADA = "lambada/lambada_test_first500.jsonl"
BERT_VOCABULARY = "bert/vocab.txt"
FILES = (RACE_TRAIN, RACE_DEV, WIKITEXT103, LAMBADA)  # for a run from articles to table 3


def check_files(folder: Path, names: Iterable[str]) -> None:
    """Raises OSError, naming every file of the folder --data that is missing or empty."""
    if not folder.is_dir():
        raise NotADirectoryError(f"--data {folder} is not a folder; {expected(names)}")
    found = [folder / name for name in names]
    missing = [str(path) for path in found if not path.is_file() or not path.stat().st_size]
    if missing:
        raise FileNotFoundError(f"--data {folder} lacks {', '.join(missing)}; {expected(names)}")


def expected(names: Iterable[str]) -> str:
    return f"a folder with {', '.join(names)} would work"
