"""Llama on two axes, as in PyTorch's tutorial "Train your large model on multiple GPUs with tensor
parallelism": tensor x fully sharded data parallelism, with the loss on logits that stay cut along
the vocabulary.

    torchrun --nproc-per-node 4 examples/llama_2d.py --tensor-model-parallel-size 2 \\
        --dataset-name HuggingFaceFW/fineweb --dataset-config sample-10BT \\
        --vocab-file bpe_50K.json --save checkpoints

The same command resumes from the newest checkpoint in --save, on any number of processes and at any
--zero-stage, with the Adam moments, learning rate and place in the data of that step. pretrain.py
--model llama --preset llama_tutorial --zero-stage 3 is the same run.
"""

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import argparse
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from tqdm import tqdm

from megatron.api import (
    Documents,
    LlamaConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    Samples,
    StepResult,
    Tokenizer,
    TrainState,
    UsageError,
    build_state,
    build_tokenizer,
    launch,
    learning_rate,
    newest_checkpoint,
    open_document_corpus,
    open_documents,
    open_named,
    open_padded_splits,
    prefetch,
    save_checkpoint,
    train_step,
    user_errors,
)

SEED = 1234


def read_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-path", help="JSON lines, parquet, or a folder of datasets")
    data.add_argument("--dataset-name", help="on the hub, or a path that load_dataset takes")
    parser.add_argument("--dataset-config", help="its configuration, such as sample-10BT")
    parser.add_argument("--text-column", default="text", help="column or key of the text (text)")
    parser.add_argument("--vocab-file", required=True, help="tokenizer.json, with [BOT] and [EOT]")
    parser.add_argument("--save", help="directory of checkpoints, to resume from and to save in")
    parser.add_argument("--pure-bf16", action="store_true", help="moments too, and no masters")
    parser.add_argument("--no-bf16", action="store_true", help="fp32")
    parser.add_argument(
        "--zero-stage",
        type=int,
        choices=range(4),
        default=3,
        help="what data-parallel models share out: 1, moments and masters; 2, gradients, too; 3, "
        "weights, too (3)",
    )
    for flag, default, text in (
        ("--tensor-model-parallel-size", 1, "ranks that share each layer"),
        ("--num-layers", 12, "transformer layers"),
        ("--hidden-size", 768, "width of the stream between them; that of the MLP is four times"),
        ("--num-attention-heads", 12, "attention heads of a layer"),
        ("--num-query-groups", 3, "heads of keys and values"),
        ("--seq-length", 512, "tokens at which a document is cut, and up to which it is padded"),
        ("--global-batch-size", 32, "documents of a step"),
        ("--micro-batch-size", 8, "documents of a forward pass on one model"),
        ("--epochs", 3, "passes over the documents"),
        ("--lr-warmup-iters", 1000, "steps in which the learning rate rises"),
        ("--save-interval", 1000, "steps between checkpoints"),
    ):
        parser.add_argument(flag, type=count, default=default, help=f"{text} ({default})")
    return parser.parse_args()


