from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def plain_instructions() -> Iterator[None]:
    """To find out what a CPU can do takes a compiler longer than these tests."""
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        yield
