"""The corpus of the paper's section 4.1, one step per file.

Dumps become records (extract), text is cleaned, evaluation text is removed (decontaminate),
near-duplicates are removed (dedup), and the remaining documents are split and shuffled.

A step reads shards of JSON lines and writes a folder of new shards, with a manifest that accounts
for every document.  `python tools/corpus.py run FILE` runs all steps.

    engine       an output folder that is filled once, whole, resumable; its manifest
    files        shards, documents and their counts
    scheduler    processes of this machine, or a Dask cluster
    settings     flags of all steps, messages
    readers      published formats, for extract
    pipeline     the TOML file of a run; plan and run read it
"""
