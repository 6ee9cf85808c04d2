"""Continue prompts with a trained GPT-2: python tools/generate.py --load DIR --prompt "In" ...

Prints a JSON list of {"prompt", "text" (the continuation alone), "tokens" (its ids), "finished":
"end of document" or "length"}. Nothing is put before a prompt, but an empty one begins with the end
mark, as a document does. Under torchrun the model is cut over the processes and the prompts are
dealt out to its copies; neither changes a text.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import TYPE_CHECKING, Any

from megatron.config.checks import SettingError, non_negative, positive
from megatron.config.launch import world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.config.trained import TrainedConfig
from megatron.data.tokenizer import Tokenizer
from megatron.train.trained import open_trained

if TYPE_CHECKING:
    from megatron.model.gpt2 import GPT2
    from megatron.parallel.mesh import Mesh
    from megatron.train.generate import Sampling


@dataclass(frozen=True, kw_only=True)
class Settings:
    trained: TrainedConfig

    prompt: tuple[str, ...] = ()
    """Texts to continue."""

    prompt_file: Path | None = None
    """File of texts to continue, UTF-8, one a line and no line blank."""

    interactive: bool = False
    """Continue each line that is typed, up to an empty one or the end of the input."""

    max_new_tokens: int = 100
    """Tokens after the prompt, unless the document ends before; both fit the model's positions."""

    greedy: bool = False
    """Always take the most probable token; the same as --temperature 0."""

    temperature: float | None = None
    """Divides the logits; 0 always takes the most probable token. 1 if not given."""

    top_k: int = 0
    """Draw from the k most probable tokens; 0 from all."""

    top_p: float = 1.0
    """Draw from the fewest tokens, of those of --top-k, that together have this probability."""

    seed: int = 1234
    """Seed of the draws; those of a prompt depend on it and on the prompt's number alone."""

    micro_batch_size: int = 8
    """Prompts that are continued together; does not change a text."""

    output: Path | None = None
    """JSON file for the list of prompts and continuations, which is printed as well."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "top_p", "micro_batch_size")
        non_negative(self, "top_k", "seed")
        if self.temperature is not None:
            non_negative(self, "temperature")
        if self.top_p > 1:
            raise SettingError(
                f"--top-p {self.top_p} should be above 0 and at most 1; --top-p 0.9 would work"
            )
        if self.greedy and self.temperature:
            raise SettingError(
                f"--greedy contradicts --temperature {self.temperature}; either alone would work"
            )
        if bool(self.prompt) + (self.prompt_file is not None) + self.interactive != 1:
            raise SettingError(
                "one of --prompt, --prompt-file and --interactive is needed, and no other; "
                '--prompt "In the beginning" would work'
            )
        if self.output is not None and (self.output.is_dir() or not self.output.parent.is_dir()):
            raise SettingError(
                f"--output {self.output} should be a file in a folder that is there; "
                f"--output {self.output.name or 'texts'}.json would work"
            )

    @property
    def sampling(self) -> Sampling:
        from megatron.train.generate import Sampling

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


@dataclass(frozen=True)
class Reader:
    """Turns text into prompts that a model of so many positions can continue."""

    tokenizer: Tokenizer
    positions: int
    max_new_tokens: int

    def prompt(self, place: str, text: str) -> Prompt:
        """place: where the text stands, for the message of the ValueError if it does not fit."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{place} is not UTF-8 text: {error}") from error
        tokens = self.tokenizer.encode(text) or [self.tokenizer.eod]
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


def read_prompts(settings: Settings, reader: Reader) -> list[Prompt]:
    """Those of --prompt or of --prompt-file; none where they are typed.

    Raises ValueError or FileNotFoundError, naming prompt or file and line.
    """
    texts = {f"--prompt {number}": text for number, text in enumerate(settings.prompt, start=1)}
    if settings.prompt_file is not None:
        texts = read_lines(settings.prompt_file)
    return [reader.prompt(place, text) for place, text in texts.items()]


def read_lines(file: Path) -> dict[str, str]:
    """{file and line number: text}."""
    if not file.is_file():
        raise FileNotFoundError(f"--prompt-file {file}: no such file")
    try:
        lines = file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {file} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise ValueError(
                f"--prompt-file {file}, line {number} is blank; a file without blank lines would "
                'work, and --prompt "" for an empty prompt'
            )
    return {f"--prompt-file {file}, line {n}": line for n, line in enumerate(lines, start=1)}


