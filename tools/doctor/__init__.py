"""Probes of this machine: what a run here would use, and what is wrong with it.

findings.py collects facts and problems; machine.py and links.py yield them; description.py writes
what they measure as a file of scripts/hardware/, for the planner.
"""
