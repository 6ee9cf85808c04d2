"""How scripts/docs.sh makes a site of the pages: Sphinx, MyST for Markdown, Furo for its looks."""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
project = html_title = "Megatron-LM, reproduced"
extensions = ["myst_parser"]
include_patterns = [
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "benchmarks/README.md", "tasks/README.md"),
    *("docs/*.md", "docs/results/*.md"),
]
root_doc = "README"
html_theme = "furo"
html_show_sphinx = html_show_copyright = html_copy_source = False
myst_heading_anchors = 3
# A link to a file of code leads to a copy of it; one to a folder leads nowhere in the site.
suppress_warnings = ["myst.xref_missing"]


def add_contents(_: Any, name: str, source: list[str]) -> None:
    """The side bar, in the order of docs/README.md."""
    if name == root_doc:
        index = (ROOT / "docs" / "README.md").read_text()
        pages = [f"docs/{each}" for each in dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", index))]
        pages += ["docs/README", "docs/results/README", "benchmarks/README", "tasks/README"]
        pages += ["CONTRIBUTING", "CHANGELOG"]
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"
    elif name == "docs/results/README":
        source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"


def setup(app: Any) -> None:
    app.connect("source-read", add_contents)
