"""Faults injected into a training, and what they cost."""
