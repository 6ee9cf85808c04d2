"""Parts of `tools/compare_layouts.py`, `prove_plan.py` and `layouts.py`, and of the tests."""
