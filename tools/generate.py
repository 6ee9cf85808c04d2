"""Continue prompts with a trained GPT-2 or Llama.

    python tools/generate.py --load checkpoints --prompt "In order to" --max-new-tokens 64
    python tools/generate.py --load checkpoints --prompt-file prompts.txt --greedy

Prints a JSON list of {"prompt", "text" (only the continuation), "tokens" (its ids), "finished":
"end of document" or "length", "number" (of the prompt, from 1), and all else the text depends on}.
Each prompt is preceded by --begin-token, or by the token that began texts in training, if any; if
there is none, an empty prompt begins with the end mark, as a document does. Under torchrun the
model is sharded over the processes and prompts over its copies; neither changes a text.
"""

from __future__ import annotations

if not __package__:  # run as a file
    __import__("runpy").run_path(f"{__file__.rpartition('/')[0] or '.'}/start.py")

import json
import os
import select
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.config.checkpoint import TrainedConfig
from megatron.config.checks import non_negative, positive, writable
from megatron.config.launch import interruptible, world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.data.files import write_atomically
from megatron.data.tokenizer import Tokenizer
from megatron.errors import UsageError
from megatron.inference.prompts import of_file
from megatron.models.registry import positions_of
from megatron.train.trained import begin_token_of, open_trained

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

    output: Path | None = field(default=None, metadata={"alias": "json"})
    """JSON file for the list of prompts and continuations, which is also printed. Also spelt
    --json."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "top_p", "micro_batch_size")
        non_negative(self, "top_k", "seed")
        if self.temperature is not None:
            non_negative(self, "temperature")
        if self.top_p > 1:
            works = ("--top-p", "0.9")
            raise UsageError("--top-p", self.top_p, "above 0 and at most 1", works=works)
        if self.greedy and self.temperature:
            allowed = f"left out with --temperature {self.temperature}"
            raise UsageError("--greedy", None, allowed, works=("--no-greedy",))
        given = bool(self.prompt) + (self.prompt_file is not None) + self.interactive
        if given != 1:
            works = () if given else ("--prompt", "In the beginning")
            allowed = "given alone, or --prompt-file, or --interactive"
            raise UsageError("--prompt", None, allowed, works=works)
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


@dataclass(frozen=True)
class Prompt:
    text: str
    tokens: Sequence[int]


class Reader:
    """Turns text into prompts that a model with this number of positions can continue.

    begin_token: see --begin-token; raises UsageError if the vocabulary lacks it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        positions: int,
        max_new_tokens: int,
        begin_token: str | None = None,
    ) -> None:
        self.tokenizer, self.positions = tokenizer, positions
        self.max_new_tokens, self.begin_token = max_new_tokens, begin_token
        try:
            self.begin = [] if begin_token is None else [tokenizer.token_id(begin_token)]
        except ValueError as error:
            allowed = f"a token of the vocabulary: {error}"
            raise UsageError("--begin-token", begin_token, allowed) from error

    def prompt(self, place: str, content: bytes) -> Prompt:
        """place: source of the content, for the message. Raises ValueError if the content is not
        UTF-8 or does not fit the model's positions."""
        try:
            text = content.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{place} is not UTF-8 text: {error}") from error
        tokens = [*self.begin, *self.tokenizer.encode(text)] or [self.tokenizer.eod]
        room = self.positions - len(tokens)
        if room < self.max_new_tokens:
            new = min(self.max_new_tokens, self.positions - 1)
            cure = f"a prompt of at most {self.positions - new} tokens with --max-new-tokens {new}"
            raise ValueError(
                f"{place}: {len(tokens)} tokens and --max-new-tokens {self.max_new_tokens} do not "
                f"fit the model's {self.positions} positions; "
                f"{f'--max-new-tokens {room}' if room > 0 else cure} would work"
            )
        return Prompt(text, tokens)


def of_command_line(texts: Sequence[str]) -> dict[str, bytes]:
    """{flag and number: content}; bytes that are not UTF-8 are restored as they were typed."""
    return {f"--prompt {n}": t.encode(errors="surrogateescape") for n, t in enumerate(texts, 1)}


def typed_lines(mesh: Mesh) -> Iterator[bytes]:
    """On every rank the lines that are typed at the first rank, until an empty one.

    The first rank sends the others a message every second, as a long silence counts as a failure.
    """
    lines = Lines(sys.stdin.fileno()) if mesh.is_first else None
    is_seen = mesh.is_first and sys.stdin.isatty() and sys.stderr.isatty()
    sign = "ready: an empty line ends\n> "
    while True:
        if is_seen:
            print(sign, end="", file=sys.stderr, flush=True)
        line, sign = None, "> "
        while line is None:
            line = mesh.control.gather(None if lines is None else lines.next(1.0))[0]
        if not line:
            return
        yield line


class Lines:
    """Lines of a terminal, pipe or file, read with a time limit.

    Reads the descriptor directly: a thread that waits in Python's own reader would hold its lock
    when the program ends, which aborts the program.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._unread = b""

    def next(self, seconds: float) -> bytes | None:
        """The next line without its end, None if it does not come in time, b"" after the last."""
        if b"\n" not in self._unread:
            if not select.select([self._descriptor], [], [], seconds)[0]:
                return None
            more = os.read(self._descriptor, 1 << 16)
            self._unread += more or b"\n"  # at the end of the input, ends the last line
        line, end, rest = self._unread.partition(b"\n")
        if not end:
            return None
        self._unread = rest
        return line.rstrip(b"\r")


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
        facts = {
            "checkpoint": str(checkpoint.path),
            "checkpoint_hash": checkpoint.manifest["checksum"],
            "dtype": settings.trained.dtype,
            "begin_token": reader.begin_token,
        }
        text = as_text([record | facts for record in records])
        if mesh.is_first:
            with user_errors(environ):
                if not settings.interactive:  # these were printed as they came
                    print(text, flush=True)
                if settings.output is not None:
                    write_atomically(settings.output, text.encode() + b"\n")


if __name__ == "__main__":
    with interruptible(os.environ):
        main(sys.argv[1:], os.environ)
