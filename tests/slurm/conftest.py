"""One cluster for all tests of a session, where one can be started."""

import os
from collections.abc import Iterator

import pytest

from tests.slurm.cluster import Cluster, missing

VARIABLE = "MEGATRON_TEST_SLURM"  # where it is set, no test of the cluster may be skipped


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        if os.environ.get(VARIABLE):
            pytest.fail(f"{VARIABLE} is set, but {reason}")
        pytest.skip(reason)
    with Cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
