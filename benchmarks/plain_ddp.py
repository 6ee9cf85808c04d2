"""A trainer in plain torch: DistributedDataParallel, AdamW, asynchronous saves by torch's DCP.

    torchrun --nproc-per-node 2 benchmarks/plain_ddp.py --save DIR --save-interval 20 --steps 400

It is the peer of useful_time.py, and is written as the documentation of torch writes it: the newest
folder with a `.metadata` is loaded, two folders are kept, one save is written at a time. It has the
model and the sizes of this project's run, on tokens that a generator draws. tools/chaos takes its
time from the events that it writes, see tools/chaos/probe.py. It imports torch alone, as its
restarts are measured.
"""

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import argparse
import json
import os
import shutil
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel

from benchmarks.plain_gpt2 import PlainGPT2

SIZES = {
    "num_layers": 4,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "seq_length": 256,
    "vocab_size": 8192,
    "global_batch_size": 4,
}


def write_event(event: str, **facts: Any) -> None:
    if folder := os.environ.get("CHAOS_EVENTS"):
        line = {"time": time.monotonic(), "pid": os.getpid(), "event": event, **facts}
        with Path(folder, f"rank_{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def folders(save: Path) -> list[Path]:
    """The checkpoints that are whole, oldest first."""
    return sorted(each.parent for each in save.glob("step_*/.metadata"))


def main() -> None:
    write_event("start")
    parser = argparse.ArgumentParser(description="Train a GPT-2 in plain torch.")
    parser.add_argument("--save", type=Path, required=True, help="folder of checkpoints")
    parser.add_argument("--save-interval", type=int, required=True, help="steps between saves")
    parser.add_argument("--steps", type=int, required=True, help="steps of the run")
    parser.add_argument("--timeout-minutes", type=float, default=10.0, help="of a collective")
    for name, size in SIZES.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size)
    flags = parser.parse_args()
    flags.max_position_embeddings, flags.layernorm_epsilon = flags.seq_length, 1e-5

    dist.init_process_group("gloo", timeout=timedelta(minutes=flags.timeout_minutes))
    saving = dist.new_group(backend="gloo")  # of the thread that writes
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1234)
    model = PlainGPT2(flags, flags.vocab_size)
    model.head.weight = model.word_embedding.weight
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1)

    step = 0
    if whole := folders(flags.save):
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=whole[-1])
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        step = state["step"]
    write_event("loaded", step=step)

    pending: Any = None
    while step < flags.steps:
        draw = torch.Generator().manual_seed(step * size + rank)
        shape = flags.global_batch_size // size, flags.seq_length + 1
        tokens = torch.randint(flags.vocab_size, shape, generator=draw)
        loss = ddp(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        write_event("step", step=step)
        if step % flags.save_interval == 0 or step == flags.steps:
            write_event("save", at="begin", step=step)
            if pending is not None:
                pending.result()
                if rank == 0:
                    for old in folders(flags.save)[:-2]:
                        shutil.rmtree(old)
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optimizer": moments, "step": step}
            folder = flags.save / f"step_{step:08d}"
            pending = dcp.async_save(state, checkpoint_id=folder, process_group=saving)
            write_event("save", at="end", step=step)
    if pending is not None:
        pending.result()
    write_event("end", step=step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
