"""Parts of `tools/compare_layouts.py` and of the tests of the layouts."""
