"""Tests of megatron/parallel/cpu, which the project also works without."""

try:
    import megatron.parallel.cpu  # noqa: F401

    collect_ignore_glob = []
except ImportError:
    collect_ignore_glob = ["test_*.py"]
