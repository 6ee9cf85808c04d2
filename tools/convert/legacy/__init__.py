"""Reads what other programs saved as pickles. Nothing that a pickle names is imported or called."""
