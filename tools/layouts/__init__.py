"""What `tools/compare_layouts.py` and the tests of the layouts are made of."""
