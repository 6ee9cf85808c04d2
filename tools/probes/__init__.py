"""What tools/doctor.py looks at; each probe yields what it found and what is wrong."""
