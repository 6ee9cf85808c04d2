"""Figure 7 of the paper in miniature: pre-LN against post-LN at growing depth.

plan.py says which commands make up each stage, report.py draws what they left.
"""
