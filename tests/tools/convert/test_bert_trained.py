"""What was pretrained here, or goes on here from what was imported."""

from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.format import read_manifest
from megatron.data.tokenizer import build_tokenizer
from tests.data.samples import write_sentences
from tests.programs import newest, pretrain
from tests.tools.convert.berts import write_bert, write_vocabulary
from tests.tools.convert.models import weights_of
from tools.convert_hf import export_model, import_model


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of sentences of random ids, with its vocabulary beside it."""
    tokenizer = build_tokenizer("BertWordPieceLowerCase", str(write_vocabulary(tmp_path)), None)
    random, prefix = np.random.default_rng(0), tmp_path / "some_text_sentence"
    documents = [random.integers(6, tokenizer.vocab_size, size=(7, 6)) for _ in range(30)]
    size, fingerprint = tokenizer.vocab_size, tokenizer.fingerprint
    write_sentences(prefix, documents, fingerprint=fingerprint, vocab_size=size)
    return prefix


def run(data: Path, words: str, world: int = 1) -> tuple[list[int], str]:
    """Exit codes of the ranks, and what they printed."""
    words = f"--vocab-file {data.with_name('vocab.txt')} --train-iters 3 {words}"
    folder = data.parent
    with pretrain(words, world=world, folder=folder, program="pretrain_bert", data=data) as each:
        return each.wait(), each.text()


@pytest.mark.parametrize("order", ["pre-ln", "post-ln"])
def test_what_was_trained_at_two_ranks_is_exported(tmp_path: Path, data: Path, order: str) -> None:
    """The export compares the logits of both programs."""
    words = f"--residual-order {order} --tensor-model-parallel-size 2 --save {tmp_path}/trained"
    codes, said = run(data, f"{words} --lr 1e-2 --lr-warmup-iters 0", world=2)
    assert codes == [0, 0], said
    assert len(list(newest(tmp_path / "trained").glob("shard_*"))) == 2
    export_model(str(tmp_path / "trained"), tmp_path / "back")
    norm = {"pre-ln": "bert.encoder.ln.bias", "post-ln": "bert.embeddings.LayerNorm.bias"}[order]
    assert weights_of(tmp_path / "back")[norm].any(), "3 steps have changed it"


def test_an_import_is_trained_on_and_never_resumed(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the flags that the import says."""
    import_model(str(write_bert(tmp_path / "hf", layer_norm_eps=1e-12)), tmp_path / "ours")
    told = next(line for line in capsys.readouterr().out.splitlines() if "--finetune" in line)
    flags = told.partition("--finetune")[2].replace("P_text_sentence", str(data))
    words = f"{flags} --save {tmp_path}/trained --lr 1e-30 --min-lr 0 --weight-decay 0"
    codes, said = run(data, words)
    assert codes == [2]
    assert "--finetune works" in said
    codes, said = run(data, f"--finetune {words} --residual-order pre-ln")
    assert codes == [2]
    assert "residual-order" in said
    codes, said = run(data, f"--finetune {words}")
    assert codes == [0], said
    manifest = read_manifest(newest(tmp_path / "trained"))
    imported = read_manifest(tmp_path / "ours" / "step_00000000")
    assert manifest["weights_of"] == imported["run"]
    export_model(str(tmp_path / "trained"), tmp_path / "back")
    one, other = weights_of(tmp_path / "hf"), weights_of(tmp_path / "back")
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)
