"""The corpus of the paper's section 4.1, one step a file.

Dumps become records (extract), text is cleaned, evaluation text taken out (decontaminate),
near-duplicates removed (dedup), and what is left split and shuffled.

A step reads shards of JSON lines and fills a folder with more of them, and with a manifest that
accounts for every document.  `python -m tools.corpus run FILE` performs them all.

    shards, records, settings, program     files, documents and books, flags, messages
    step, tasks, units, manifest           an output folder that is filled once, whole, resumable
    scheduler                              processes of this machine, or a Dask cluster
"""
