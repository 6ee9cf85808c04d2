"""benchmarks/llama.py in miniature: all contenders train the same model (the harness compares their
losses) and have figures."""

from pathlib import Path

from benchmarks import llama
from tests.benchmarks.run import figures, run

SMALL = """--num-layers 2 --hidden-size 96 --ffn-hidden-size 192 --seq-length 32 --vocab-size 512"""


def test_all_contenders_train_the_same_model(tmp_path: Path) -> None:
    alone, several = (
        [llama.OURS, llama.TRANSFORMERS],
        [llama.OURS, llama.ALL_HEADS, llama.OWN_HEADS],
    )
    names = dict.fromkeys(alone + several)
    flags = ["--dtypes", "fp32", f"--program-flags={SMALL}", "--contenders", *names]
    record = run(tmp_path, "llama", *flags)
    for group, rows in (("fp32, t = 1", alone), ("fp32, t = 2", several)):
        for name in rows:
            found = figures(record, name, group)
            assert found["wall"][0] > 0
            assert found["peak_bytes"] > 0
