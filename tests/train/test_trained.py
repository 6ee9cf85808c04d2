"""Programs that use a trained model refuse what does not fit it before torch comes."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from megatron.config import ParallelConfig
from megatron.config.checkpoints import seal
from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import GPT2BPETokenizer
from megatron.train.trained import open_trained
from tests.config.test_checks import settings
from tests.data.samples import write_tokenizer


@pytest.fixture
def trained(tmp_path: Path) -> TrainedConfig:
    """A checkpoint of 4 heads, of which only the manifest is there."""
    files = write_tokenizer(tmp_path)
    fingerprint = GPT2BPETokenizer(*files).fingerprint
    manifest = {
        "format": 2,
        "files": {},
        "tensors": {},
        "config": asdict(settings()),
        "vocab_size": 261,
        "tokenizer": fingerprint,
        "data": [],
    }
    (tmp_path / "step_00000002").mkdir()
    (tmp_path / "step_00000002" / "manifest.json").write_text(json.dumps(seal(manifest)))
    return TrainedConfig(load=str(tmp_path), vocab_file=files[0], merge_file=files[1])


def test_opens_what_fits(trained: TrainedConfig) -> None:
    parallel = ParallelConfig(tensor_model_parallel_size=2)
    folders, tokenizer, manifest = open_trained(trained, parallel, 2)
    assert folders[0] == Path(trained.load) / "step_00000002"
    assert manifest["tokenizer"] == tokenizer.fingerprint
    assert manifest["config"]["model"]["num_attention_heads"] == 4


@pytest.mark.parametrize(
    ("size", "world", "message"),
    [
        (2, 1, "--tensor-model-parallel-size 2 does not fit a world of 1 .*--nproc-per-node 2"),
        (3, 3, "--num-attention-heads 4 does not divide .*--tensor-model-parallel-size 2 would"),
    ],
)
def test_refuses_a_layout_that_does_not_fit(
    trained: TrainedConfig, size: int, world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        open_trained(trained, ParallelConfig(tensor_model_parallel_size=size), world)


def test_refuses_another_tokenizer(trained: TrainedConfig) -> None:
    merges = Path(trained.merge_file)
    merges.write_text(merges.read_text("utf-8").replace("i n\n", ""), encoding="utf-8")
    with pytest.raises(ValueError, match="--vocab-file .* are not the tokenizer"):
        open_trained(trained, ParallelConfig(), 1)


def test_needs_no_torch() -> None:
    program = "import sys, megatron.train.trained; sys.exit('torch' in sys.modules)"
    folder = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=folder, timeout=30).returncode == 0
