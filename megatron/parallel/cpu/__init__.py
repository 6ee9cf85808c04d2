"""Our own kernels for CPUs, for cases where torch's are slow or inexact.

Everything works without this folder, in plain torch. Only parallel/kernels.py imports it, and uses
these kernels where they apply.
"""
