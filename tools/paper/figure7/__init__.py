"""Figure 7 of the paper in miniature: pre-LN against post-LN at growing depth.

plan.py lists the commands of each stage, ending.py decides which ends of a training are a result,
report.py draws the results.
"""
