"""Time, memory and communication of a training step, computed before it runs, for tools/plan.py.

micro_batch.py runs the real model on meta tensors, with one and with two layers. trace.py derives
the work, memory and communication of a step of any depth on one rank of any layout. timing.py
predicts its time on a machine, which hardware.py reads from scripts/hardware/. software.py has the
authors' programs, counted in their source; figure5.py predicts their times in section 5.1 of the
paper. figure3.py compares tensor-parallel modes, as in figure 3 of the Colossal-AI paper. search.py
varies a layout, layouts.py lists all, and fastest.py finds the best by the steps of quick.py.
record.py writes and draws a plan, gantt.py a schedule.

    n = b s tokens of a micro-batch of b sequences   h hidden size   a attention heads
    L layers   V vocabulary   t tensor-parallel size   m micro-batches of a step
"""
