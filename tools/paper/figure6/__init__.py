"""Figure 6 and table 3 of the paper in miniature: GPT-2 at growing size, on the same tokens.

plan.py lists the commands of each stage, report.py draws the results, findings.py says in words
whether they show the order of the paper.
"""
