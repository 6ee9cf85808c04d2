"""The machinery of `tools.corpus.dedup`: stages that share nothing but files.

    index.py      each document's signature cut into bands, its digests, id and place
    grouping.py   rows with equal keys, one band and one range of keys at a time
    pairs.py      candidate pairs out of the groups, each once
    sets.py       shingle sets of the candidates, and exact similarities
    clusters.py   what hangs together, who stays, and through whom the others go

Documents are known by numbers, in the order of the input.
"""
