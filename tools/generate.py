"""Continue prompts with a trained GPT-2: python tools/generate.py --load DIR --prompt "In" ...

Under torchrun the model is cut over the processes; every rank draws the same token.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.config.checks import SettingError, non_negative, positive
from megatron.config.launch import world_size
from megatron.config.parallel import ParallelConfig
from megatron.config.parse import parse, user_errors
from megatron.config.trained import TrainedConfig
from megatron.train.trained import open_trained

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from megatron.model.gpt2 import GPT2
    from megatron.parallel.mesh import Mesh


@dataclass(frozen=True, kw_only=True)
class Settings:
    trained: TrainedConfig

    prompt: tuple[str, ...]
    """Texts to continue."""

    max_new_tokens: int = 100
    """Tokens after the prompt, unless the document ends before."""

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most probable token."""

    top_k: int = 0
    """Draw from the k most probable tokens; 0 from all."""

    top_p: float = 1.0
    """Draw from the fewest tokens that together have this probability."""

    seed: int = 1234
    """Seed of the draws."""

    output: str | None = None
    """JSON file for the list of prompts and continuations, which is printed as well."""

    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def __post_init__(self) -> None:
        positive(self, "max_new_tokens", "top_p")
        non_negative(self, "temperature", "top_k", "seed")
        if not self.prompt:
            raise SettingError('--prompt names no text; --prompt "In the beginning" would work')


def choose(logits: Tensor, settings: Settings, generator: Generator) -> int:
    """A token id drawn from logits [v], fp32, on the CPU."""
    import torch

    if settings.temperature == 0:
        return int(logits.argmax())
    probability, order = (logits / settings.temperature).softmax(-1).sort(descending=True)
    if settings.top_k:
        probability[settings.top_k :] = 0
    before = probability.cumsum(0) - probability
    probability[before >= settings.top_p] = 0
    return int(order[torch.multinomial(probability, 1, generator=generator)])


def continue_tokens(
    model: GPT2, mesh: Mesh, tokens: Sequence[int], eod: int, settings: Settings, number: int
) -> list[int]:
    """The tokens that follow `tokens`, up to an end mark. `number`: of the prompt, for its draws.

    The model reads the last max_position_embeddings tokens.
    """
    import torch

    from megatron.train.evaluate import whole_logits

    generator = torch.Generator().manual_seed(settings.seed + number)
    longest = model.position_embedding.weight.shape[0]
    text = [eod, *tokens]
    start = len(text)
    while len(text) - start < settings.max_new_tokens and (len(text) == start or text[-1] != eod):
        window = torch.tensor([text[-longest:]], device=mesh.device)
        text.append(choose(whole_logits(model, mesh, window)[0, -1].cpu(), settings, generator))
    return text[start:-1] if text[-1] == eod else text[start:]


def main(arguments: Sequence[str], environ: Mapping[str, str]) -> None:
    with user_errors(environ):
        settings = parse(Settings, arguments, environ)
        folders, tokenizer, _ = open_trained(
            settings.trained, settings.parallel, world_size(environ)
        )

    from tqdm import tqdm

    from megatron.train.evaluate import load_newest
    from megatron.train.launch import launch

    with launch(settings.parallel, environ) as mesh:
        _, model = load_newest(folders, mesh)
        samples = []
        for number, prompt in enumerate(tqdm(settings.prompt, "sample", disable=not mesh.is_first)):
            tokens = tokenizer.encode(prompt)
            new = continue_tokens(model, mesh, tokens, tokenizer.eod, settings, number)
            samples.append({"prompt": prompt, "text": tokenizer.decode(new)})
        if mesh.is_first:
            text = json.dumps(samples, indent=1, ensure_ascii=False)
            print(text)
            if settings.output is not None:
                Path(settings.output).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:], os.environ)