def continue_all(
    model: GPT2, mesh: Mesh, prompts: Sequence[Prompt], settings: Settings, eod: int
) -> list[list[int]]:
    """The new tokens of each prompt, on every rank; the data-parallel ranks share out the work."""
    from tqdm import tqdm

    from megatron.train.agree import refuse_alike
    from megatron.train.generate import generate

    size = settings.micro_batch_size
    batches = [range(len(prompts))[start : start + size] for start in range(0, len(prompts), size)]
    own = batches[mesh.data.rank :: mesh.data.size]
    found: dict[int, list[int]] = {}

    def continue_own() -> None:
        for numbers in tqdm(own, "generate", disable=not mesh.is_first):
            texts = [prompts[number].tokens for number in numbers]
            new = generate(model, mesh, texts, settings.sampling, eod=eod, numbers=numbers)
            found.update(zip(numbers, new, strict=True))

    refuse_alike(mesh, continue_own)
    for others in mesh.peers.gather(found):
        found |= others
    return [found[number] for number in range(len(prompts))]


def converse(
    model: GPT2, mesh: Mesh, reader: Reader, settings: Settings
) -> Iterator[tuple[Prompt, list[int]]]:
    """(prompt, its new tokens) of each line that is typed; every rank computes all of them."""
    from megatron.train.generate import generate

    count = 0
    for number, line in enumerate(typed_lines(mesh), start=1):
        try:
            prompt = reader.prompt(f"line {number}", line.decode())
        except ValueError as error:  # the next line may do
            if mesh.is_first:
                print(f"error: {error}", file=sys.stderr)
            continue
        eod, tokens = reader.tokenizer.eod, [prompt.tokens]
        new = generate(model, mesh, tokens, settings.sampling, eod=eod, numbers=[count])
        yield prompt, new[0]
        count += 1


def typed_lines(mesh: Mesh) -> Iterator[bytes]:
    """What is typed at the first rank, line by line, on every rank.

    The others are told every second that nothing has come, since a long silence is a failure.
    """
    typed: SimpleQueue[bytes] = SimpleQueue()
    if mesh.is_first:
        Thread(target=_read_typed, args=(typed,), daemon=True).start()
    while True:
        line = mesh.peers.gather(_next(typed) if mesh.is_first else None)[0]
        if line == b"":
            return
        if line is not None:
            yield line


def _read_typed(typed: SimpleQueue[bytes]) -> None:
    """Every line without its end; b"" for the last."""
    for line in sys.stdin.buffer:
        typed.put(line.rstrip(b"\r\n"))
    typed.put(b"")


def _next(typed: SimpleQueue[bytes]) -> bytes | None:
    try:
        return typed.get(timeout=1)
    except Empty:
        return None


def record(prompt: Prompt, new: Sequence[int], reader: Reader) -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "text": reader.tokenizer.decode(new),
        "tokens": list(new),
        "finished": "length" if len(new) == reader.max_new_tokens else "end of document",
    }


def as_text(records: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(records, indent=1, ensure_ascii=False)


def answer(
    model: GPT2, mesh: Mesh, prompts: Sequence[Prompt], reader: Reader, settings: Settings
) -> list[dict[str, Any]]:
    """The records of all prompts; the first rank prints them, typed ones as they come."""
    if not settings.interactive:
        new = continue_all(model, mesh, prompts, settings, reader.tokenizer.eod)
        records = [record(*each, reader) for each in zip(prompts, new, strict=True)]
        if mesh.is_first:
            print(as_text(records))
        return records
    records = []
    for prompt, tokens in converse(model, mesh, reader, settings):
        records.append(record(prompt, tokens, reader))
        if mesh.is_first:
            print(records[-1]["text"], flush=True)
    return records


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        settings = parse(Settings, arguments, environ)
        folders, tokenizer, manifest = open_trained(
            settings.trained, settings.parallel, world_size(environ)
        )
        positions = manifest["config"]["model"]["max_position_embeddings"]
        reader = Reader(tokenizer, positions, settings.max_new_tokens)
        prompts = read_prompts(settings, reader)

    from megatron.train.evaluate import load_newest
    from megatron.train.launch import launch
    from megatron.train.state import DTYPES

    with launch(settings.parallel, environ) as mesh, user_errors(environ, agreed=True):
        _, model = load_newest(folders, mesh, DTYPES[settings.trained.dtype])
        records = answer(model, mesh, prompts, reader, settings)
        if mesh.is_first and settings.output is not None:
            settings.output.write_text(as_text(records) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
