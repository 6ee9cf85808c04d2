"""Unmodified models of transformers go on with texts here as by their own generate."""

import contextlib
import io
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from megatron.inference.generate import Sampling, generate
from megatron.parallel.compare import KeepFP64
from tests.dist import on_ranks
from tests.models.test_hf_weights import CASES, GATED, GPT2, Case, config_of, state_of, write_folder
from tests.tiny import VOCABULARY

NEW = 6
MODELS = {
    "GPT-2": GPT2,
    "Llama with one key/value head": CASES["Llama with one key/value head"],
    "Qwen3, tied": CASES["Qwen3, tied, in bf16"]._replace(dtype=torch.float32),
    "NeoX": CASES["NeoX"],
    "Mistral, whose window is shorter": Case("mistral", GATED | {"sliding_window": 5}),
    "Granite, which scales its logits": Case("granite", GATED | {"logits_scaling": 3.0}),
}
NUMBERS = np.random.default_rng(3)
PROMPTS = [NUMBERS.integers(1, VOCABULARY, size).tolist() for size in (9, 3, 1, 9)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    place = tmp_path_factory.mktemp("folders")
    return {
        name: str(write_folder(place / str(number), case))
        for number, (name, case) in enumerate(MODELS.items())
    }


@torch.no_grad()
def their_texts(folder: str) -> list[list[int]]:
    with contextlib.redirect_stderr(io.StringIO()):
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager"
        )
    texts = []
    for prompt in PROMPTS:
        with KeepFP64():
            whole = model.generate(
                torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, pad_token_id=0
            )
        text = whole[0, len(prompt) :].tolist()
        texts.append(text[: text.index(0)] if 0 in text else text)
    return texts


@pytest.fixture(scope="module")
def expected(folders: dict[str, str]) -> dict[str, list[list[int]]]:
    found = {name: their_texts(folder) for name, folder in folders.items()}
    for name, texts in found.items():
        assert len({*map(tuple, texts)}) == len(texts), f"{name} says the same of any prompt"
    return found


@pytest.mark.parametrize("tensor_size", [1, 2, 4])
@on_ranks("tensor_size")
def test_a_text_goes_on_as_by_the_model_s_own_generate(
    folders: dict[str, str], expected: dict[str, list[list[int]]], tensor_size: int
) -> None:
    """All prompts in one batch, and each, or the first, alone."""
    sampling = Sampling(max_new_tokens=NEW, temperature=0.0)
    for name, folder in folders.items():
        config = config_of(Path(folder), MODELS[name])
        state = state_of(config, tensor_size, torch.float64, draws=False)
        state.load_folder(folder)
        texts_of = partial(generate, state.model.eval(), state.mesh, sampling=sampling, ends=[0])
        for prompt, text in list(zip(PROMPTS, expected[name], strict=True))[: 4 // tensor_size]:
            assert texts_of([prompt]) == [text], name
        assert texts_of(PROMPTS) == expected[name], f"{name}, padded"
        first, *_ = expected[name]
        end = first[len(first) // 2]  # where rows end one after another
        cut = [text[: text.index(end)] if end in text else text for text in expected[name]]
        assert texts_of(PROMPTS, ends=[0, end]) == cut, f"{name}, by rows"
