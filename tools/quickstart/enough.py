"""Whether a corpus is large enough to train on: `python -m tools.quickstart.enough`."""

import sys
from math import ceil
from pathlib import Path

from megatron.config.parse import parse, parse_call, user_errors
from megatron.config.pretrain import PretrainGPT2Config
from megatron.data.indexed import IndexedDataset
from megatron.data.order import split_documents
from tools.quickstart.plan import SPLIT


def enough(data_path: Path, preset: Path) -> None:
    """End with a message on how much text is needed, if there is not enough.

    Args:
        data_path: prefix of the data set that is to be trained on.
        preset: settings of model and training (TOML).
    """
    config = parse(PretrainGPT2Config, ["--preset", str(preset)], {})
    check_samples(IndexedDataset(str(data_path)), config.data.seq_length)


def check_samples(data: IndexedDataset, seq_length: int) -> None:
    """Raises ValueError unless training and validation each get a sample: seq_length + 1 tokens."""
    documents = data.num_documents
    parts = split_documents(SPLIT, documents)[:2] if documents > 1 else ()
    smallest = min((len(data.token_range(part)) for part in parts), default=0)
    if smallest > seq_length:
        return
    mean = data.num_tokens / documents
    advised = max(10 * ceil((seq_length + 1) / mean), 2 * documents)
    raise ValueError(
        f"the corpus is too small: {documents} documents with {data.num_tokens} tokens are left "
        f"to train on, and of the two parts, for training and (a tenth) for validation, the "
        f"smaller gets {smallest} tokens, where seq_length {seq_length} of --preset needs "
        f"{seq_length + 1}; about {advised} documents of this length, fewer longer ones, or a "
        "--preset of a smaller seq_length would work"
    )


if __name__ == "__main__":
    with user_errors({}):
        parse_call(enough, sys.argv[1:], {})()
