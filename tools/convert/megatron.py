"""Megatron-LM's GPT-2 of 2019 and 2020: its shards on t model-parallel ranks to whole parameters.

    h hidden   a heads   d = h/a head size   p positions   v vocabulary, padded   t ranks

Linear layers are [out, in] in both. Biases of row-parallel layers, norms and position embeddings
are on every rank. The order of the 3h/t rows of a rank's query_key_value changed twice:

    checkpoint_version   none or 0          1                2 and later
    rows                 [3, a/t, d]        [a/t, d, 3]      [a/t, 3, d]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from megatron.config.model import ModelConfig
from tools.convert.ranks import Rank
from tools.convert.stored_args import section_of
from tools.convert.torch_file import StoredTensor

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = ("float32", "float16", "bfloat16")  # possible in a checkpoint of this project
ORDERS = ("[3, a/t, d]", "[a/t, d, 3]", "[a/t, 3, d]")  # by version; the last holds for later ones


@dataclass(frozen=True)
class Row:
    """Names of a tensor of theirs and of our parameter; {n} is the number of a layer.

    shape: whole shape of theirs. cut: its dim that is sharded over the ranks, None for a tensor
    that every rank has whole. order: whether its rows are Q, K and V in one of the orders above.
    """

    theirs: str
    ours: str
    shape: tuple[str, ...]
    cut: int | None = None
    order: bool = False


def _linear(
    theirs: str, ours: str, out: str, into: str, cut: int, order: bool = False
) -> list[Row]:
    """Rows for a weight [out, in], sharded along dim `cut`, and its bias, sharded if cut is 0."""
    weight = Row(f"{theirs}.weight", f"{ours}.weight", (out, into), cut, order)
    return [weight, Row(f"{theirs}.bias", f"{ours}.bias", (out,), None if cut else 0, order)]


def _norm(theirs: str, ours: str) -> list[Row]:
    return [Row(f"{theirs}.{name}", f"{ours}.{name}", ("h",)) for name in ("weight", "bias")]


LAYER = "layers.{n}."
# Determines names, shapes and cuts, and the check that every tensor is used exactly once.
TABLE = (
    Row("word_embeddings.weight", "word_embedding.weight", ("v", "h"), cut=0),
    Row("position_embeddings.weight", "position_embedding.weight", ("p", "h")),
    *_norm(LAYER + "input_layernorm", LAYER + "attention_norm"),
    *_linear(LAYER + "attention.query_key_value", LAYER + "attention.qkv", "3h", "h", 0, True),
    *_linear(LAYER + "attention.dense", LAYER + "attention.output", "h", "h", 1),
    *_norm(LAYER + "post_attention_layernorm", LAYER + "mlp_norm"),
    *_linear(LAYER + "mlp.dense_h_to_4h", LAYER + "mlp.up", "4h", "h", 0),
    *_linear(LAYER + "mlp.dense_4h_to_h", LAYER + "mlp.down", "h", "4h", 1),
    *_norm("final_layernorm", "final_norm"),
)


@dataclass(frozen=True)
class Entry:
    """One parameter of a given model: a row of the table with layer number and sizes filled in."""

    row: Row
    theirs: str
    ours: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """A checkpoint that was found consistent; none of its weights is read yet."""

    ranks: Sequence[Rank]
    section: ModelConfig
    entries: Sequence[Entry]
    vocab_size: int

    def __str__(self) -> str:
        """Facts that its files do not show by themselves: ranks, version and order of rows."""
        version = self.ranks[0].version
        order = ORDERS[min(int(version), 2)]
        ranks = f"{len(self.ranks)} model-parallel rank{'s' if len(self.ranks) > 1 else ''}"
        return f"{ranks}, checkpoint_version {version:g}, rows of Q, K and V in the order {order}"


def describe(ranks: Sequence[Rank], given: Mapping[str, Any], vocab_size: int) -> Model:
    """The model that these ranks hold. given: settings by name, None if the flag was not given.

    Raises ValueError, naming the file or the flag, if tensors are missing, surplus or of another
    shape, if the stored args, the flags and the tensors disagree, or if `vocab_size` does not fit
    the rows of the embedding.
    """
    sizes = _sizes(ranks)
    section = section_of(ranks, given, sizes)
    entries = list(_entries(section.num_layers, sizes))
    _check_names(ranks[0], entries)
    for entry in entries:
        _check_shape(entry, ranks)
    _check_dtypes(ranks)
    _check_vocabulary(sizes["v"], section.make_vocab_size_divisible_by, len(ranks), vocab_size)
    return Model(ranks, section, entries, vocab_size)


def read_weights(model: Model, entries: Iterable[Entry]) -> Iterator[tuple[str, Tensor]]:
    """(our name, whole tensor in its stored dtype) for each entry.

    Raises ValueError if a file is damaged, or if ranks differ in a tensor that each has whole.
    """
    for entry in entries:
        parts = [rank.tensors[entry.theirs].read() for rank in model.ranks]
        if entry.row.order:
            heads = model.section.num_attention_heads // len(parts)
            parts = [_in_order(part, heads, model.ranks[0].version) for part in parts]
        whole = _merge(entry, parts, model.ranks)
        yield entry.ours, whole[: model.vocab_size] if entry.row.shape[0] == "v" else whole


def _merge(entry: Entry, parts: Sequence[Tensor], ranks: Sequence[Rank]) -> Tensor:
    import torch

    if entry.row.order:
        return torch.cat(list(parts), dim=1)
    if entry.row.cut is not None:
        return torch.cat(list(parts), dim=entry.row.cut)
    for part, rank in zip(parts, ranks, strict=True):
        if not torch.equal(part, parts[0]):
            raise ValueError(
                f"{entry.theirs} differs between {ranks[0].file} and {rank.file}, though every "
                "rank has the whole of it; the ranks of one checkpoint would work"
            )
    return parts[0]


def _in_order(part: Tensor, heads: int, version: float) -> Tensor:
    """Reorders a rank's query_key_value [3h/t, ...] to [3, h/t, ...]. heads: number on the rank."""
    rest = part.shape[1:]
    size = part.shape[0] // (3 * heads)
    if version == 0:
        part = part.view(3, heads, size, *rest)
    elif version == 1:
        part = part.view(heads, size, 3, *rest).movedim(2, 0)
    else:
        part = part.view(heads, 3, size, *rest).movedim(1, 0)
    return part.reshape(3, heads * size, *rest)


