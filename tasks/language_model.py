"""A checkpoint of this project as a language model of lm-evaluation-harness.

Every rank gets all requests, computes the share of its data-parallel rank and gathers all answers,
so the harness sees one process. Log-probabilities and greedy texts are those of tasks/score.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron.data.tokenizer import Tokenizer
from megatron.libraries import Library
from megatron.models.gpt import Decoder
from megatron.parallel.mesh import Mesh
from tasks.protocol import Prompts, Window
from tasks.score import continue_prompts, score_windows

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

api = Library("lm_eval.api.model")
models, utils = (Library(f"lm_eval.{name}utils") for name in ("models.", ""))

Request = tuple[tuple[str, str], list[int], list[int]]  # texts, context ids, continuation ids


class CheckpointLM(api.TemplateLM):
    def __init__(
        self,
        model: Decoder,
        mesh: Mesh,
        tokenizer: Tokenizer,
        micro_batch_size: int,
        begin: Sequence[int] = (),
    ) -> None:
        """model: in evaluation mode. micro_batch_size: does not change the answers. begin: the id
        of the begin mark, or none."""
        super().__init__()
        self._model, self._mesh, self._tokenizer = model, mesh, tokenizer
        self._micro_batch_size, self._begin = micro_batch_size, list(begin)
        self._device = mesh.device

    @property
    def eot_token_id(self) -> int:
        return self._tokenizer.eod

    @property
    def prefix_token_id(self) -> int:
        """Id before the first token of a text: the begin mark, or without one the end mark."""
        return (self._begin or [self._tokenizer.eod])[0]

    @property
    def max_length(self) -> int:
        return self._model.positions

    @property
    def max_gen_toks(self) -> int:
        """New tokens if a task does not say, as in the harness's own models."""
        return 256

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Ids of the string, after the begin mark if there is one and the harness allows it."""
        begin = [] if add_special_tokens is False else self._begin
        return [*begin, *self._tokenizer.encode(string)]

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        is_quiet = disable_tqdm or not self._mesh.is_first
        return super().loglikelihood(requests, disable_tqdm=is_quiet)

    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-probability, whether greedy decoding gives it) of each continuation."""
        windows = [self._window(*ids) for _, *ids in requests]
        return self._score(windows, "log-likelihoods")

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Log-probability of each whole text, in the harness's own windows."""
        parts = [list(self._rolling_windows(*request.args)) for request in requests]
        answers = iter(self._score([window for part in parts for window in part], "whole texts"))
        return [sum(next(answers)[0] for _ in part) for part in parts]

    def _score(self, windows: Sequence[Window], name: str) -> list[tuple[float, bool]]:
        scores = score_windows(self._model, self._mesh, windows, self._micro_batch_size, name)
        return list(zip(scores.log_probability.tolist(), scores.all_hit.tolist(), strict=True))

    def _rolling_windows(self, text: str) -> Iterator[Window]:
        # One begin mark, not scored; the harness's own models put a second one after it.
        pairs = utils.get_rolling_token_windows(
            self._tokenizer.encode(text), self.prefix_token_id, self.max_length, context_len=1
        )
        for pair in pairs:
            yield self._window(*utils.make_disjoint_window(pair))

    def _window(self, context: list[int], continuation: list[int]) -> Window:
        """A window of the last tokens, if there are more than the model has positions."""
        if not 0 < len(continuation) <= self.max_length:
            raise ValueError(
                f"a continuation of {len(continuation)} tokens cannot be scored; one of 1 to "
                f"{self.max_length}, the model's positions, would work"
            )
        tokens = [*context, *continuation][-self.max_length - 1 :]
        return Window(tokens[:-1], tokens[1:], len(tokens) - 1 - len(continuation))

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy texts, cut before the first of a request's stop sequences."""
        alike: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts = {}
        for options, numbers in alike.items():
            contexts = [requests[number].args[0] for number in numbers]
            texts |= zip(numbers, self._continue(contexts, json.loads(options)), strict=True)
        return [texts[number] for number in range(len(requests))]

    def _continue(self, contexts: Sequence[str], options: Mapping[str, Any]) -> list[str]:
        settings: dict[str, Any] = {**models.normalize_gen_kwargs(dict(options), self.max_gen_toks)}
        most = settings["max_gen_toks"]
        if settings["do_sample"]:
            raise ValueError("a task asks for sampled texts; one that decodes greedily would work")
        room = self.max_length - most
        if room < 1:
            raise ValueError(
                f"a task asks for {most} new tokens of a model with {self.max_length} positions; "
                f"max_gen_toks below {self.max_length} would work"
            )
        stops = [stop for stop in models.handle_stop_sequences(settings["until"], eos=None) if stop]

        def is_done(new: Sequence[int]) -> bool:
            text = self._tokenizer.decode(new)
            return any(stop in text for stop in stops)

        prompts = [self.tok_encode(context)[-room:] for context in contexts]
        written = continue_prompts(
            self._model,
            self._mesh,
            Prompts(prompts, is_done, most, self._tokenizer.ends),
            self._micro_batch_size,
            "texts",
        )
        decoded = [self._tokenizer.decode(new) for new in written]
        return [models.postprocess_generated_text(text, stops, None) for text in decoded]
