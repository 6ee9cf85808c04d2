"""Results of the paper at a size that two CPU cores can train: figure7/ and miniature/."""
