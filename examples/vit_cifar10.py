"""ViT on CIFAR-10 in each tensor-parallel mode, as Colossal-AI's example with engine and hooks.

    torchrun --nproc-per-node 4 examples/vit_cifar10.py --data-path cifar10 --mode 2d

pretrain.py --model vit --preset vit_tiny_cifar10 is this run with checkpoints and resume.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from megatron.api import (
    Accuracy,
    Images,
    OptimizerConfig,
    TrainingParallelConfig,
    TrainState,
    ViTConfig,
    build_state,
    launch,
    learning_rate,
    mean_losses,
    open_images,
    prefetch,
    train_step,
    user_errors,
)

SEED = 1234
Hook = Callable[[TrainState, int, float], None]
"""Called after each epoch with the state, the epoch's number and its mean loss."""


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-path", type=Path, required=True, help="folder of the images")
    parser.add_argument("--cache-dir", type=Path, help="for the packed images; that of the images")
    parser.add_argument("--mode", default="1d", choices=("1d", "2d", "2.5d", "3d"))
    for flag, default, text in (
        ("--tensor-model-parallel-size", 0, "ranks that share each layer; 0: all"),
        ("--tensor-parallel-depth", 1, "squares of ranks in 2.5d"),
        ("--image-size", 32, "pixels"),
        ("--num-layers", 6, "transformer layers"),
        ("--hidden-size", 512, "width of the stream between them"),
        ("--num-attention-heads", 8, "attention heads of a layer"),
        ("--micro-batch-size", 64, "images of one forward on a rank"),
        ("--global-batch-size", 512, "images of a step"),
        ("--epochs", 60, "passes over the training images"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{text} ({default})")
    return parser.parse_args()


def fit(state: TrainState, data: Images, flags: argparse.Namespace, hooks: Sequence[Hook]) -> None:
    batch, mesh = flags.global_batch_size, state.mesh
    steps = data.samples_per_epoch // batch  # of an epoch
    optimizer = OptimizerConfig(
        lr=1e-3,
        min_lr=0.0,
        lr_decay_style="linear",
        lr_warmup_iters=min(5 * steps, steps * flags.epochs // 2),
    )
    losses = []
    for micro_batches in prefetch(
        data,
        range(0, steps * flags.epochs * batch, batch),
        micro_batch_size=flags.micro_batch_size,
        data_rank=mesh.rank("batch"),
        data_size=mesh.size("batch"),
    ):
        lr = learning_rate(optimizer, state.step + 1, steps * flags.epochs)
        losses.append(train_step(state, micro_batches, lr).loss)
        if len(losses) == steps:
            for hook in hooks:
                hook(state, state.step // steps, sum(losses) / steps)
            losses.clear()


def main() -> None:
    flags = read_flags()
    with user_errors(os.environ):  # bad input gives one line, before processes connect
        world = int(os.environ.get("WORLD_SIZE", "1"))
        parallel = TrainingParallelConfig(
            tensor_model_parallel_size=flags.tensor_model_parallel_size or world,
            tensor_parallel_mode=flags.mode,
            tensor_parallel_depth=flags.tensor_parallel_depth,
        )
        packed = open_images(flags.data_path, flags.image_size, beside=flags.cache_dir)
        model = ViTConfig(
            num_layers=flags.num_layers,
            hidden_size=flags.hidden_size,
            num_attention_heads=flags.num_attention_heads,
            image_size=flags.image_size,
            image_mean=packed.mean,
            image_std=packed.std,
        )
        parallel.check(world, model.widths)
        train = packed.series("training", SEED, crop_padding=4, flip=True)
        test = packed.series("validation", SEED)

    def report(state: TrainState, epoch: int, loss: float) -> None:
        size, count = flags.micro_batch_size, test.samples_per_epoch
        found = mean_losses(state.model, Accuracy(state.model), test, count, size, state.mesh)
        if state.mesh.is_first:
            print(f"epoch {epoch} | loss {loss:.4f} | accuracy {found['top1']:.4f}", flush=True)

    with launch(parallel) as mesh:
        state = build_state(
            model,
            mesh,
            len(packed.classes),
            seed=SEED,
            dtype=torch.bfloat16 if mesh.device.type == "cuda" else torch.float32,
            optimizer=OptimizerConfig(weight_decay=0.0),
        )
        fit(state, train, flags, [report])


if __name__ == "__main__":
    main()
