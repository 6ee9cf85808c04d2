"""Results of the paper at a size that two CPU cores can train: figure6/, figure7/, miniature/."""
