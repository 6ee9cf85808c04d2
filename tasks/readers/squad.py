"""SQuAD 1.1 and 2.0 (section 5.3, table 5): the part of a passage that answers a question.

The files are those that SQuAD's authors released; the questions in a file decide its version. The
paper's table calls the two SQUAD 1.1 and SQUAD 2.0. --predictions scores the answers in a file
without a model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.checks import positive, writable
from megatron.data.files import write_atomically
from megatron.data.tokenizer import BertTokenizer
from megatron.errors import UsageError, flag
from tasks.protocol import ChecksConfig, Example, FinetuneSettings, Finetuning, Logits
from tasks.readers.inputs import (
    SPECIAL,
    WARN_CUT_QUESTIONS,
    check_apart,
    check_casing,
    check_cut,
    check_unknown,
    shape_of,
)
from tasks.readers.squad_data import Squad, Windows, make_windows, read_answers, read_squad
from tasks.readers.squad_scorer import (
    best_figures,
    conventions,
    figures,
    mark,
    score_file,
    unanswered,
)

ONLY_2_0 = ("null_score_diff_threshold", "save_null_odds")


@dataclass(frozen=True, kw_only=True)
class Settings(FinetuneSettings):
    """--train-data and --valid-data take one file each."""

    judged = "predictions"
    hyper_parameters = (
        *FinetuneSettings.hyper_parameters,
        *("doc_stride", "max_query_length", "max_answer_length", "null_score_diff_threshold"),
    )
    other_settings = (
        *FinetuneSettings.other_settings,
        *("predictions", "na_prob_file", "na_prob_thresh", "save_predictions", "save_null_odds"),
    )

    train_data: tuple[Path, ...] = ()
    """Training data: one JSON file as released, train-v1.1.json or train-v2.0.json ({"data":
    [{"paragraphs": [{"context", "qas": [{"id", "question", "answers"}]}]}]}; its questions decide
    the version). Without this flag a fine-tuned model is evaluated."""

    valid_data: tuple[Path, ...]
    """Evaluation data, used after every epoch: one such file, of the same version. Its name does
    not matter: the figures are exact_match, f1 and others that the record explains."""

    seq_length: int = 384
    """Longest sequence, in tokens, special tokens included; a passage that does not fit is split
    over several."""

    epochs: int = 2
    lr: float = 3e-5
    global_batch_size: int = 48

    doc_stride: int = 128
    """Tokens between the starts of two successive windows of a passage."""

    max_query_length: int = 64
    """Most tokens read of a question; longer ones lose their end, and --max-truncated is the
    largest share of the questions that may be longer."""

    max_answer_length: int = 30
    """Most tokens of an answer of the model."""

    null_score_diff_threshold: float = 0.0
    """A question of SQuAD 2.0 gets no answer where the score of no answer exceeds that of the best
    answer by more than this."""

    predictions: Path | None = None
    """JSON file of {question id: answer}, "" for no answer, to score in place of a model."""

    na_prob_file: Path | None = None
    """JSON file of {question id: number}, with --predictions; high where no answer is likely."""

    na_prob_thresh: float | None = None
    """A question whose number in --na-prob-file is above it counts as not answered; 1 if not
    given."""

    save_predictions: Path | None = None
    """JSON file for the answers of the evaluated model, in the format of --predictions."""

    save_null_odds: Path | None = None
    """JSON file for the score of no answer minus that of the best answer, by question id."""

    checks: ChecksConfig = field(default_factory=ChecksConfig)

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "doc_stride", "max_query_length", "max_answer_length")
        for name in ("save_predictions", "save_null_odds"):
            writable(self, name)
        for name in ("train_data", "valid_data"):
            files = getattr(self, name)
            if len(files) > 1:
                works = (flag(name), str(files[0]))
                raise UsageError(flag(name), " ".join(map(str, files)), "one file", works=works)
        if self.max_query_length + SPECIAL >= self.seq_length:
            raise UsageError(
                "--max-query-length",
                self.max_query_length,
                f"below --seq-length {self.seq_length} less {SPECIAL} special tokens",
                works=("--max-query-length", str(max(1, self.seq_length // 4))),
            )
        trains = bool(self.train_data)
        not_asked = "given without --load, --ensemble and --train-data: no model is asked "
        not_asked += "(--save-predictions writes such a file)"
        tuned = "given for a fine-tuned model, without --train-data and --predictions"
        for name, is_refused, allowed in (
            ("predictions", bool(self.load or self.ensemble or trains), not_asked),
            ("na_prob_file", not self.is_judged, "given with --predictions"),
            ("na_prob_thresh", self.na_prob_file is None, "given with --na-prob-file"),
            ("save_predictions", trains or self.is_judged, tuned),
            ("save_null_odds", trains or self.is_judged, tuned),
        ):
            if is_refused and (value := getattr(self, name)) is not None:
                raise UsageError(flag(name), value, allowed)

    @property
    def files(self) -> Sequence[Path]:
        """Input files only: output files may be left over from a previous run."""
        further = [each for each in (self.predictions, self.na_prob_file) if each is not None]
        return [*self.train_data, *self.valid_data, *further]


@dataclass(frozen=True, kw_only=True)
class SquadTask(Finetuning):
    head = "span"
    labels = ()
    best = "f1"

    settings: Settings
    train: Sequence[Example]
    evaluations: Mapping[str, Windows]
    notes: Mapping[str, Any]

    @property
    def squad(self) -> Squad:
        """The evaluated file."""
        return self.evaluations[""].squad

    @property
    def paper(self) -> str:  # type: ignore[override]
        return f"SQUAD {self.squad.version}"

    @property
    def conventions(self) -> Mapping[str, str]:  # type: ignore[override]
        return conventions(self.squad.version)

    def score(self, logits: Logits) -> Mapping[str, Any]:
        """Also writes the answers if set to; an ensemble's own replace those of its models."""
        squad, longest = self.squad, self.settings.max_answer_length
        found = read_answers(self.evaluations[""], logits[""], longest)
        ids = [each.id for each in squad.questions]
        answers = dict(zip(ids, found.texts, strict=True))
        marks = mark(squad, answers)
        best: Mapping[str, float] = {}
        if squad.version == "2.0":
            best = best_figures(squad, marks, np.ones(len(ids), bool), found.odds)
            is_left_out = found.odds > self.settings.null_score_diff_threshold
            marks = unanswered(squad, marks, is_left_out)
            answers |= {each: "" for each, out in zip(ids, is_left_out, strict=True) if out}
        _save(self.settings.save_predictions, answers)
        _save(self.settings.save_null_odds, dict(zip(ids, found.odds.tolist(), strict=True)))
        return {**best, **figures(squad, marks)}


