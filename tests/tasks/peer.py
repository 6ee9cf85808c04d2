"""A small GPT-2 of transformers with the real vocabulary, the same model as a checkpoint, and
pieces of the real task files."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from tasks.wikitext103 import cut_articles
from tools.convert_hf import import_model

POSITIONS = 256
COUNT = 24  # of passages


@dataclass(frozen=True)
class Peer:
    """`tokenizer` is that of transformers, for references; `checkpoint` is for --load."""

    model: Any
    tokenizer: Any
    checkpoint: Path

    @torch.no_grad()
    def log_probabilities(self, ids: Sequence[int]) -> Tensor:
        """[s, v] of what follows each token, in fp64 from logits in fp32: the sum over the
        vocabulary in fp32 has a bias that shows in the seventh digit of a perplexity."""
        return self.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer(text)["input_ids"] if text else []


def make_peer(folder: Path, gpt2: Path, lessons: Sequence[Sequence[str]]) -> Peer:
    """lessons: a context and the parts that follow it, which the model learns a little, so that
    it is right now and then."""
    torch.manual_seed(1234)
    config = transformers.GPT2Config(n_layer=2, n_embd=48, n_head=4, n_positions=POSITIONS)
    model = transformers.GPT2LMHeadModel(config).eval()
    files = {"vocab": str(gpt2 / "vocab.json"), "merges": str(gpt2 / "merges.txt")}
    tokenizer = transformers.GPT2Tokenizer(**files)
    teach(model, [[tokenizer(part)["input_ids"] for part in parts] for parts in lessons])
    model.save_pretrained(folder / "theirs")
    tokenizer.save_pretrained(folder / "theirs")
    import_model(str(folder / "theirs"), folder / "ours")
    return Peer(model, tokenizer, folder / "ours")


def teach(model: Any, lessons: Sequence[Sequence[list[int]]], rounds: int = 32) -> None:
    """Some steps on the answers alone, all lessons in each."""
    rows = [[token for part in parts for token in part] for parts in lessons]
    places = torch.arange(max(map(len, rows)))
    ids = torch.tensor([[*row, *[0] * (len(places) - len(row))] for row in rows])
    starts = torch.tensor([len(parts[0]) for parts in lessons])[:, None]
    ends = torch.tensor([len(row) for row in rows])[:, None]
    asked = (places >= starts - 1) & (places < ends - 1)
    answers = ids[(places >= starts) & (places < ends)]
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(rounds):
        logits = model.lm_head(model.transformer(ids).last_hidden_state[asked])
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(logits, answers).backward()
        optimizer.step()


def passages(data: Path) -> list[str]:
    """Half from the test set in JSON, half from the development set in plain text."""
    folder = data / "lambada"
    with (folder / "lambada_test_first500.jsonl").open(encoding="utf-8") as stream:
        found = [json.loads(next(stream))["text"] for _ in range(COUNT // 2)]
    with (folder / "lambada_development_plain_text.txt").open(encoding="utf-8") as stream:
        return found + [next(stream).removesuffix("\n") for _ in range(COUNT // 2)]


def lessons(data: Path) -> list[tuple[str, str, str]]:
    """For three passages in four: the context, the last word and what comes then: a mark, letters
    that make it another word, or a new word."""
    pairs = [text.rsplit(" ", 1) for text in passages(data)]
    ends = [".", "ish", None, " then"]
    return [
        (context, f" {word}", end)
        for number, (context, word) in enumerate(pairs)
        if (end := ends[number % 4]) is not None
    ]


def some_articles(data: Path, lines: int = 4) -> str:
    """The first lines of the first three articles of WikiText103's validation file."""
    text = (data / "wikitext103" / "wiki.valid.tokens").read_text(encoding="utf-8")
    parts = ["\n".join(each.split("\n")[:lines]) for each in cut_articles(text)[:3]]
    return " \n" + "\n".join(parts) + "\n \n"
