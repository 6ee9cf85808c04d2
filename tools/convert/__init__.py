"""Converts checkpoints of other programs to this project's and back."""
