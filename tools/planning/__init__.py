"""What a training step takes, computed before it is run, for tools/plan.py. No torch here.

    L layers   h hidden size   a attention heads   s tokens of a sequence   V vocabulary
    b sequences of a micro-batch   m micro-batches of a step   n = b s tokens
    t tensor-parallel size   d data-parallel size   v vocabulary, padded to be cut into t

shape.py says what is planned in these letters, parameters.py which parameters a rank holds; from
these follow products.py (matrix products and FLOPs), communication.py (calls and bytes) and
memory.py. software.py says how many bytes other kernels move, hardware.py what a machine can do,
links.py how long an all-reduce takes there; timing.py puts the times together.
"""
