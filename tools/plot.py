"""Draw the curves of runs from their metrics.jsonl.

python tools/plot.py runs/mine/own
python tools/plot.py runs/small runs/large --against tokens --output curves.svg
python tools/plot.py runs/bert --term mlm_loss --output loss.png
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")


from tools.report.plot import main

if __name__ == "__main__":
    main()
