"""Find what a run here would use, and what is wrong with it: see tools/doctor/__main__.py."""

if not __package__:  # run as a file, only tools/ is on the path
    __import__("start")

import os
import sys

from megatron.config.launch import interruptible
from tools.doctor.__main__ import main

if __name__ == "__main__":
    with interruptible(os.environ):
        sys.exit(main(sys.argv[1:], os.environ))
