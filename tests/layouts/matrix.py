"""One case of the matrix: trained at its layout and alone, compared and counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.parallel import TrainingParallelConfig
from megatron.config.training import OptimizerConfig, PrecisionConfig
from megatron.data.batch import Batch
from megatron.data.gpt2 import GPT2Batch
from megatron.parallel.compare import unseen
from megatron.parallel.context import local_tokens
from megatron.parallel.kernels import use_cpu_kernels
from megatron.parallel.mesh import Axis, ControlGroup, Mesh, connect_control, serial_mesh
from megatron.parallel.sharding import load_whole
from megatron.train.evaluate import mean_losses
from megatron.train.objectives import Objective, WholeLogitsLoss
from megatron.train.state import TrainState
from megatron.train.step import count, forward_backward, train_step
from tests.bert import bert_config, bert_samples
from tests.checkpoint.saving import load
from tests.huggingface import DROPOUT as HF_DROPOUT
from tests.huggingface import GROUPS, HEADS, HIDDEN, MLP, hf_config
from tests.layouts import formulas
from tests.llama import llama_config
from tests.models.own_kind import own_config
from tests.tiny import (
    SEED,
    SEQUENCE,
    VOCABULARY,
    micro_batches,
    plan_at,
    samples,
    save_state,
    tiny_config,
    tiny_state,
    whole_gradients,
    whole_slices,
)
from tests.vit import vit_config, vit_samples
from tools.layouts.layout import Layout, parse_layout
from tools.layouts.meters import Counts, measure

GLOBAL_BATCH, STEPS, EVALUATED, LR = 4, 2, 5, 1e-3
DROPOUT = {
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "attention_dropout_rng": "coordinates",  # on GPUs, too
    "embedding_dropout": 0.2,
}
# Settings of the model by the option that stands for them.
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "dropout": DROPOUT,
    "full": {"recompute_granularity": "full"},
    "selective": {"recompute_granularity": "selective"},
    "untied": {"untie_embeddings_and_output_weights": True},
}
# Options that must not change the numbers, and that the reference is without.
HOW = {"full", "selective", "accumulate"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Tolerances of norms, relative. Half formats are compared with the same layout without its new
# part: the gradients of either are off those of fp64 by up to 1.7e-2 in bf16.
TOLERANCES = {torch.float64: 1e-11, torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}
# Pipeline stages and ZeRO compute what the same layout does without them; what is rounded after the
# norm may differ.
WITHOUT_STAGES = 3e-4
# Grids are compared with one process in the same narrow format. There an element whose gradient is
# next to nothing, 1/200 of its neighbours' in fp16, may change its sign, by which Adam's first step
# goes: 2 LR apart, in a bias of this norm. All others agree to 3e-6.
OF_A_SIGN = 2 * LR / 0.4


@dataclass(frozen=True)
class Case:
    layout: str
    # gpt2, bert, bert-post-ln, llama, llama-even, vit, vit-mean; own-kind, own-kind-even: of
    # models/own_kind.py; hf-NAME: unmodified
    model: str
    options: frozenset[str] = frozenset()
    samples: int = GLOBAL_BATCH  # of a step
    layers: int = 2

    @property
    def name(self) -> str:
        several = [f"samples={self.samples}"] if self.samples != GLOBAL_BATCH else []
        return " ".join([self.layout, self.model, *sorted(self.options), *several])

    @property
    def dtype(self) -> torch.dtype:
        return next((DTYPES[each] for each in self.options if each in DTYPES), torch.float64)

    @property
    def unmodified(self) -> str:
        """The name of a model of transformers in tests/huggingface.py; else empty."""
        return self.model.removeprefix("hf-") if self.model.startswith("hf-") else ""

    @property
    def is_of_a_user(self) -> bool:
        """Whether its code is not the project's, and has no stages."""
        return bool(self.unmodified) or self.model.startswith("own-kind")

    @property
    def is_bert(self) -> bool:
        return (self.unmodified or self.model).startswith("bert")

    @property
    def config(self) -> Any:
        if self.unmodified:
            settings = {"attention_dropout_rng": "coordinates"}  # on GPUs, too
            settings |= SETTINGS["full"] if "full" in self.options else {}
            drops = HF_DROPOUT[self.unmodified] if "dropout" in self.options else {}
            return hf_config(self.unmodified, drops, **settings)
        changes: dict[str, Any] = {"make_vocab_size_divisible_by": 8, "num_layers": self.layers}
        for option in self.options:
            changes |= SETTINGS.get(option, {})
        if self.model.startswith("own-kind"):
            heads = {"key_value_heads": 4} if self.model == "own-kind-even" else {}
            return own_config(**changes, **heads)
        if self.model == "gpt2":
            return tiny_config(**changes)
        if self.model.startswith("vit"):
            changes.pop("make_vocab_size_divisible_by")
            pooling = "mean" if self.model == "vit-mean" else "class-token"
            return vit_config(pooling=pooling, **changes)
        if self.model.startswith("llama"):
            changes = {"untie_embeddings_and_output_weights": False} | changes
            heads = {"num_attention_heads": 4, "num_query_groups": 2}
            return llama_config(**changes, **(heads if self.model == "llama-even" else {}))
        return bert_config("post-ln" if self.model == "bert-post-ln" else "pre-ln", **changes)

    @property
    def reference(self) -> Case:
        """One process in fp64, with the whole batch at once."""
        return replace(self, layout="serial", options=self.options.difference(HOW, DTYPES))

    @property
    def micro_batch_size(self) -> int:
        layout = parse_layout(self.layout)
        if layout.size("pipeline") > 1:
            return 1
        readers = TrainingParallelConfig(**layout.settings).batch_parallel_size(layout.ranks)
        return self.samples // readers // (2 if "accumulate" in self.options else 1)

    def draw(self, size: int, first: int = 0) -> Any:
        if self.is_bert:
            return bert_samples(size, first=first)
        if self.model.startswith("vit"):
            return vit_samples(size, first=first)
        batch = samples(size, first=first)
        if "unscored" in self.options:  # the second one of every step
            batch.loss_mask[batch.numbers % self.samples == 1] = 0
        if "padded" in self.options:
            batch.loss_mask[np.arange(SEQUENCE) >= 3 + 5 * batch.numbers[:, None] % 13] = 0
        return of_documents(batch) if "documents" in self.options else batch

    def objective(self, state: TrainState) -> Objective:
        if "whole-logits" not in self.options:
            return state.objective
        if self.layout == "serial":
            return SmoothedLoss(state.model)
        return WholeLogitsLoss(state.model, state.mesh, entropy, counted_tokens)


