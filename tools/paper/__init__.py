"""Results of the paper at a size that two CPU cores can train; the code is in tools/experiments."""
