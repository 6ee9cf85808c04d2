"""Every dense architecture of transformers that has a plan is exact when it is cut by it."""

from collections import Counter

import pytest

from benchmarks.architectures import rows

# Dense ones that are not, and what they are told.
REFUSED = {
    "gemma3n": "timm",  # its vision tower is another library's, which the tests do not install
    "xmod, masked words": "language",  # which its config.json says, and its defaults do not
    "gemma4": "embed_tokens.weight is cut",  # it reads a row of it by itself
}
EXACT = {  # some of which there must be
    *("gpt2", "llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma", "gemma2", "phi3", "olmo2"),
    *("cohere", "granite", "apertus", "gemma3n_text", "opt", "bert, masked words"),
}


@pytest.mark.sweep
def test_dense_architectures_are_exact() -> None:
    found = {row.name: row for row in rows()}
    exact = {name for name, row in found.items() if row.outcome == "exact"}
    assert exact >= EXACT
    for name in exact:
        assert found[name].difference < 1e-12, found[name]
    for name, row in found.items():
        if name in REFUSED:
            assert REFUSED[name] in row.reason, row
        elif name not in exact:
            assert row.outcome == "refused", row
            assert "no layer here cuts" in row.reason, row
    assert Counter(row.outcome for row in found.values())["exact"] > 50
