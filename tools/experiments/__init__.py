"""Experiments: the quickstart, and figures 6 and 7 and the whole of the paper in miniature.

Each file has its settings, its commands and its report; runner.py runs the commands.
"""