def _save(file: Path | None, by_id: Mapping[str, str | float]) -> None:
    if file is not None:
        write_atomically(file, json.dumps(by_id, indent=1, ensure_ascii=False).encode() + b"\n")


def prepare(settings: Settings, manifest: Mapping[str, Any], tokenizer: BertTokenizer) -> SquadTask:
    """Raises ValueError or OSError, naming the flag, for data that cannot be used."""
    check_apart(settings.train_data, settings.valid_data)
    valid = read_squad("--valid-data", settings.valid_data[0])
    for name in ONLY_2_0 if valid.version == "1.1" else ():
        if (value := getattr(settings, name)) != getattr(Settings, name):
            allowed = f"left out: every question of {valid.place}, SQuAD 1.1, has an answer"
            raise UsageError(flag(name), value, allowed)
    counted: dict[str, Any] = {}
    train: Sequence[Example] = ()
    if settings.train_data:
        data = read_squad("--train-data", settings.train_data[0])
        if data.version != valid.version:
            raise ValueError(
                f"{data.place} is of SQuAD {data.version}, and {valid.place} of {valid.version}; "
                "two files of one version would work"
            )
        train, counted["train"] = make_examples(data, settings, tokenizer, training=True)
    windows, own = make_examples(valid, settings, tokenizer, training=False)
    notes = {"squad_version": valid.version, "input": {**counted, "valid": {"": own}}}
    return SquadTask(settings=settings, train=train, evaluations={"": windows}, notes=notes)


def make_examples(
    squad: Squad, settings: Settings, tokenizer: BertTokenizer, *, training: bool
) -> tuple[Windows, dict[str, int]]:
    """(the windows, counts for the record), after the checks of the input."""
    texts = [*squad.passages, *(each.text for each in squad.questions)]
    casing = check_casing(str(squad.place), texts, tokenizer, settings.checks.allow_lower_case)
    shape = shape_of(tokenizer, settings.seq_length, cut="second", first=settings.max_query_length)
    windows = make_windows(squad, tokenizer, shape, settings.doc_stride, training=training)
    tokens = np.concatenate([windows.passages.tokens.tokens, windows.asked.tokens])
    unknown = check_unknown(str(squad.place), tokens, tokenizer, settings.checks.max_unknown)
    limit = ("--max-query-length", settings.max_query_length, settings.seq_length - SPECIAL - 1)
    most = settings.checks.max_truncated
    counts = {
        "questions": len(squad.questions),
        "blank_questions": len(windows.blank),
        "moved_answers": len(squad.moved),
        "answers_not_in_passage": len(squad.lost),
        "left_out_questions": len(squad.questions) - len(windows.questions),
        "truncated_questions": check_cut(
            str(squad.place), "questions", windows.asked.lengths, limit, WARN_CUT_QUESTIONS, most
        ),
        "cut_answers": windows.cut_answers,
        "windows": len(windows),
        "windows_without_answer": windows.without_answer,
    }
    losses = {
        "blank_questions": f"have no words, such as {', '.join(windows.blank[:3])}",
        "cut_answers": "have an answer that no window has whole; a smaller --doc-stride or a "
        "larger --seq-length would help",
        "left_out_questions": "are not trained on: no token of the passage is of the answer",
    }
    for key, text in losses.items():
        if counts[key]:
            count = f"{counts[key]} of {len(squad.questions)} questions"
            warnings.warn(f"{squad.place}: {count} {text}", stacklevel=2)
    return windows, {**casing, **unknown, **counts}


def score_only(settings: Settings) -> dict[str, Any]:
    """The figures of --predictions."""
    assert settings.predictions is not None
    # Only the texts of the right answers matter here, not their positions.
    squad = read_squad("--valid-data", settings.valid_data[0], most_misplaced=1.0)
    thresh = 1.0 if settings.na_prob_thresh is None else settings.na_prob_thresh
    found = score_file(squad, settings.predictions, settings.na_prob_file, thresh)
    meanings = {
        **conventions(squad.version),
        "missing_predictions": "questions that --predictions lacks, which count as wrong",
    }
    protocol = {"squad_version": squad.version, "answers": "of --predictions, without a model"}
    used = {name: meanings[name] for name in found}
    return {"conventions": used, "protocol": protocol, **found}
