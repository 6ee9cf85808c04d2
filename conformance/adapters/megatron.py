"""This project, by its public API and its tables of HuggingFace's names, at every layout.

Sizes of --layout: data, pipeline, context (ring: with p2p in place of a2a), tensor, or tensor2d,
tensor25d (of two squares), tensor3d. How: zero=1 to 3, sequence=1, virtual=N stages of a rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.adapters import Refused
from conformance.fixture import IGNORED, Fixture, MicroBatch, ranks
from megatron import api
from megatron.data.bert import BertBatch
from tools.convert.weights import resolve, to_theirs

MODES = {"tensor": "1d", "tensor2d": "2d", "tensor25d": "2.5d", "tensor3d": "3d"}
SIZES = (*MODES, "context", "ring", "pipeline", "data", "zero", "sequence", "virtual")


class Adapter:
    def __init__(self, fixture: Fixture, layout: Mapping[str, int], dtype: torch.dtype) -> None:
        if unknown := layout.keys() - set(SIZES):
            raise Refused(f"no {min(unknown)} in a layout, but {', '.join(SIZES)}")
        for several in (MODES, ("context", "ring")):
            if len(chosen := [each for each in several if layout.get(each, 1) > 1]) > 1:
                raise Refused(f"{chosen[0]} and {chosen[1]} are ways of the same")
        facts = fixture.facts
        kind = api.find_kind(facts["model_type"])
        (self.family, *_) = resolve_name(str(kind.conversion))
        vocabulary = facts["config"]["vocab_size"]
        try:
            config = replace(self.family.config_of(facts["config"]), make_vocab_size_divisible_by=1)
            parallel = config_of(layout)
            length = fixture.batches()[0][0].input_ids.shape[1]
            parallel.check_kind(config)
            parallel.check(ranks(layout), config.widths, length)
            parallel.check_model(config)
        except api.UsageError as error:
            raise Refused(str(error)) from error
        self.zero = parallel.zero_stage
        plan = api.plan_pipeline(parallel, config, seq_length=length, vocab_size=vocabulary)
        self.mesh = mesh = connect(parallel, ranks(layout))
        self.entries = {each.ours: each for each in resolve(self.family, config, vocabulary)}

        optimizer = facts["optimizer"]
        self.lr = optimizer["lr"]
        beta1, beta2 = optimizer["betas"]
        self.state = api.build_state(
            config,
            mesh,
            vocabulary,
            seed=None,
            dtype=dtype,
            optimizer=api.OptimizerConfig(
                lr=self.lr,
                adam_beta1=beta1,
                adam_beta2=beta2,
                adam_eps=optimizer["eps"],
                weight_decay=optimizer["weight_decay"],
                clip_grad=optimizer["clip"],
            ),
            pipeline=plan,
            zero_stage=self.zero,
        )
        own = dict(self.state.model.named_parameters())
        theirs = {self.family.name_of(name): each for name, each in fixture.weights().items()}
        # In a pipeline a rank has the parameters of its stages.
        self.state.optimizer.fill(
            (name, each.transform.to_ours([theirs[n] for n in each.theirs], each.spec.shape))
            for name, each in self.entries.items()
            if name in own
        )
        self.recorded: list[Any] = []

    def step(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, float]:
        rank, size = self.mesh.rank("batch"), self.mesh.size("batch")
        own = [batch_of(each.share(rank, size)) for each in micro_batches]
        result = api.train_step(self.state, own, self.lr, self.record)
        return result.loss, result.grad_norm

    def record(self) -> bool:
        """Keeps the gradients. train_step calls it after the backward; the optimizer's step leaves
        clipped ones."""
        slices = self.state.gradients.slices()
        self.recorded = [replace(each, local=each.local.clone()) for each in slices]
        return False

    def gradients(self) -> Mapping[str, Tensor]:
        return self.whole(self.recorded)

    def weights(self) -> Mapping[str, Tensor]:
        return self.whole(self.state.weights())

    def whole(self, slices: Iterable[Any]) -> Mapping[str, Tensor]:
        """The slices of all ranks, by HuggingFace's names."""
        ours = {
            each.key.removeprefix("model."): api.gather_whole(each.local, each.spec)
            for each in slices
        }
        if self.mesh.size("pipeline") > 1:  # other stages have the other parameters
            stages: list[Any] = [None] * self.mesh.size()
            dist.all_gather_object(stages, ours)
            ours = dict(chain.from_iterable(each.items() for each in stages))
        return to_theirs(self.family, self.entries.values(), ours)

    def local_tensors(self) -> dict[str, list[Tensor]]:
        gradients = self.state.gradients
        own = [each.local for each in gradients.slices()]  # the sums that the optimizer reads
        return {
            "parameters": [each.local for each in self.state.weights()],
            # Before ZeRO stage 2 those of all elements last in memory.
            "gradients": own if self.zero > 1 else [each.gradient for each in gradients.views],
            "optimizer": [each.local for each in self.state.optimizer.tensors()],
        }

    def save(self, folder: str) -> None:
        state = self.state
        api.save_checkpoint(folder, state.step, state.slices(), state.facts(), self.mesh)

    def load(self, folder: str) -> None:
        found = api.newest_checkpoint(folder, self.mesh)
        assert found is not None, f"{folder} has no checkpoint"
        self.state.load(found)


def config_of(layout: Mapping[str, int]) -> api.TrainingParallelConfig:
    """Raises UsageError."""
    tensor = next((key for key in MODES if layout.get(key, 1) > 1), "tensor")
    is_ring = layout.get("ring", 1) > 1
    virtual = layout.get("virtual", 1)
    settings: dict[str, Any] = {
        "tensor_model_parallel_size": layout.get(tensor, 1),
        "tensor_parallel_mode": MODES[tensor],
        "tensor_parallel_depth": 2 if tensor == "tensor25d" else 1,
        "context_parallel_size": layout.get("ring" if is_ring else "context", 1),
        "cp_comm_type": "p2p" if is_ring else "a2a",
        "pipeline_model_parallel_size": layout.get("pipeline", 1),
        "num_virtual_stages_per_pipeline_rank": virtual if virtual > 1 else None,
        "sequence_parallel": bool(layout.get("sequence", 0)),
        "zero_stage": layout.get("zero", 0),
    }
    return api.TrainingParallelConfig(**settings)


def connect(parallel: api.TrainingParallelConfig, size: int) -> api.Mesh:
    if size == 1:
        return api.serial_mesh()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    return api.build_mesh(
        parallel.sizes,
        "cpu",
        tensor_parallel_mode=parallel.tensor_parallel_mode,
        sequence_parallel=parallel.cuts_stream,
        cp_comm_type=parallel.context_type,
    )


def batch_of(each: MicroBatch) -> api.Batch:
    tokens, labels = each.input_ids.numpy(), each.labels.numpy()
    is_scored = labels != IGNORED
    fields: dict[str, Any] = {
        "tokens": tokens,
        "labels": np.where(is_scored, labels, 0),
        "loss_mask": is_scored.astype(np.float32),
    }
    if each.next_sentence_label is None:
        # Padding is after all tokens, which attend to none of it.
        positions = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape).copy()
        return api.GPT2Batch(**fields, positions=positions)
    assert each.token_type_ids is not None
    return BertBatch(
        **fields,
        token_types=each.token_type_ids.numpy(),
        is_real=each.attention_mask.numpy().astype(bool),
        is_swapped=each.next_sentence_label.numpy(),
    )
