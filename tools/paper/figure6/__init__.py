"""Figure 6 and table 3 of the paper in miniature: GPT-2 at growing size, on the same tokens.

plan.py says which commands make up each stage, report.py draws what they left, findings.py says in
words whether the order of the paper is seen.
"""
