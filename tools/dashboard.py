"""Show a run in a browser while it trains.

python tools/dashboard.py runs/mine/own
python tools/dashboard.py runs/mine/own --port 8000 --against time
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

from pathlib import Path

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.report.dashboard import main

if __name__ == "__main__":
    main()
