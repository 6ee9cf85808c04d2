"""The corpus of the paper's section 4.1, one step a file: harvest, clean, dedup, split.

Every step reads and writes jsonl (`tools.corpus.jsonl`) and leaves a report of what it dropped.
"""
