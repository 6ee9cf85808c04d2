"""Tasks made of numbers, that a small BERT learns in a second, and the BERT."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch

from megatron.checkpoint.load import model_slices
from megatron.checkpoint.save import save_checkpoint
from megatron.config.model import BertConfig, ModelConfig
from megatron.data.tokenizer import BertTokenizer, BertWordPieceLowerCase, build_tokenizer
from megatron.models.build import build_model
from megatron.parallel.mesh import serial_mesh
from megatron.parallel.sharding import ShardingSpec, TensorSlice
from megatron.train.machine import environment
from tasks.protocol import (
    ChecksConfig,
    Encoding,
    Example,
    FinetuneSettings,
    Finetuning,
    Head,
    Logits,
    by_evaluation,
)
from tests.data.samples import write_wordpiece

KEY, ALIKE = 20, 21  # what an example is about, and what is like it
FIRST, LAST = 24, 60  # of the other tokens
CLS, SEP = 3, 4
POSITIONS = 24
COUNT = 40


@dataclass(frozen=True, kw_only=True)
class Settings(FinetuneSettings):
    """Files hold the number of examples and then a seed; an evaluation is named after its file."""

    judged = "answers"
    hyper_parameters = (*FinetuneSettings.hyper_parameters, "head", "names")
    other_settings = (*FinetuneSettings.other_settings, "answers")

    seq_length: int = POSITIONS
    head: Head = "classifier"
    names: Literal["few", "more"] = "few"
    """Those of the classes."""
    answers: Path | None = None
    """Judged without a model."""
    checks: ChecksConfig = field(default_factory=ChecksConfig)


@dataclass(frozen=True, kw_only=True)
class Made(Finetuning):
    head: Head
    labels: tuple[str, ...]
    train: Sequence[Example]
    evaluations: Mapping[str, Sequence[Example]]
    best = "accuracy"
    conventions = MappingProxyType({"accuracy": "of all"})
    notes = MappingProxyType({"made": True})

    def score(self, logits: Logits) -> Mapping[str, Any]:
        found = {name: self.figures(name, each) for name, each in logits.items()}
        right = sum(each["parts"]["right"] for each in found.values())
        examples = sum(each["examples"] for each in found.values())
        return {**by_evaluation(found), "accuracy": right / examples}

    def figures(self, name: str, logits: Sequence[Any]) -> dict[str, Any]:
        examples = self.evaluations[name]
        right = [
            tuple(np.atleast_1d(scores.argmax(axis=0))) == example.label
            for example, scores in zip(examples, logits, strict=True)
        ]
        return {"accuracy": np.mean(right), "examples": len(right), "parts": {"right": sum(right)}}


def wordpiece(*words: str, kind: type[BertTokenizer] = BertWordPieceLowerCase) -> BertTokenizer:
    with TemporaryDirectory() as folder:
        return kind(write_wordpiece(Path(folder), *words))


class Watched(list[Example]):
    """Examples that a test sees being read in training."""

    def __getitem__(self, number: Any) -> Any:
        on_read()
        return super().__getitem__(number)


def on_read() -> None:
    """Tests put something else in its place."""


def make_examples(head: Head, count: int, seed: int) -> list[Example]:
    return [make_example(head, np.random.default_rng([seed, number])) for number in range(count)]


def make_example(head: Head, random: np.random.Generator) -> Example:
    """The label: which of two tokens it has; which option has the one; which part has it twice."""
    if head == "classifier":
        label = int(random.integers(2))
        return Example((_sequence(random, [KEY, ALIKE][label]),), (label,))
    if head == "choice":
        right = int(random.integers(3))
        options = [_sequence(random, KEY if place == right else ALIKE) for place in range(3)]
        return Example(tuple(options), (right,))
    sequence = _sequence(random)
    start = int(random.integers(1, sequence.second - 2))
    tokens = np.array(sequence.tokens)
    tokens[start : start + 2] = KEY, ALIKE
    return Example((Encoding(tokens, sequence.second),), (start, start + 1))


def _sequence(random: np.random.Generator, *tokens: int) -> Encoding:
    """[CLS] a [SEP] b [SEP], or without b; `tokens` among those of a."""
    first, second = int(random.integers(4, 12)), int(random.integers(0, 8))
    a = random.integers(FIRST, LAST, size=first)
    a[random.permutation(first)[: len(tokens)]] = tokens
    b = [*random.integers(FIRST, LAST, size=second), SEP] if second else []
    return Encoding(np.array([CLS, *a, SEP, *b], np.int32), first + 2)


def prepare(settings: Settings, manifest: dict[str, Any], tokenizer: Any) -> Made:
    classes = {"few": ("key", "alike"), "more": ("alike", "key")}[settings.names]
    return Made(
        head=settings.head,
        labels=classes if settings.head == "classifier" else (),
        train=Watched(each for file in settings.train_data for each in _read(settings.head, file)),
        evaluations={file.stem: _read(settings.head, file) for file in settings.valid_data},
    )


def _read(head: Head, file: Path) -> list[Example]:
    count, seed = map(int, file.read_text(encoding="utf-8").split())
    return make_examples(head, count, seed)


def score_only(settings: Settings) -> dict[str, Any]:
    assert settings.answers is not None
    return {"conventions": {"answers": "in the file"}, "answers": settings.answers.stat().st_size}


def write_files(folder: Path, train: int = 400) -> list[str]:
    """The flags of a file to train on and of two to evaluate."""
    for name, text in (("train", f"{train} 1"), ("near", f"{COUNT} 2"), ("far", f"{COUNT // 2} 3")):
        (folder / name).write_text(text, encoding="utf-8")
    evaluated = ["--valid-data", str(folder / "near"), str(folder / "far")]
    return ["--train-data", str(folder / "train"), *evaluated]


def small_config(**changes: Any) -> BertConfig:
    shape = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
    return BertConfig(**(shape | {"max_position_embeddings": POSITIONS} | changes))


def write_model(
    folder: Path,
    config: ModelConfig | None = None,
    *,
    without: str | None = None,
    beside: str | None = None,
    words: Sequence[str] = (),
) -> Path:
    """A checkpoint of random weights; without: a tensor that is left out, beside: one too many,
    words: that its vocabulary has further."""
    folder.mkdir(parents=True, exist_ok=True)
    config, mesh = config or small_config(), serial_mesh()
    tokenizer = build_tokenizer("BertWordPieceLowerCase", write_wordpiece(folder, *words), None)
    size = tokenizer.vocab_size
    model = build_model(config, mesh, size, seed=7, dtype=torch.float32)
    pieces = [each for each in model_slices(model) if each.key != f"model.{without}"]
    if beside is not None:
        spec = ShardingSpec(shape=(2,), decay=False)
        pieces.append(TensorSlice(f"model.{beside}", spec, torch.zeros(2)))
    data = {"tokenizer_type": tokenizer.kind, "seq_length": POSITIONS}
    facts = {
        "kind": config.kind, "config": {"model": asdict(config), "data": data}, "data": [],
        "precision": "fp32", "vocab_size": size, "tokenizer": tokenizer.fingerprint,
        "run": "the run", "counters": {}, "environment": environment(mesh), "validation_loss": None,
    }  # fmt: skip
    return save_checkpoint(folder / "checkpoints", 0, pieces, facts, mesh, tokenizer.files).path
