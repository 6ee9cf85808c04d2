"""The script of source C in plain torch, small: its Llama, its optimizer and schedule, its saving.

Names of modules and buffers, their order, and the calls that save and load are those of the
tutorial; the code is not.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from tests import plain
from tests.tiny import samples

LAYERS, HIDDEN, HEADS, GROUPS, FFN, POSITIONS, VOCABULARY = 2, 96, 12, 3, 384, 64, 263
WARMUP, STEPS, LR, BATCH = 4, 20, 1e-2, 4
# Some of the tutorial's own values are the defaults of this project or of torch.
BASE, MIN_LR, BETAS, EPS, DECAY = 5000.0, 1e-4, (0.85, 0.95), 1e-6, 0.05


class Rotary(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, size: int, base: float = BASE) -> None:
        super().__init__()
        self.frequencies = 1.0 / base ** (torch.arange(0, size, 2).float() / size)
        self.register_buffer("cos", torch.empty(0))
        self.register_buffer("sin", torch.empty(0))
        self.fill(torch.get_default_dtype())

    def fill(self, dtype: torch.dtype) -> None:
        """Compute the buffers in this dtype, from fp32 frequencies."""
        angles = torch.outer(torch.arange(POSITIONS).to(dtype), self.frequencies.to(dtype))
        angles = torch.cat([angles, angles], dim=-1)
        self.cos, self.sin = angles.cos(), angles.sin()

    def forward(self, x: Tensor) -> Tensor:
        cos, sin = (each[: x.shape[1], None].to(x.dtype) for each in (self.cos, self.sin))
        one, two = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-two, one], dim=-1) * sin


class Base(plain.LlamaBody):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, HIDDEN, LAYERS, heads=HEADS, groups=GROUPS, inner=FFN)
        self.rotary_emb = Rotary(HIDDEN // HEADS)

    def turn(self, x: Tensor) -> Tensor:
        out: Tensor = self.rotary_emb(x)
        return out


class Pretraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_model = Base()
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.lm_head(self.base_model(tokens))


class Script:
    """A run of the tutorial: model, optimizer, scheduler."""

    def __init__(self, *, seed: int = 0, tensor_parallel: bool = False) -> None:
        torch.manual_seed(seed)
        self.model = Pretraining()
        for name, parameter in self.model.named_parameters():
            if "norm" in name:  # else a wrong one would go unseen
                nn.init.normal_(parameter, 1.0, 0.1)
        if tensor_parallel:
            divide(self.model)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY,
            foreach=False if tensor_parallel else None,  # of DTensors beside plain ones
        )  # fmt: skip
        warmup = LinearLR(self.optimizer, start_factor=0.1, end_factor=1.0, total_iters=WARMUP)
        cosine = CosineAnnealingLR(self.optimizer, T_max=STEPS - WARMUP, eta_min=MIN_LR)
        self.scheduler = SequentialLR(self.optimizer, [warmup, cosine], milestones=[WARMUP])

    def train(self, first: int, steps: int) -> list[tuple[float, float]]:
        """(learning rate, loss) of each of these steps, from step `first` on."""
        found = []
        for step in range(first, first + steps):
            batch = samples(BATCH, first=step * BATCH)
            logits = self.model(torch.from_numpy(batch.tokens))
            loss = plain.summed_loss(logits, batch) / float(batch.loss_mask.sum())
            self.optimizer.zero_grad()
            loss.backward()
            clip(self.model.parameters())
            found.append((self.scheduler.get_last_lr()[0], loss.item()))
            self.optimizer.step()
            self.scheduler.step()
        return found

    def states(self, by_name: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """Those of the model and of the optimizer."""
        if by_name:
            return get_state_dict(self.model, self.optimizer)
        return self.model.state_dict(), self.optimizer.state_dict()

    def save(self, folder: Path, *, by_name: bool) -> Path:
        """Every rank calls this."""
        model, optimizer = self.states(by_name)
        dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if not dist.is_initialized() or dist.get_rank() == 0:
            torch.save(self.scheduler.state_dict(), folder / "lrscheduler.pt")
        return folder

    def load(self, folder: Path, *, by_name: bool) -> None:
        """Into an optimizer that has a state to be filled, which the tutorial's own has not."""
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()
        model, optimizer = self.states(by_name)
        dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=folder)
        if by_name:
            set_state_dict(
                self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer
            )
        else:
            self.model.load_state_dict(model)
            self.optimizer.load_state_dict(optimizer)
        self.scheduler.load_state_dict(torch.load(folder / "lrscheduler.pt"))

    def widen(self) -> None:
        """Go on in fp64, from the numbers that there are."""
        self.model.double()
        self.model.base_model.rotary_emb.fill(torch.float64)
        for state in self.optimizer.state.values():
            state |= {name: state[name].double() for name in ("exp_avg", "exp_avg_sq")}

    def weights(self) -> dict[str, Tensor]:
        """By this project's names."""
        return plain.by_project_names({n: p.detach() for n, p in self.model.named_parameters()})

    def moments(self, kind: str) -> dict[str, Tensor]:
        """As `weights`."""
        state = self.optimizer.state
        named = {n: state[p][kind] for n, p in self.model.named_parameters()}
        return plain.by_project_names(named)


def divide(model: Pretraining) -> None:
    """The tutorial's plan over all ranks but for the division of the norms: queries, keys and
    values are gathered, so that every rank computes all heads."""
    column, gathered = ColwiseParallel(), ColwiseParallel(output_layouts=Replicate())
    plan: dict[str, Any] = {
        "base_model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": gathered,
    }
    for n in range(LAYERS):
        place = f"base_model.layers.{n}"
        plan |= {f"{place}.self_attn.{each}_proj": gathered for each in "qkv"}
        plan[f"{place}.self_attn.o_proj"] = RowwiseParallel(input_layouts=Replicate())
        plan |= {f"{place}.mlp.{each}_proj": column for each in ("gate", "up")}
        plan[f"{place}.mlp.down_proj"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (dist.get_world_size(),)), plan)


def clip(parameters: Iterable[nn.Parameter]) -> None:
    """torch's clip_grad_norm_ at 1.0, which takes no DTensors beside plain ones."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    wholes = [each.full_tensor() if isinstance(each, DTensor) else each for each in gradients]
    norm = torch.stack([whole.square().sum() for whole in wholes]).sum().sqrt().item()
    for gradient in gradients:
        gradient.mul_(min(1.0, 1.0 / (norm + 1e-6)))