def entropy(logits: Tensor, batch: GPT2Batch) -> Tensor:
    """With smoothed labels, so that the model's own loss does not pass for it."""
    losses = F.cross_entropy(logits, batch.labels.flatten(), reduction="none", label_smoothing=0.1)
    return (losses * batch.loss_mask.flatten()).sum()


class SmoothedLoss:
    """The same loss in one process, without the code that gathers the logits."""

    def __init__(self, model: Any) -> None:
        self.terms, self.denominators, self.model = model.terms, model.denominators, model

    def loss(self, x: Tensor, batch: GPT2Batch, loss_scales: Tensor) -> Tensor:
        logits = self.model.logits(x)[:, : self.model.vocab_size]
        return entropy(logits, batch) * loss_scales


def counted_tokens(batch: GPT2Batch) -> float:
    return float(batch.loss_mask.sum(dtype=np.float64))


def of_documents(batch: GPT2Batch) -> GPT2Batch:
    """The same samples, of two documents each."""
    places = np.arange(SEQUENCE)
    cuts = 3 + batch.numbers[:, None] % 9
    starts = np.where(places >= cuts, cuts, 0)
    return replace(batch, document_starts=starts, positions=places - starts)


class Data:
    """Samples of a case, for an evaluation."""

    samples_per_epoch = 8

    def __init__(self, case: Case) -> None:
        self.case = case

    def batch(self, numbers: Sequence[int]) -> Batch:
        return self.case.draw(len(numbers), first=100 + numbers[0])


