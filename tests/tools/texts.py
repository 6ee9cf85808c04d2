"""The work of tools/generate.py, as a function that ranks can run, and its output."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron.config.parse import parse
from megatron.train.evaluate import load_newest
from megatron.train.trained import open_trained
from tests.tiny import mesh_of_ranks
from tools.generate import Settings, answer, main, make_reader, read_prompts

POSITIONS = 48
TEXTS = ["the thing", "in", "Then, in the inn, the wind is thin.", "the thing"]


def texts_of(tensor_size: int, words: list[str], broken: int = POSITIONS) -> list[list[int]]:
    """The new tokens of each prompt, on the ranks of this call or in this process.

    broken: the position from which on the model has diverged.
    """
    mesh = mesh_of_ranks(tensor_size)
    settings = parse(Settings, words, {})
    folders, tokenizer, manifest = open_trained(settings.trained, settings.parallel, 1)
    reader = make_reader(settings, tokenizer, manifest)
    prompts = read_prompts(settings, reader)
    _, model = load_newest(folders, mesh)
    if broken < POSITIONS:
        with torch.no_grad():
            model.position_embedding.weight[broken:] = torch.nan
    return [record["tokens"] for record in answer(model, mesh, prompts, reader, settings)]


def texts_of_transformers(folder: Path, prompts: Sequence[str], new: int = 12) -> list[list[int]]:
    """The new tokens of each prompt, greedily, as transformers continues it, without an end
    mark."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, return_tensors="pt")
        mask = torch.ones_like(ids)
        whole = model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False)
        found = whole[0, ids.shape[1] :].tolist()
        texts.append([each for each in found if each != tokenizer.eos_token_id])
    return texts


def generated(
    capsys: pytest.CaptureFixture[str], trained: Path, *words: str
) -> list[dict[str, Any]]:
    """The records that the program prints."""
    capsys.readouterr()
    main(["--load", str(trained), *words], {})
    return json.loads(capsys.readouterr().out)
