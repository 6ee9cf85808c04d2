"""Checks of what the programs here are given."""

from megatron.config.checks import UsageError


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UsageError(f"--{name.replace('_', '-')} {count}: 1 or more would work")
