"""Equal keys in sorted runs on disk: by part and in memory the same groups."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from tools.corpus import external


@pytest.mark.parametrize("parts", [1, 2, 64])
def test_groups_of_all_parts_are_those_of_a_plain_loop(tmp_path: Path, parts: int) -> None:
    draw = np.random.default_rng(0)
    pool = draw.integers(1 << 64, size=300, dtype=np.uint64)
    pool[:2] = 0, external.KEYS - 1
    blocks = [draw.choice(pool, (2, rows)) for rows in (1, 400, 250)]
    for number, block in enumerate(blocks):
        external.write_sorted(tmp_path / str(number), block)
    for column in range(2):
        expected = defaultdict(list)
        for row, key in enumerate(np.concatenate([block[column] for block in blocks]).tolist()):
            expected[key].append(row)
        found = []
        for part in range(parts):
            keys, numbers, first = [], [], 0
            for number, block in enumerate(blocks):
                some, rows = external.read_sorted(tmp_path / str(number), column, part, parts)
                keys.append(some)
                numbers.append(rows + first)
                first += block.shape[1]
            members, starts = external.group(np.concatenate(keys), np.concatenate(numbers))
            found += [each.tolist() for each in np.split(members, starts[1:-1]) if len(each)]
        assert found == [expected[key] for key in sorted(expected) if len(expected[key]) > 1]


def test_a_range_is_read_as_it_is_sliced(tmp_path: Path) -> None:
    for rows in (3, 5000):  # read at once, and by pages
        array = np.arange(2 * rows, dtype=np.int64).reshape(2, rows)
        external.save(tmp_path / "a.npy", array)
        where = external.span(array[1], rows + 1, rows + 3)
        assert where == slice(1, 3)
        assert (
            external.read(external.mapped(tmp_path / "a.npy"), where, 1).tolist()
            == array[1, 1:3].tolist()
        )
        assert external.span(array[0], 7, 7) in (slice(3, 3), slice(7, 7))
