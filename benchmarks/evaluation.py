"""WikiText103's perplexity compared with a plain loop over transformers.

One GPT-2 of 4 layers, hidden size 256, 4 heads, 1,024 positions and GPT-2's 50,257 tokens, with the
same weights on both sides, in fp32. A turn reads the file, detokenises it, makes tokens and sums
the negative log-likelihood over windows of 1,024 tokens that do not overlap. The peer has
transformers' tokenizer, `GPT2LMHeadModel` and `cross_entropy`, one window at a time. Sums that
differ by more than a relative 1e-6 report nothing.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Column, Contender, Figures, Flags, Question, Rank, Turn, scratch
from benchmarks.peers import TRANSFORMERS, transformers_model
from benchmarks.steps import SEED
from megatron.config.checkpoint import TrainedConfig
from megatron.config.model import GPT2Config
from megatron.data.tokenizer import build_tokenizer
from megatron.models.build import build_model
from tasks.score import score_task
from tasks.wikitext103 import Settings, detokenise, prepare

DATA = Path(os.environ.get("MEGATRON_TEST_DATA", "data"))  # files that cannot be generated here
VOCABULARY, WINDOW = 50257, 1024
CONFIG = GPT2Config(
    num_layers=4, hidden_size=256, num_attention_heads=4, max_position_embeddings=WINDOW
)
OURS, RATIO = "WIKITEXT103", "its CPU seconds / transformers'"
BY_DOCUMENT = f"{OURS} --per-document"


def ours(rank: Rank, file: Path, tokenizer: Path, per_document: bool = False) -> Turn:
    mesh = rank.mesh()
    model = build_model(CONFIG, mesh, VOCABULARY, seed=SEED, dtype=torch.float32).eval()
    files = str(tokenizer / "vocab.json"), str(tokenizer / "merges.txt")
    byte_pairs = build_tokenizer("GPT2BPETokenizer", *files)
    trained = TrainedConfig(load="")
    settings = Settings(trained=trained, valid_data=file, per_document=per_document)
    positions = {"max_position_embeddings": WINDOW}
    manifest = {"config": {"model": positions, "data": {"seq_length": WINDOW}}}

    def turn() -> Figures:
        task = prepare(settings, manifest, byte_pairs)
        figures = score_task(task, model, mesh, 8, "WIKITEXT103")
        return {"nll": figures["nll"], "tokens": figures["num_tokens"]}

    return turn


def transformers(rank: Rank, file: Path, tokenizer: Path) -> Turn:
    from transformers import GPT2Tokenizer

    model: Any = transformers_model(CONFIG, VOCABULARY).to(rank.device).eval()
    files = {"vocab": str(tokenizer / "vocab.json"), "merges": str(tokenizer / "merges.txt")}
    byte_pairs = GPT2Tokenizer(**files)

    @torch.no_grad()
    def turn() -> Figures:
        text = detokenise(file.read_text(encoding="utf-8"))
        ids = torch.tensor(byte_pairs(text)["input_ids"], device=rank.device)
        nll = 0.0
        for start in range(0, len(ids) - 1, WINDOW):
            window = ids[start : start + WINDOW + 1]
            logits = model(window[None, :-1]).logits[0]
            nll += torch.nn.functional.cross_entropy(logits, window[1:], reduction="sum").item()
        return {"nll": nll, "tokens": len(ids)}

    return turn


def contenders(
    flags: Flags,
    wikitext_data: Path = DATA / "wikitext103/wiki.valid.tokens",
    characters: int = 100_000,
    tokenizer: Path = DATA / "gpt2",
) -> Iterator[Contender]:
    """Compare the two; by default, files are in the folder MEGATRON_TEST_DATA.

    characters: of the file, from its start. tokenizer: folder with vocab.json and merges.txt.
    """
    file = scratch() / "wiki.tokens"
    file.write_text(wikitext_data.read_text(encoding="utf-8")[:characters], encoding="utf-8")
    given: dict[str, Any] = {"file": file, "tokenizer": tokenizer.resolve()}
    yield Contender("transformers", transformers, given, needs=[TRANSFORMERS])
    for name, more in ((OURS, {}), (BY_DOCUMENT, {"per_document": True})):
        yield Contender(name, ours, given | more, same={"nll": 1e-6})


QUESTION = Question(
    contenders,
    (
        Column("tokens/s", "tokens", "{:.1f}", per="wall"),
        Column(RATIO, "cpu", "{:.2f}", "its / first"),
        Column("CPU seconds", "cpu"),
        Column("seconds", "wall"),
    ),
    lambda found: (
        f"WIKITEXT103 takes {found.median('', OURS, RATIO):.2f} times the CPU seconds of a plain "
        f"loop over transformers, and {found.median('', BY_DOCUMENT, RATIO):.2f} times with "
        "`--per-document`."
    ),
    warm_up=0,
)

if __name__ == "__main__":
    QUESTION.run()
