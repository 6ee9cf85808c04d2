"""Checks of what the programs here are given."""

from megatron.config.checks import UsageError, flag


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UsageError(flag(name), count, "1 or more", works=(flag(name), "1"))