def _sizes(ranks: Sequence[Rank]) -> dict[str, int]:
    """Sizes of the whole dims by their letters in the table, derived from the embeddings."""
    words = _matrix(ranks[0], "word_embeddings.weight")
    positions = _matrix(ranks[0], "position_embeddings.weight")
    h = positions.shape[1]
    v = words.shape[0] * len(ranks)
    return {"v": v, "p": positions.shape[0], "h": h, "3h": 3 * h, "4h": 4 * h}


def _matrix(rank: Rank, name: str) -> StoredTensor:
    if name not in rank.tensors:
        raise ValueError(f"{rank.file} has no {name}, so it is not of a GPT-2")
    if len(rank.tensors[name].shape) != 2:
        raise ValueError(f"{rank.file}: {name} has shape {list(rank.tensors[name].shape)}")
    return rank.tensors[name]


def _entries(num_layers: int, sizes: Mapping[str, int]) -> Iterator[Entry]:
    for row in TABLE:
        for n in range(num_layers if "{n}" in row.theirs else 1):
            ours = row.ours.format(n=n)
            ours = f"transformer.{ours}" if "{n}" in row.ours else ours
            shape = tuple(sizes[letter] for letter in row.shape)
            yield Entry(row, row.theirs.format(n=n), ours, shape)


def _check_names(rank: Rank, entries: Iterable[Entry]) -> None:
    """Raise ValueError unless entries and file have the same names: each tensor is used once."""
    expected = {entry.theirs for entry in entries}
    if missing := sorted(expected - rank.tensors.keys()):
        raise ValueError(f"{rank.file} has no {missing[0]}, which a GPT-2 needs")
    if surplus := sorted(rank.tensors.keys() - expected):
        raise ValueError(f"{rank.file} has a {surplus[0]}, which no GPT-2 of 2019 or 2020 has")


def _check_shape(entry: Entry, ranks: Sequence[Rank]) -> None:
    shape = list(entry.shape)
    if entry.row.cut is not None:
        if shape[entry.row.cut] % len(ranks):
            raise ValueError(f"{entry.theirs} {shape} cannot be cut over {len(ranks)} ranks")
        shape[entry.row.cut] //= len(ranks)
    for rank in ranks:
        if list(rank.tensors[entry.theirs].shape) != shape:
            raise ValueError(
                f"{rank.file}: {entry.theirs} is {list(rank.tensors[entry.theirs].shape)}, not "
                f"{shape}, as the embeddings and {len(ranks)} ranks ask for; the files of all "
                "ranks of one GPT-2 would work"
            )


def _check_dtypes(ranks: Sequence[Rank]) -> None:
    first = ranks[0].tensors["word_embeddings.weight"].dtype
    for rank in ranks:
        for name, tensor in rank.tensors.items():
            if tensor.dtype not in DTYPES or tensor.dtype != first:
                raise ValueError(
                    f"{rank.file}: {name} is {tensor.dtype}; all tensors of one of "
                    f"{', '.join(DTYPES)} would work"
                )


def _check_vocabulary(rows: int, divisible_by: int, ranks: int, vocab_size: int) -> None:
    """Check that the embedding has the tokenizer's number of rows, padded for this many ranks."""
    if rows < vocab_size:
        raise ValueError(
            f"the word embedding has {rows} rows, the tokenizer {vocab_size} ids; the --vocab-file "
            "and --merge-file that the model was trained with would work"
        )
    multiple = divisible_by * ranks
    padded = ceil(vocab_size / multiple) * multiple
    if rows != padded:
        raise ValueError(
            f"the word embedding has {rows} rows; the tokenizer's {vocab_size} ids, padded to a "
            f"multiple of {divisible_by} x {ranks} ranks, make {padded}; the --vocab-file and "
            "--merge-file that the model was trained with would work, or the "
            "--make-vocab-size-divisible-by"
        )
