"""Kernels of our own for CPUs, where torch's are slow or inexact.

Everything works without this folder, in plain torch: parallel/kernels.py is all that knows of it,
and takes these where they apply.
"""
