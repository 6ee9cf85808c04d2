"""The benchmark of the sources of data: a whole run of it in miniature."""

import json
from importlib.util import find_spec
from pathlib import Path

from benchmarks import data
from tests.benchmarks.run import figures, run

SMALL = """--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16"""
DOCUMENTS, WORDS = 900, 40
SAMPLES, STEPS, BATCH = 32 * 64, 2, 4


def test_all_contenders_have_their_figures(tmp_path: Path) -> None:
    text = tmp_path / "text.jsonl"
    line = json.dumps({"text": " word" * WORDS})
    text.write_text(f"{line}\n" * DOCUMENTS)
    rows = {data.threads(name, 2): True for name in (data.LINES, data.SAVED, data.PARQUET)}
    rows |= {data.threads(name, 1): False for name in (data.PACKED, "mock")}
    cores = (data.CORE, f"{data.CORE}, 2 processes")
    flags = ["--text", text, "--vocab-size", 270, "--steps", STEPS, f"--program-flags={SMALL}"]
    record = run(tmp_path, "data", *flags, "--contenders", *rows, *cores)

    for row, is_padded in rows.items():
        found = figures(record, row, data.READING)
        assert found["tokens"] == SAMPLES * (WORDS + 1 if is_padded else 1024)
        assert found["places"] == SAMPLES * 1024
        assert min(found["opening"], found["reopening"], found["wall"][0]) > 0
        step = figures(record, row, data.TRAINING)
        assert step["tokens"] == step["places"] == STEPS * BATCH * 16
        assert step.get("cut") == (STEPS * BATCH if is_padded else None)
        assert 0 <= step["waiting"] < 1
        assert step["step"] > 0
    for row in cores:
        if find_spec("megatron.core") is None:
            assert f"{row} (not measured: not installed: megatron.core" in record["page"]
        else:
            assert figures(record, row, data.READING)["tokens"] == SAMPLES * 1024
    long, short = (100 * (1 - (WORDS + 1) / length) for length in (1024, 256))
    said = f"{long:.0f} % is padding at 1024 tokens and {short:.0f} % at 256"
    assert said in record["page"]