@dataclass(frozen=True)
class Outcome:
    """The record of one rank of a run; all tensors whole, of all pipeline stages."""

    terms: list[Mapping[str, float]]  # of every step, and of an evaluation
    figures: list[float]  # of every step: norm, tokens, samples so far
    gradients: dict[str, Tensor]  # of the first step
    weights: dict[str, Tensor]  # masters, after the last one
    saved: dict[str, Tensor]  # what a checkpoint of this moment holds
    counts: Counts  # of the run that is saved


def make_state(
    case: Case, layout: Layout, mesh: Mesh, dtype: torch.dtype, seed: int = SEED
) -> TrainState:
    optimizer = OptimizerConfig(weight_decay=0.1, clip_grad=0.5)
    precision = PrecisionConfig()
    if dtype == torch.float16:
        precision = PrecisionConfig(fp16=True, initial_loss_scale="2**8")
    plan = plan_at(layout, case.config)
    state = tiny_state(
        mesh,
        case.config,
        optimizer,
        precision,
        dtype=dtype,
        seed=seed,
        pipeline=plan,
        zero_stage=layout.zero,
    )
    state.objective = case.objective(state)
    return state


def of_all_stages(own: dict[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """These tensors, and those of the other pipeline stages."""
    if mesh.pipeline.size == 1:
        return own
    found: dict[str, Tensor] = {}
    for each in mesh.control.gather(own):
        found |= each
    return found | own


def slices(state: TrainState) -> dict[str, Tensor]:
    return of_all_stages(whole_slices(state.slices()), state.mesh)


def run(
    case: Case, layout: Layout, mesh: Mesh, dtype: torch.dtype, save_to: Path | None = None
) -> Outcome:
    """mesh: of the layout. save_to: where the state after the last step is saved."""
    state, size = make_state(case, layout, mesh, dtype), case.micro_batch_size
    batches, counted = micro_batches(case.draw(case.samples), mesh, size), Counts()
    if save_to is not None:
        counted = measure(state, batches)
    else:
        batches = [local_tokens(each, mesh) for each in batches]
        forward_backward(state, batches, count(state, batches))
    gradients = {
        name: each / state.scaler.scale for name, each in whole_gradients(state.gradients).items()
    }
    terms, figures = [], []
    for step in range(STEPS):
        batch = case.draw(case.samples, first=step * case.samples)
        result = train_step(state, micro_batches(batch, mesh, size), LR)
        terms.append(result.terms)
        figures += [result.grad_norm, result.tokens, state.samples]
    data, plan = Data(case), state.pipeline
    terms.append(mean_losses(state.model, state.objective, data, EVALUATED, 1, mesh, plan))
    weights = whole_slices(state.optimizer.masters())
    if save_to is not None:
        save_state(state, save_to, vocab_size=VOCABULARY)
    gradients, weights = (of_all_stages(each, mesh) for each in (gradients, weights))
    return Outcome(terms, figures, gradients, weights, slices(state), counted)


def distance(one: Tensor, other: Tensor, scale: float) -> float:
    return float((one.double() - other.double()).norm()) / scale


def differences(found: Outcome, wanted: Outcome) -> dict[str, float]:
    """The largest difference of each kind, normalised by the reference's norm; NaN if one is."""
    worst = {"loss": 0.0, "norm": 0.0, "gradients": 0.0, "weights": 0.0}
    largest = {
        name: float(without_key_bias(name, each).abs().max())
        for name, each in wanted.gradients.items()
    }
    norm = float(torch.nn.utils.get_total_norm(wanted.gradients.values()))
    assert not unseen(largest, norm, [sum(each.values()) for each in wanted.terms])
    for own, other in zip(found.terms, wanted.terms, strict=True):
        for name, value in other.items():
            worst["loss"] = np.maximum(worst["loss"], abs(own[name] - value) / abs(value))
    for one, two in zip(found.figures, wanted.figures, strict=True):
        worst["norm"] = np.maximum(worst["norm"], abs(one - two) / two)
    for kind in ("gradients", "weights"):
        ours, theirs = getattr(found, kind), getattr(wanted, kind)
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            one, two = without_key_bias(name, ours[name]), without_key_bias(name, tensor)
            scale = float(two.double().norm())
            worst[kind] = np.maximum(worst[kind], distance(one, two, scale))
    return worst


def without_key_bias(name: str, tensor: Tensor) -> Tensor:
    """The bias of the keys has a gradient of zero in theory, and noise in fact, by which Adam
    moves it."""
    if name.endswith(("qkv.bias", "c_attn.bias")):
        return tensor[[0, 2]]
    if name.endswith("query_key_value.bias"):  # of NeoX: head by head
        return tensor.unflatten(0, (HEADS, 3, -1))[:, [0, 2]]
    return tensor.new_ones(1) if name.endswith("self.key.bias") else tensor


@cache
def alone(case: Case, device: torch.device) -> Outcome:
    """The run of one process in fp64."""
    return run(case, Layout(), serial_mesh(device), torch.float64)


def counts_alone(case: Case) -> Counts:
    """The counts of one process in a step, on a CPU."""
    mesh = serial_mesh()
    state = make_state(case, Layout(), mesh, torch.float64)
    return measure(state, micro_batches(case.draw(case.samples), mesh, case.micro_batch_size))


def keeps_scores(case: Case, device: torch.device) -> bool:
    """Whether attention without dropout keeps its probabilities for the backward."""
    if device.type == "cuda":
        return case.dtype == torch.float64  # for which torch has no kernel of attention
    is_causal = not case.is_bert and not case.model.startswith("vit")
    is_causal = is_causal and "documents" not in case.options
    is_causal = is_causal and case.unmodified != "mistral"  # whose window is a mask
    return use_cpu_kernels and (is_causal or case.dtype.itemsize < 4)


def shape(case: Case, device: torch.device, stage: int = 0, rank: int = 0) -> formulas.Shape:
    """stage, rank: of this rank along the pipeline and the axis of heads."""
    layout = parse_layout(case.layout)
    plan = plan_at(layout, case.config)
    own = plan.layers[stage :: plan.ranks]
    multiple = 1 if case.unmodified else 8  # of rows of the vocabulary on a rank
    parallel = TrainingParallelConfig(**layout.settings)
    config, t, b = case.config, parallel.side, case.micro_batch_size
    m = case.samples // (b * parallel.batch_parallel_size(layout.ranks))
    e = 1 if layout.mode == "1d" else layout.size("tensor") // (t * layout.depth)
    replicas = "data"
    if layout.size("context") > 1:
        replicas = "replicas" if layout.size("data") > 1 else "context"
    if layout.depth > 1:
        replicas = "copies" if layout.size("data") > 1 else "depth"
    if case.is_of_a_user:
        config = sizes_of(case)
    is_vit = case.model.startswith("vit")
    is_ring = layout.size("context") > 1 and layout.cp_comm_type == "p2p"
    blocks = not is_ring and (config.attention_dropout > 0 or keeps_scores(case, device))
    head = config.hidden_size // config.num_attention_heads
    if device.type == "cuda" and case.dtype.itemsize < 4 and not blocks:
        head = -(-head // 8) * 8  # with zeros: torch's kernels take multiples of 16 bytes
    return formulas.Shape(
        kind=config.kind,
        of_a_user=case.is_of_a_user,
        post_norm=case.model in ("bert-post-ln", "hf-bert"),
        untied=getattr(config, "untie_embeddings_and_output_weights", False),
        recompute=config.recompute_granularity,
        dropout=config.hidden_dropout > 0,
        layers=sum(map(len, own)) if own else config.num_layers,
        h=config.hidden_size,
        a=config.num_attention_heads,
        g=getattr(config, "query_groups", config.num_attention_heads),
        f=config.ffn_size,
        s=config.positions if is_vit else SEQUENCE,
        b=b,
        m=m,
        t=t,
        mode=layout.mode,
        rank=rank,
        c=layout.size("context"),
        is_ring=is_ring,
        r=t if layout.cuts_stream else 1,
        d=layout.size("data") * layout.size("context") * layout.depth,
        replicas=replicas,
        zero=layout.zero,
        p=plan.ranks,
        stages=plan.virtual,
        is_first=stage == 0,
        is_last=stage == plan.ranks - 1,
        v=VOCABULARY if is_vit else -(-VOCABULARY // (multiple * t * e)) * multiple * t * e,
        vocabulary=VOCABULARY,
        positions=config.positions if is_vit else config.max_position_embeddings,
        w=case.dtype.itemsize,
        k=16,
        q=3 * config.patch_size**2 if is_vit else 0,
        class_token=case.model == "vit",
        blocks=blocks,
        head=head,
        documents="documents" in case.options,
        whole_logits="whole-logits" in case.options,
    )


def sizes_of(case: Case) -> Any:
    """The sizes of a user's model, by the names that settings of our own have."""
    if case.model.startswith("own-kind"):
        own: Any = case.config
        settings = {"ffn_size": own.ffn_size, "query_groups": own.key_value_heads}
        untied = {"untie_embeddings_and_output_weights": True}
        return SimpleNamespace(**vars(own) | settings | untied, kind="llama")
    is_grouped = case.unmodified in ("llama", "qwen3", "mistral")
    drops = 0.1 if "dropout" in case.options else 0.0
    return SimpleNamespace(
        kind={"mistral": "llama"}.get(case.unmodified, case.unmodified),
        untie_embeddings_and_output_weights=case.unmodified in ("llama", "mistral", "gpt_neox"),
        recompute_granularity=case.config.recompute_granularity,
        hidden_dropout=0.0 if is_grouped else drops,
        attention_dropout=drops,
        num_layers=case.config.num_layers,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        query_groups=GROUPS if is_grouped else HEADS,
        ffn_size=MLP,
        max_position_embeddings=SEQUENCE,
    )


def undivided(counts: Counts, x: formulas.Shape, *, on_cpu: bool) -> Iterator[str]:
    """The counts of this rank that differ from the formulas; FLOPs and saved bytes may be off by
    2 %. Saved bytes are checked on a CPU's kernels only, and not for models of users, whose own
    code between our layers decides which tensors it keeps."""
    calls, sent = formulas.traffic(x)
    pairs: dict[str, tuple[float, float]] = {
        "matmul FLOPs": (counts.matmul_flops, formulas.matmul_flops(x)),
        "parameter bytes": (counts.parameter_bytes, formulas.parameter_bytes(x)),
    }
    if on_cpu and not x.of_a_user:
        pairs["saved bytes"] = (counts.saved_bytes, formulas.saved_bytes(x))
    for axis in {*calls, *counts.calls}:
        pairs[f"calls over {axis}"] = (counts.calls[axis], calls[axis])
        pairs[f"bytes over {axis}"] = (counts.sent_bytes[axis], sent[axis])
    for name, (own, expected) in pairs.items():
        share = 0.02 if name in ("matmul FLOPs", "saved bytes") else 0
        if abs(own - expected) > share * expected:
            yield f"{name}: {own}, and not {expected}"


def without_stages(mesh: Mesh) -> Mesh:
    """The mesh of the ranks with the same pipeline stage, which then is all of the model."""
    return replace(
        mesh,
        pipeline=Axis("pipeline"),
        embedding_group=Axis("embedding_group"),
        loss_sums=mesh.loss,
        model_parallel=mesh.tensor,
    )


def failures(
    case: Case,
    reference: Outcome | None,
    meshes: Callable[[Layout], Mesh],
    other: Layout,
    folder: Path,
) -> list[str]:
    """The faults that this rank sees; every rank calls this.

    reference: of one process; None for the narrow formats, which this runs itself. other: where
    the checkpoint is loaded, too.
    """
    layout = parse_layout(case.layout)
    mesh = meshes(layout)
    found = run(case, layout, mesh, case.dtype, folder)
    wrong, tolerance = [], TOLERANCES[case.dtype]
    wanted = reference
    if wanted is None:
        if mesh.pipeline.size > 1:
            sizes = {name: size for name, size in layout.sizes.items() if name != "pipeline"}
            plain = replace(layout, sizes=sizes, virtual=1, schedule=None, zero=0)
            its_mesh = without_stages(mesh)
            tolerance = WITHOUT_STAGES
        elif layout.zero:
            plain, its_mesh = replace(layout, zero=0), mesh
            tolerance = WITHOUT_STAGES
        else:
            plain = Layout(layout.sizes) if layout.cuts_stream else Layout()
            its_mesh = meshes(plain)
        wanted = run(case, plain, its_mesh, case.dtype)
    for kind, value in differences(found, wanted).items():
        of_sign = kind == "weights" and layout.mode != "1d" and case.dtype.itemsize < 4
        if not value <= tolerance + of_sign * OF_A_SIGN:
            wrong.append(f"{kind}: off by {value:.2g}")
    expected = shape(case, mesh.device, mesh.pipeline.rank, mesh.inner_hidden.rank)
    wrong += undivided(found.counts, expected, on_cpu=mesh.device.type == "cpu")
    again = make_state(case, other, meshes(other), case.dtype, seed=SEED + 1)
    load(again, folder / f"step_{STEPS:08d}")
    for each in again.slices():
        saved = torch.empty_like(each.local)
        load_whole(saved, found.saved[each.key], each.spec)
        if not torch.equal(each.local, saved):
            wrong.append(f"loaded at {other.name}: another {each.key}")
    return wrong


def reference_of(case: Case, device: torch.device) -> Outcome | None:
    """The outcome that every rank compares itself with."""
    if case.dtype.itemsize < 4:
        return None
    return replace(alone(case.reference, device), saved={})


@dataclass(frozen=True)
class SharingGroups(ControlGroup):
    """Meshes whose axes have the same ranks share their process groups: a thread of each wakes 100
    times a second, and 16 meshes of 8 ranks have 800 of them."""

    made: dict[str, Any] = field(default_factory=dict)

    def new_group(self, name: str, groups: list[list[int]]) -> Any:
        if (key := str(groups)) not in self.made:
            self.made[key] = super().new_group(name, groups)
        return self.made[key]


def run_cases(
    cases: Sequence[tuple[Case, Outcome | None]],
    others: Sequence[Layout],
    folder: Path,
    device: str,
) -> dict[Case, list[str]]:
    """On every rank of the pool: {case: what is wrong}. cases: each with its reference."""
    all_ranks = connect_control(None)
    control = SharingGroups(all_ranks.size, all_ranks.rank, all_ranks.group)
    meshes = cache(lambda name: parse_layout(name).mesh(torch.device(device), control))
    found = {}
    for number, (case, reference) in enumerate(cases):
        of_case = [each for each in others if each.name != case.layout]
        if case.is_of_a_user:
            of_case = [e for e in of_case if e.size("pipeline") == e.size("context") == 1]
            of_case = [each for each in of_case if not each.cuts_stream and each.mode == "1d"]
            # ZeRO stage 3 needs a list of layers.
            of_case = [each for each in of_case if case.unmodified or each.zero < 3]
        other = of_case[number % len(of_case)]
        found[case] = failures(
            case, reference, lambda layout: meshes(layout.name), other, folder / str(number)
        )
    return found
