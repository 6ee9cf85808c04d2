"""Every dense architecture of transformers that has a plan is exact when it is cut by it."""

from collections import Counter

import pytest

from tools.experiments.architectures import rows

# Dense ones that are not, and the reason in the message.
REFUSED = {
    "gemma3n": "timm",  # its vision tower is another library's, which the tests do not install
    "xmod, masked words": "language",  # which its config.json says, and its defaults do not
}
EXACT = {  # some of which there must be
    *("gpt2", "llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma", "gemma2", "phi3", "olmo2"),
    *("cohere", "granite", "apertus", "gemma3n_text", "opt", "bert, masked words"),
}


@pytest.mark.sweep
def test_dense_architectures_are_exact() -> None:
    """Two unusual configurations of each, too."""
    found = {(row.name, row.changes): row for row in rows()}
    exact = {key for key, row in found.items() if row.outcome == "exact"}
    assert {name for name, changes in exact if not changes} >= EXACT
    unusual = Counter(name for name, changes in exact if changes)
    for key in exact:
        assert found[key].difference < 1e-12, found[key]
        assert key[0] in REFUSED or unusual[key[0]] == 2, key
    for (name, changes), row in found.items():
        if name in REFUSED and not changes:
            assert REFUSED[name] in row.reason, row
        elif (name, changes) not in exact:
            assert row.outcome == "refused", row
            assert "no layer here cuts" in row.reason, row
    assert len(exact) > 150
