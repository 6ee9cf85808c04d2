"""Probes of this machine: what a run here would use, and what is wrong with it.

findings.py collects facts and problems; machine.py and links.py yield them; description.py writes
what they measure, and times of a model's layers (layers.py), as a hardware file of the planner.
"""
