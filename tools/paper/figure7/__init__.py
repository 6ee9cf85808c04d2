"""Figure 7 of the paper in miniature: pre-LN against post-LN at growing depth.

plan.py says which commands make up each stage, ending.py which ends of a training are a result,
report.py draws what they left.
"""
