"""Probes of tools/doctor.py; each yields facts and problems."""
