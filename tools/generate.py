"""Continue prompts with a trained GPT-2 or Llama: python tools/generate.py --load DIR --prompt ...

Prints a JSON list of {"prompt", "text" (only the continuation), "tokens" (its ids), "finished":
"end of document" or "length", "number" (of the prompt, from 1), and all else the text depends on}.
Each prompt is preceded by --begin-token, or by the token that began texts in training, if any; if
there is none, an empty prompt begins with the end mark, as a document does. Under torchrun the
model is sharded over the processes and prompts over its copies; neither changes a text.
"""

from __future__ import annotations

import sys

if sys.hexversion < 0x30B0000:
    sys.exit(f"error: Python 3.11 or newer is needed; this is {sys.version.split()[0]}")

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":  # run as a file, only tools/ is on the path
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megatron.checkpoint.format import Checkpoint
from megatron.config.checkpoint import TrainedConfig
from megatron.config.checks import non_negative, positive, writable
from megatron.config.launch import interruptible, world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.data.files import write_atomically
from megatron.data.tokenizer import Tokenizer
from megatron.errors import UsageError
from megatron.models.registry import positions_of
from megatron.train.trained import begin_token_of, open_trained
from tools.prompts import Prompt, Reader, of_command_line, of_file, typed_lines

if TYPE_CHECKING:
    from megatron.inference.generate import Sampling
    from megatron.models.gpt import Decoder
    from megatron.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Settings:
    trained: TrainedConfig

    prompt: tuple[str, ...] = ()
    """Texts to continue; write one that begins with a hyphen as --prompt=--text. An empty one
    begins with the end mark. Text like <|endoftext|> is read as its characters, while transformers
    reads it as the mark, so continuations differ."""

    prompt_file: Path | None = None
    """UTF-8 file of texts to continue, one per line, without blank lines."""

    interactive: bool = False
    """Continue each typed line, until an empty line or the end of the input."""

    begin_token: str | None = None
    """Token of the vocabulary before each prompt, such as <s> or <|begin_of_text|>. By default that
    of the checkpoint: its --begin-token or, for an imported model, the token that its tokenizer
    adds there."""

    max_new_tokens: int = 100
    """New tokens, unless the document ends earlier; must fit the positions after the prompt."""

    greedy: bool = False
    """Always take the most probable token; the same as --temperature 0."""

    temperature: float | None = None
    """Divides the logits; 0 always takes the most probable token. The default is 1."""

    top_k: int = 0
    """Draw from the k most probable tokens; 0 draws from all."""

    top_p: float = 1.0
    """Draw from the smallest set of tokens, of those of --top-k, with this total probability."""

    seed: int = 1234
    """Seed of the draws; those of a prompt depend only on it and on the prompt's number."""

    micro_batch_size: int = 8
    """Number of prompts that are continued together; does not change a text."""

    output: Path | None = None
    """JSON file for the list of prompts and continuations, which is also printed."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "top_p", "micro_batch_size")
        non_negative(self, "top_k", "seed")
        if self.temperature is not None:
            non_negative(self, "temperature")
        if self.top_p > 1:
            raise UsageError(
                "--top-p", self.top_p, "above 0 and at most 1", works=("--top-p", "0.9")
            )
        if self.greedy and self.temperature:
            raise UsageError(
                "--greedy",
                None,
                f"left out with --temperature {self.temperature}",
                works=("--no-greedy",),
            )
        given = bool(self.prompt) + (self.prompt_file is not None) + self.interactive
        if given != 1:
            raise UsageError(
                "--prompt",
                None,
                "given alone, or --prompt-file, or --interactive",
                works=() if given else ("--prompt", "In the beginning"),
            )
        writable(self, "output")

    @property
    def sampling(self) -> Sampling:
        from megatron.inference.generate import Sampling

        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(
            max_new_tokens=self.max_new_tokens,
            temperature=0.0 if self.greedy else temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed,
        )


def make_reader(settings: Settings, tokenizer: Tokenizer, manifest: Mapping[str, Any]) -> Reader:
    """Raises UsageError if the vocabulary lacks --begin-token."""
    positions = positions_of(manifest)
    begin = settings.begin_token
    begin = begin_token_of(manifest, tokenizer) if begin is None else begin
    return Reader(tokenizer, positions, settings.max_new_tokens, begin)


def read_prompts(settings: Settings, reader: Reader) -> list[Prompt]:
    """The prompts of --prompt or --prompt-file; an empty list if they are typed.

    Raises ValueError or FileNotFoundError, naming prompt or file and line.
    """
    file = settings.prompt_file
    contents = of_command_line(settings.prompt) if file is None else of_file(file)
    return [reader.prompt(place, content) for place, content in contents.items()]


def converse(
    model: Decoder, mesh: Mesh, reader: Reader, settings: Settings
) -> Iterator[tuple[Prompt, list[int]]]:
    """(prompt, its new tokens) for each typed line; every rank computes all of them."""
    from megatron.inference.generate import generate

    count = 0
    for number, line in enumerate(typed_lines(mesh), start=1):
        try:
            prompt = reader.prompt(f"line {number}", line)
        except ValueError as error:  # goes on with the next line
            if mesh.is_first:
                print(f"error: {error}", file=sys.stderr)
            continue
        ends, tokens = reader.tokenizer.ends, [prompt.tokens]
        new = generate(model, mesh, tokens, settings.sampling, ends=ends, numbers=[count])
        if mesh.is_first:
            print(reader.tokenizer.decode_after(new[0]), flush=True)
        yield prompt, new[0]
        count += 1


def answer(
    model: Decoder, mesh: Mesh, prompts: Sequence[Prompt], reader: Reader, settings: Settings
) -> list[dict[str, Any]]:
    """The record of each prompt, without the checkpoint; typed ones are answered as they come."""
    from megatron.inference.generate import generate_all

    if settings.interactive:
        answers = [*converse(model, mesh, reader, settings)]
    else:
        new = generate_all(
            model,
            mesh,
            [prompt.tokens for prompt in prompts],
            settings.sampling,
            ends=reader.tokenizer.ends,
            micro_batch_size=settings.micro_batch_size,
            name="generate",
        )
        answers = [*zip(prompts, new, strict=True)]
    return [
        {
            "prompt": prompt.text,
            "text": reader.tokenizer.decode_after(tokens),
            "tokens": tokens,
            "finished": "length" if len(tokens) == reader.max_new_tokens else "end of document",
            "number": number,
            "sampling": asdict(settings.sampling),
        }
        for number, (prompt, tokens) in enumerate(answers, start=1)
    ]


def as_text(records: Sequence[Mapping[str, Any]]) -> str:
    """A JSON list of objects with one fact per line: all ids of a prompt are on one line."""

    def dumped(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    bodies = [
        ",\n".join(f"  {dumped(name)}: {dumped(value)}" for name, value in record.items())
        for record in records
    ]
    return "[\n" + ",\n".join(f" {{\n{body}\n }}" for body in bodies) + "\n]"


def publish(records: Sequence[Mapping[str, Any]], settings: Settings) -> None:
    """Print the records unless they were typed and answered; write the file whole or not at all."""
    text = as_text(records)
    if not settings.interactive:
        print(text, flush=True)
    if settings.output is not None:
        write_atomically(settings.output, text.encode() + b"\n")


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        settings = parse(Settings, arguments, environ)
        folders, tokenizer, manifest = open_trained(
            settings.trained, settings.parallel, world_size(environ)
        )
        reader = make_reader(settings, tokenizer, manifest)
        prompts = read_prompts(settings, reader)

    from megatron.inference.generate import DivergedError
    from megatron.train.evaluate import load_newest
    from megatron.train.launch import launch
    from megatron.train.state import DTYPES

    with launch(settings.parallel, environ) as mesh:
        with user_errors(environ, agreed=True):
            checkpoint, model = load_newest(folders, mesh, DTYPES[settings.trained.dtype])
        # Any other error is a bug in the program, and keeps its traceback.
        with user_errors(environ, agreed=True, kinds=(DivergedError,)):
            records = answer(model, mesh, prompts, reader, settings)
        if mesh.is_first:
            with user_errors(environ):
                facts = describe(checkpoint, settings, reader)
                publish([record | facts for record in records], settings)


def describe(checkpoint: Checkpoint, settings: Settings, reader: Reader) -> dict[str, str | None]:
    """The weights that generated the text, and the dtype of the computation."""
    return {
        "checkpoint": str(checkpoint.path),
        "checkpoint_hash": checkpoint.manifest["checksum"],
        "dtype": settings.trained.dtype,
        "begin_token": reader.begin_token,
    }


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
