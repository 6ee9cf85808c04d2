"""The whole pipeline of the paper in miniature: `python -m tools.quickstart`.

plan.py lists the commands of each stage, stages.py runs them, report.py makes the page.
"""
