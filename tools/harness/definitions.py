"""Two tasks of lm-evaluation-harness on local files, where its data sets cannot be downloaded.

Each definition written here includes the harness's own and changes only the source of the data, so
prompt, target, detokenisation and metrics stay the harness's. The folder also works with the
harness's own command: lm_eval --include_path FOLDER.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron.libraries import load
from tasks.lambada import read_passages
from tasks.wikitext103 import cut_articles, read_articles

# Task: (its definition inside lm_eval/tasks, key of the text in its documents).
OWN = {
    "lambada_openai": ("lambada/lambada_openai.yaml", "text"),
    "wikitext": ("wikitext/wikitext.yaml", "page"),
}


def find_harness() -> Path:
    """The folder of the installed lm_eval. Raises MissingLibrary."""
    return Path(str(load("lm_eval").__file__)).parent


def read_pages(file: Path) -> list[str]:
    """WikiText: the raw file, cut before the title of every article."""
    return cut_articles(read_articles(file))


READERS: Mapping[str, Callable[[Path], list[str]]] = {
    "lambada_openai": lambda file: [text for _, text in read_passages(file)[1]],
    "wikitext": read_pages,
}


def write_definition(folder: Path, harness: Path, task: str, texts: Sequence[str]) -> None:
    """Write TASK.yaml and TASK.jsonl, its documents, into the folder.

    harness: the folder of lm_eval. The harness stores its copy of the documents in `folder`, too.
    """
    original, key = OWN[task]
    data = folder.resolve() / f"{task}.jsonl"
    data.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    definition = {
        "include": str(harness / "tasks" / original),
        "task": task,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {"test": str(data)},
            "cache_dir": str(data.with_name("cache")),
        },
        "training_split": None,
        "validation_split": None,
        "test_split": "test",
    }
    # JSON is valid YAML.
    (folder / f"{task}.yaml").write_text(json.dumps(definition, indent=1), encoding="utf-8")
