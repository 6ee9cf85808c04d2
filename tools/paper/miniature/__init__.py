"""The paper in miniature: corpus, GPT-2, BERT, and the evaluations of section 5.

plan.py lists the commands of each stage, report.py puts the results beside the paper's.
"""
