"""The whole pipeline of the paper in miniature: `python -m tools.quickstart`.

plan.py says which commands make up each stage, stages.py runs them, report.py makes the page.
"""
