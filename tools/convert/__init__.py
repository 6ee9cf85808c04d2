"""Checkpoints of others' programs, to this project's and back."""
