"""Show a run in a browser while it trains.

python tools/dashboard.py runs/mine/own
python tools/dashboard.py runs/mine/own --port 8000 --against time
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")


from tools.report.dashboard import main

if __name__ == "__main__":
    main()
