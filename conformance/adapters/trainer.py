"""transformers' Trainer: its loss, accumulation, clipping, AdamW and data ranks (data), and what
`fsdp` is on this machine (data with zero=3)."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor

from conformance.adapters.transformers import Base, read
from conformance.fixture import IGNORED, Fixture, MicroBatch


class Adapter(Base):
    """A call of train() is one step, after which the next goes on with the same optimizer."""

    trainer = "transformers' Trainer"
    stages = (0, 3)
    dtypes = (torch.float32,)

    def build(self, fixture: Fixture, dtype: torch.dtype) -> Any:
        return read(fixture, dtype)

    def prepare(self) -> None:
        given = self.facts["optimizer"]
        self.folder = tempfile.TemporaryDirectory()
        settings: dict[str, Any] = {}
        if self.zero:
            settings = {"fsdp": "full_shard", "fsdp_config": {"fsdp_version": 2}}
        arguments = transformers.TrainingArguments(
            output_dir=self.folder.name,
            use_cpu=True,
            max_steps=1,
            per_device_train_batch_size=4 // self.sizes[0],
            gradient_accumulation_steps=self.accumulated,
            train_sampling_strategy="sequential",
            optim="adamw_torch",
            learning_rate=given["lr"],
            adam_beta1=given["betas"][0],
            adam_beta2=given["betas"][1],
            adam_epsilon=given["eps"],
            weight_decay=given["weight_decay"],
            max_grad_norm=given["clip"],
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            **settings,
        )
        self.run = transformers.Trainer(self.model, arguments, data_collator=stacked)
        self.clip_grad_norm = self.run.accelerator.clip_grad_norm_
        self.run.accelerator.clip_grad_norm_ = self.record

    def record(self, *arguments: Any, **options: Any) -> Any:
        """Keeps the gradients that the Trainer clips."""
        self.recorded = {name: each.grad.clone() for name, each in self.parameters()}
        return self.clip_grad_norm(*arguments, **options)

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        self.run.train_dataset = [
            {name: tensor[row] for name, tensor in inputs(each).items()}
            for each in micro_batches
            for row in range(len(each.input_ids))
        ]
        self.run.train()
        last = self.run.state.log_history[0]
        return last["loss"], last["grad_norm"]

    def local_tensors(self) -> dict[str, list[Tensor]]:
        states = self.run.optimizer.state.values()
        return {
            "parameters": [each for _, each in self.parameters()],
            "gradients": list(self.recorded.values()),  # train() frees them
            "optimizer": [t for state in states for t in state.values() if torch.is_tensor(t)],
        }

    def to_ours(self, theirs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(theirs)

    to_theirs = to_ours


def stacked(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([each[name] for each in samples]) for name in samples[0]}


def inputs(batch: MicroBatch) -> dict[str, Tensor]:
    """A causal model shifts labels itself, so that they are those of the tokens before here."""
    found = {name: each for name, each in vars(batch).items() if each is not None}
    if batch.token_type_ids is None:
        found["labels"] = batch.labels.roll(1, 1)
        found["labels"][:, 0] = IGNORED
    return found
