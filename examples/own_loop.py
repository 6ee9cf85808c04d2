"""GPT-2 in your own training loop, saved and resumed at any layout.

    torchrun --nproc-per-node 2 examples/own_loop.py --tensor 2 --save checkpoints --steps 20
    torchrun --nproc-per-node 2 examples/own_loop.py --tensor 1 --save checkpoints --steps 40

The second command resumes where the first ended, with a whole model on each of two ranks.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
from collections.abc import Iterator

from megatron.api import (
    GPT2Config,
    OptimizerConfig,
    ParallelConfig,
    RandomText,
    StepResult,
    TrainState,
    build_state,
    launch,
    learning_rate,
    newest_checkpoint,
    prefetch,
    save_checkpoint,
    train_step,
)

VOCABULARY, SEQUENCE, BATCH, DECAY_STEPS = 101, 32, 4, 100
MODEL = GPT2Config(
    num_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    max_position_embeddings=SEQUENCE,
)
OPTIMIZER = OptimizerConfig(lr=1e-3, lr_warmup_iters=5)


def train(state: TrainState, steps: int) -> Iterator[StepResult]:
    """Trains up to this step of the run; samples and dropout depend on numbers, not on ranks."""
    data = RandomText(vocabulary=VOCABULARY, length=SEQUENCE, seed=1)
    batches = prefetch(
        data,
        range(state.samples, steps * BATCH, BATCH),
        micro_batch_size=1,
        data_rank=state.mesh.rank("batch"),
        data_size=state.mesh.size("batch"),
    )
    for micro_batches in batches:
        lr = learning_rate(OPTIMIZER, state.updates + 1, DECAY_STEPS)
        yield train_step(state, micro_batches, lr, return_outputs=state.step == steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tensor", type=int, default=1, help="ranks that share one model")
    parser.add_argument("--steps", type=int, default=20, help="of the whole run")
    parser.add_argument("--save", help="directory of checkpoints, to resume from and to save in")
    flags = parser.parse_args()

    with launch(ParallelConfig(tensor_model_parallel_size=flags.tensor)) as mesh:
        state = build_state(MODEL, mesh, VOCABULARY, seed=1, optimizer=OPTIMIZER)
        if flags.save and (found := newest_checkpoint(flags.save, mesh)):
            state.load(found)
        begun = state.step
        for result in train(state, flags.steps):
            if mesh.is_first:
                print(f"step {state.step} | loss {result.loss:.4f} | norm {result.grad_norm:.4f}")
            if result.outputs is not None and mesh.is_first:
                hits = result.outputs.logits.argmax(-1) == result.outputs.labels
                print(f"{hits.float().mean():.1%} of the last batch are predicted")
        if flags.save and state.step > begun:
            save_checkpoint(flags.save, state.step, state.slices(), state.facts(), mesh)


if __name__ == "__main__":
    main()
