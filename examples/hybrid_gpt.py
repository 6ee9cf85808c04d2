"""GPT-2 XL, hybrid parallel, as in Colossal-AI's tutorial "Train GPT using hybrid parallelism".

    torchrun --nproc-per-node 4 examples/hybrid_gpt.py --data-path web.jsonl \\
        --vocab-file vocab.json --merge-file merges.txt --log-dir runs/hybrid

Further processes are data-parallel. pretrain_gpt2.py --preset gpt2_xl_colossalai is the same run,
with checkpoints, evaluation and resume.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from megatron.api import (
    GPT2Config,
    Metrics,
    OptimizerConfig,
    PrecisionConfig,
    Samples,
    StepResult,
    TensorBoard,
    TrainingParallelConfig,
    TrainState,
    build_state,
    build_tokenizer,
    launch,
    open_document_corpus,
    open_padded_splits,
    peak_memory,
    plan_pipeline,
    prefetch,
    train_step,
    user_errors,
)

# torch.optim.Adam(parameters, lr=1.5e-4, weight_decay=1e-2): decay is added to the gradient, for
# every parameter.
OPTIMIZER = OptimizerConfig(
    weight_decay=1e-2, decoupled_weight_decay=False, decay_biases_and_norms=True, clip_grad=0.0
)
LR, SEED = 1.5e-4, 1234


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data-path", required=True, help='JSON lines: {"text": "..."}')
    parser.add_argument("--vocab-file", required=True, help="GPT-2's vocab.json")
    parser.add_argument("--merge-file", required=True, help="GPT-2's merges.txt")
    parser.add_argument("--log-dir", type=Path, help="for metrics.jsonl and TensorBoard's files")
    for flag, default, text in (
        ("--num-layers", 48, "transformer layers"),
        ("--hidden-size", 1600, "width of the stream between them"),
        ("--num-attention-heads", 32, "attention heads of a layer"),
        ("--seq-length", 1024, "tokens at which a document is cut, and up to which it is padded"),
        ("--pipeline-model-parallel-size", 2, "pipeline stages"),
        ("--tensor-model-parallel-size", 2, "ranks that share each layer"),
        ("--num-virtual-stages-per-pipeline-rank", 2, "NUM_CHUNKS, interleaved; 1: plain 1F1B"),
        ("--num-micro-batches", 192, "micro-batches of a step, on each model"),
        ("--micro-batch-size", 1, "samples of one of them"),
        ("--train-iters", 1000, "optimizer steps"),
    ):
        parser.add_argument(flag, type=int, default=default, help=f"{text} ({default})")
    parser.add_argument("--precision", choices=("fp16", "bf16", "fp32"), default="fp16")
    return parser.parse_args()


def train(state: TrainState, data: Samples, flags: argparse.Namespace) -> Iterator[StepResult]:
    models = state.mesh.size("batch")
    batch = flags.num_micro_batches * flags.micro_batch_size * models
    for micro_batches in prefetch(
        data,
        range(0, flags.train_iters * batch, batch),
        micro_batch_size=flags.micro_batch_size,
        data_rank=state.mesh.rank("batch"),
        data_size=models,
    ):
        yield train_step(state, micro_batches, LR)


def main() -> None:
    flags = read_flags()
    with user_errors(os.environ):  # bad input gives one line, before processes connect
        stages = flags.pipeline_model_parallel_size
        virtual = flags.num_virtual_stages_per_pipeline_rank if stages > 1 else None
        parallel = TrainingParallelConfig(
            pipeline_model_parallel_size=stages,
            tensor_model_parallel_size=flags.tensor_model_parallel_size,
            num_virtual_stages_per_pipeline_rank=virtual,
            pipeline_partition="uniform",
        )
        model = GPT2Config(
            num_layers=flags.num_layers,
            hidden_size=flags.hidden_size,
            num_attention_heads=flags.num_attention_heads,
            activation="gelu",
            max_position_embeddings=flags.seq_length,
            make_vocab_size_divisible_by=64,  # 50,257 tokens become 50,304
            attention_dropout=0.0,
            hidden_dropout=0.0,
            recompute_granularity="full",
        )
        parallel.check(int(os.environ.get("WORLD_SIZE", "1")), model.widths)
        parallel.check_model(model)
        tokenizer = build_tokenizer("GPT2BPETokenizer", flags.vocab_file, flags.merge_file)
        corpus = open_document_corpus([flags.data_path], tokenizer)  # its tokens are kept beside it
        data, _, _ = open_padded_splits(
            corpus,
            tokenizer,
            split="1,0,0",
            seq_length=flags.seq_length,
            seed=SEED,
            cache_tokens=True,
        )
        assert data is not None
        vocab_size = corpus.vocab_size
        plan = plan_pipeline(parallel, model, seq_length=flags.seq_length, vocab_size=vocab_size)
        plan.program(0, flags.num_micro_batches)  # refuses what the schedule does not support

    dtypes = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    with launch(parallel) as mesh:
        state = build_state(
            model,
            mesh,
            vocab_size,
            seed=SEED,
            dtype=dtypes[flags.precision],
            optimizer=OPTIMIZER,
            precision=PrecisionConfig(fp16=flags.precision == "fp16"),
            pipeline=plan,
        )
        file = flags.log_dir and flags.log_dir / "metrics.jsonl"
        loggers = [TensorBoard(flags.log_dir, 0)] if file and mesh.is_first else []
        with Metrics(file, mesh, start=0, callbacks=loggers) as metrics:
            for text in state.describe_stages(flags.num_micro_batches):
                metrics.log(text)
            before = time.monotonic()
            for result in train(state, data, flags):
                seconds, before = time.monotonic() - before, time.monotonic()
                line = {"step": state.step, "loss": result.loss, "lr": LR}
                line |= {"loss_scale": state.scaler.scale, "skipped_steps": state.skipped}
                line["tokens_per_second"] = result.tokens / seconds
                line["peak_memory_bytes"] = max(peak_memory(mesh))
                metrics.advance()
                metrics.write(line)
                metrics.log(" | ".join(f"{name} {value:.6g}" for name, value in line.items()))


if __name__ == "__main__":
    main()
