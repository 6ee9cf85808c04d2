"""What a training step takes, computed before it is run, for tools/plan.py.

micro_batch.py runs the real model on meta tensors, of one and of two layers; trace.py derives what
a step of any depth computes, keeps and sends on one rank of any layout; timing.py says how long
that takes on a machine, which hardware.py reads from scripts/hardware/. software.py has the
authors' programs, counted in their source, and figure5.py what they took in section 5.1 of the
paper; figure3.py compares tensor-parallel modes, as figure 3 of the Colossal-AI paper. search.py
tries layouts, record.py writes and draws a plan, gantt.py a schedule.

    n = b s tokens of a micro-batch of b sequences   h hidden size   a attention heads
    L layers   V vocabulary   t tensor-parallel size   m micro-batches of a step
"""
