"""The machinery of `tools.corpus.dedup`: stages that share only files.

    index.py      each document's signature cut into bands, its digests, id and location
    grouping.py   rows with equal keys, one band and one range of keys at a time
    pairs.py      candidate pairs out of the groups, each once
    sets.py       shingle sets of the candidates, and exact similarities
    clusters.py   connected documents, the one that stays, and the edges to the others

Documents are numbered in the order of the input.
"""