def count(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def configs(flags: argparse.Namespace) -> tuple[LlamaConfig, OptimizerConfig]:
    model = LlamaConfig(
        num_layers=flags.num_layers,
        hidden_size=flags.hidden_size,
        num_attention_heads=flags.num_attention_heads,
        num_query_groups=flags.num_query_groups,
    )
    # LinearLR from a tenth of the rate, then CosineAnnealingLR to 0; all parameters decay.
    optimizer = OptimizerConfig(
        lr=1e-3,
        min_lr=0.0,
        lr_warmup_iters=flags.lr_warmup_iters,
        lr_warmup_init=1e-4,
        adam_beta2=0.99,
        weight_decay=0.1,
        decay_biases_and_norms=True,
    )
    return model, optimizer


def open_data(flags: argparse.Namespace) -> tuple[Samples, Tokenizer, dict[str, Any]]:
    """The documents in order, their tokenizer, and facts that a resumed run has to match. A sample
    is [BOT] text [EOT], cut and padded; padding is not scored."""
    tokenizer = build_tokenizer("HuggingFaceTokenizer", flags.vocab_file, None)
    read: Callable[[str], Documents] = partial(open_documents, key=flags.text_column)
    if flags.dataset_name:
        read = partial(open_named, config=flags.dataset_config, column=flags.text_column)
    corpus = open_document_corpus([flags.data_path or flags.dataset_name], tokenizer, read=read)
    data, _, _ = open_padded_splits(
        corpus,
        tokenizer,
        split="1,0,0",
        seq_length=flags.seq_length,
        seed=SEED,
        shuffle=False,
        begin_token="[BOT]",
        end_token="[EOT]",
    )
    assert data is not None
    return data, tokenizer, corpus.identity


def facts_of(
    flags: argparse.Namespace, model: LlamaConfig, tokenizer: Tokenizer, identity: dict[str, Any]
) -> dict[str, Any]:
    """Facts of the run for its checkpoints. tools/generate.py and the conversions read them; if one
    differs, it is another run."""
    names = ("global_batch_size", "epochs", "seq_length", "lr_warmup_iters", "pure_bf16", "no_bf16")
    data = {"tokenizer_type": tokenizer.kind, "begin_token": "[BOT]"}
    return {
        "kind": model.kind,
        "config": json.loads(json.dumps({"model": asdict(model), "data": data})),  # lists, as saved
        **identity,
        "flags": {name: getattr(flags, name) for name in names},
    }


def train(
    state: TrainState,
    data: Samples,
    optimizer: OptimizerConfig,
    flags: argparse.Namespace,
    save: Callable[[], object],
) -> Iterator[StepResult]:
    """Trains from the state's step to the last one; leaves out what does not fill a last batch."""
    batch, mesh = flags.global_batch_size, state.mesh
    steps = flags.epochs * data.samples_per_epoch // batch
    for micro_batches in prefetch(
        data,
        range(state.samples, steps * batch, batch),
        micro_batch_size=flags.micro_batch_size,
        data_rank=mesh.rank("batch"),
        data_size=mesh.size("batch"),
    ):
        yield train_step(state, micro_batches, learning_rate(optimizer, state.updates + 1, steps))
        if flags.save and (state.step % flags.save_interval == 0 or state.step == steps):
            save()


def main() -> None:
    flags = read_flags()
    with user_errors(os.environ):  # bad input gives one line, before processes connect
        parallel = ParallelConfig(tensor_model_parallel_size=flags.tensor_model_parallel_size)
        model, optimizer = configs(flags)
        precision = PrecisionConfig(bf16=not flags.no_bf16, pure_bf16=flags.pure_bf16)
        world, batch = int(os.environ.get("WORLD_SIZE", "1")), flags.global_batch_size
        parallel.check(world, model.widths)
        at_once = flags.micro_batch_size * parallel.data_parallel_size(world)
        if batch % at_once:
            allowed = f"a multiple of --micro-batch-size x models, {at_once}"
            raise UsageError("--global-batch-size", batch, allowed)
        data, tokenizer, identity = open_data(flags)
        if not (steps := flags.epochs * data.samples_per_epoch // batch):
            raise UsageError("--epochs", flags.epochs, f"such that {batch} documents are read")
        if flags.lr_warmup_iters > steps:
            raise UsageError("--lr-warmup-iters", flags.lr_warmup_iters, f"at most {steps} steps")
        if flags.seq_length > model.max_position_embeddings:
            allowed = f"at most {model.max_position_embeddings}"
            raise UsageError("--seq-length", flags.seq_length, allowed)
        if flags.save and Path(flags.save).is_file():
            raise UsageError("--save", flags.save, "a directory, not a file")
        facts = facts_of(flags, model, tokenizer, identity)

    with launch(parallel) as mesh:
        state = build_state(
            model,
            mesh,
            identity["vocab_size"],
            seed=SEED,
            optimizer=optimizer,
            precision=precision,
            zero_stage=flags.zero_stage,
        )

        def save() -> None:
            own = state.facts() | facts
            save_checkpoint(flags.save, state.step, state.slices(), own, mesh, tokenizer.files)

        if flags.save and (found := newest_checkpoint(flags.save, mesh)):
            with user_errors(os.environ, agreed=True):
                for name, value in facts.items():
                    if (saved := found.manifest.get(name)) != value:
                        allowed = f"of a run with the same {name}: {saved}, not {value}"
                        raise UsageError("--save", flags.save, allowed)
                state.load(found)
        with tqdm(total=steps, initial=state.step, disable=not mesh.is_first) as bar:
            for result in train(state, data, optimizer, flags, save):
                bar.set_postfix(loss=f"{result.loss:.4f}")
                bar.update()


if __name__ == "__main__":
    main()
