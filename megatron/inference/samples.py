"""Samples: what a model writes while it trains, as a callback (--sample-interval).

    b rows of a micro-batch   s sequence length   v vocabulary   t tensor-parallel size

Prompts run through the executor in micro-batches of the shape of training, as an evaluation does.
So they work at every layout that trains, also where no rank has a whole model, and layers are not
compiled for other shapes. All tokens are read again for each new one: generate.py, with its cache,
is faster where the tensor-parallel ranks hold a whole model. The draws are those of generate.py.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron.config.launch import SIGNALS, Stopped
from megatron.data.gpt2 import GPT2Batch
from megatron.errors import UsageError
from megatron.inference.generate import Sampling, draw
from megatron.inference.prompts import of_file
from megatron.models.registry import find_kind
from megatron.parallel.bucket import gathered
from megatron.parallel.collectives import all_reduce, gather_from
from megatron.parallel.context import gather_tokens, local_tokens
from megatron.parallel.initialize import derive_seed
from megatron.train.callbacks import Callback
from megatron.train.executor import Executor
from megatron.train.inputs import Inputs
from megatron.train.state import TrainState
from megatron.train.step import StepResult
from megatron.train.watch import note

FLAG = "--sample-prompts"
NEW_TOKENS = 64
TOP_K = 40  # as OpenAI sampled from GPT-2


class TextSamples(Callback):
    """Continues the prompts of --sample-prompts every --sample-interval steps and at the end."""

    def __init__(self, config: Any, inputs: Inputs) -> None:
        """Raises UsageError for a model that writes no text, data without a tokenizer, and prompts
        that are no text or as long as a sample."""
        super().__init__(config)
        file, length = Path(config.logging.sample_prompts), config.data.seq_length
        tokenizer = inputs.tokenizer
        if not find_kind(config.model.kind).writes_text:
            allowed = f"left out with a model of the kind {config.model.kind}, which writes no text"
            raise UsageError("--sample-interval", config.logging.sample_interval, allowed)
        if tokenizer is None:
            allowed = (
                "given with data whose tokenizer is known, as tools/preprocess_data.py makes it"
            )
            raise UsageError(FLAG, file, allowed)
        begin = getattr(config.data, "begin_token", None)
        before = [] if begin is None else [tokenizer.token_id(begin)]
        self.texts, self.tokens = [], []
        for number, content in enumerate(of_file(file, FLAG).values(), start=1):
            try:
                self.texts.append(content.decode())
            except UnicodeDecodeError as error:
                allowed = f"UTF-8 text, which line {number} is not ({error})"
                raise UsageError(FLAG, file, allowed) from error
            self.tokens.append([*before, *tokenizer.encode(self.texts[-1])])
            if len(self.tokens[-1]) >= length:
                allowed = f"of prompts of at most {length - 1} tokens, which leave room for a new "
                allowed += f"one of {{}} {length}: line {number} has {len(self.tokens[-1])}"
                raise UsageError(FLAG, file, allowed, "--seq-length")
        self.tokenizer, self.length = tokenizer, length
        self.sampling = Sampling(NEW_TOKENS, top_k=TOP_K, seed=config.training.seed)

    def pre_train(self) -> None:
        self.last = 0  # step of the last samples

    def post_step(self, result: StepResult) -> None:
        is_due = self.training.state.step % self.config.logging.sample_interval == 0
        if is_due and not result.stop:  # the sender of a signal may not wait
            self.sample()

    def post_train(self, end: str) -> None:
        if end not in SIGNALS and self.training.state.step > self.last:
            self.sample()

    def sample(self) -> None:
        """Writes and logs a text for each prompt; a signal cuts it short, and none is written."""
        state, training = self.training.state, self.training
        self.last = state.step
        note("samples")
        try:
            with training.paused():
                new = continue_texts(
                    state,
                    self.tokens,
                    self.sampling,
                    ends=self.tokenizer.ends,
                    seq_length=self.length,
                    micro_batch_size=self.config.training.micro_batch_size,
                    wants_stop=training.is_urgent,
                )
        except Stopped:
            return
        for number, (prompt, tokens) in enumerate(zip(self.texts, new, strict=True), start=1):
            text = self.tokenizer.decode_after(tokens)
            line = {"step": state.step, "sample": number, "prompt": prompt, "text": text}
            training.write(line)
            shown = (json.dumps(each, ensure_ascii=False) for each in (prompt, text))
            training.log(f"step {state.step} | {' -> '.join(shown)}")


class NoLoss:
    """An objective without terms, where only the hidden states are asked for."""

    terms = ()

    def denominators(self, batch: object) -> list[float]:
        return []

    def loss(self, x: Tensor, batch: object, loss_scales: Tensor) -> Tensor:
        return loss_scales


@torch.no_grad()
def continue_texts(
    state: TrainState,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    *,
    ends: Collection[int],
    seq_length: int,
    micro_batch_size: int,
    wants_stop: Callable[[], bool] = lambda: False,
) -> list[list[int]]:
    """The new tokens of each prompt, on every rank; every rank calls this.

    prompts: token ids, none empty, fewer than seq_length, which is the most of prompt and text. A
    text ends at one of the ids `ends`, which is left out. A row whose logits are not numbers ends
    there. wants_stop: called before each token. Raises Stopped on all ranks if it returns True on
    one.
    """
    mesh, model = state.mesh, state.model
    # Every rank of the batch axis has equally many full micro-batches; surplus rows are not read.
    micro_batches = -(-len(prompts) // (micro_batch_size * mesh.batch.size))
    rows = micro_batches * micro_batch_size
    first = mesh.batch.rank * rows
    numbers = range(first, min(first + rows, len(prompts)))  # of this rank
    texts, lengths = np.zeros((rows, seq_length), np.int64), np.ones(rows, np.int64)
    for row, number in enumerate(numbers):
        lengths[row] = len(prompts[number])
        texts[row, : lengths[row]] = prompts[number]
    sources = [random.Random(derive_seed(sampling.seed, "generate", each)) for each in numbers]
    new: dict[int, list[int]] = {number: [] for number in numbers}
    running = {*numbers}
    was_training = model.training
    model.eval()
    try:
        with gathered(model):
            for _ in range(sampling.max_new_tokens):
                votes = torch.tensor([wants_stop(), len(running)], device=mesh.device)
                stops, left = all_reduce(all_reduce(votes, mesh.loss_sums), mesh.model_parallel)
                if stops:
                    raise Stopped
                if not left:
                    break
                logits = next_logits(state, np.split(texts, micro_batches), lengths)
                shares = [source.random() for source in sources]
                ids = draw(logits[: len(numbers)].cpu(), sampling, shares).tolist()
                for row, (number, token) in enumerate(zip(numbers, ids, strict=True)):
                    if token in ends or token == logits.shape[1]:
                        running.discard(number)
                    if number in running:
                        new[number].append(token)
                        texts[row, lengths[row]] = token
                        lengths[row] += 1
                        if lengths[row] == seq_length:
                            running.discard(number)
    finally:
        model.train(was_training)
    for each in mesh.control.gather(new):
        new |= each
    return [new[number] for number in range(len(prompts))]


def next_logits(
    state: TrainState, micro_batches: Sequence[np.ndarray[Any, Any]], lengths: Any
) -> Tensor:
    """Logits [rows, v] of the token after the first `lengths` tokens of each row, fp32 or wider; of
    this rank's rows, on each pipeline stage. micro_batches: int64 [b, s] each."""
    mesh, stage = state.mesh, state.mesh.pipeline
    model: Any = state.model
    batches = []
    for tokens in micro_batches:
        positions = np.tile(np.arange(tokens.shape[1]), (len(tokens), 1))
        batch = GPT2Batch(tokens=tokens, positions=positions)
        batches.append(local_tokens(batch, mesh))
    hidden_states: dict[int, Tensor] = {}
    executor = Executor(
        model=model,
        objective=NoLoss(),
        mesh=mesh,
        pipeline=state.pipeline,
        batches=batches,
        loss_scales=torch.zeros(0, device=mesh.device),
        hidden_states=hidden_states,
    )
    executor.run(state.pipeline.evaluation(stage.rank, len(batches)))
    dtype = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    b = len(micro_batches[0])
    logits = torch.zeros(len(batches), b, model.vocab_size, dtype=dtype, device=mesh.device)
    last = torch.from_numpy(lengths - 1).to(mesh.device).view(len(batches), b)
    row = torch.arange(b, device=mesh.device)
    for number, x in hidden_states.items():
        columns = model.logits(x)  # [tokens of this rank, v/t]
        columns = gather_tokens(columns.view(b, -1, columns.shape[-1]), mesh)
        found = gather_from(columns[row, last[number]], -1, mesh.vocabulary)
        logits[number] = found[:, : model.vocab_size]
    all_reduce(logits, stage)
    return logits.flatten(0, 1)
