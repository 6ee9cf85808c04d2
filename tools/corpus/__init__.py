"""The corpus of the paper's section 4.1, one step per file.

Dumps become records (extract), text is cleaned, evaluation text is removed (decontaminate),
near-duplicates are removed (dedup), and the remaining documents are split and shuffled.

A step reads shards of JSON lines and writes a folder of new shards, with a manifest that accounts
for every document.  `python -m tools.corpus run FILE` runs all steps.

    shards, records, settings, program     files, documents and their counts, flags, messages
    step, tasks, units, manifest           an output folder that is filled once, whole, resumable
    scheduler                              processes of this machine, or a Dask cluster
"""
