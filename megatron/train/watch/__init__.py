"""The first failure is the message: who raised, died, left or hangs, and where it stood."""
