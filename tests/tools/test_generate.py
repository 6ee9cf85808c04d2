"""Sampling: the rules of temperature, top-k and top-p, and the same text at every layout."""

import pytest
import torch

from megatron.config.trained import TrainedConfig
from tests.dist import Pool
from tests.tiny import mesh_of_ranks, tiny_model
from tools.generate import Settings, choose, continue_tokens

PROBABILITY = torch.tensor([0.1, 0.4, 0.2, 0.3])


def settings(**changes: float) -> Settings:
    trained = TrainedConfig(load="", vocab_file="", merge_file="")
    return Settings(trained=trained, prompt=("a",), **changes)


def drawn(**changes: float) -> torch.Tensor:
    """How often each of the four tokens is drawn."""
    generator = torch.Generator().manual_seed(0)
    ids = [choose(PROBABILITY.log(), settings(**changes), generator) for _ in range(4000)]
    return torch.tensor(ids).bincount(minlength=4) / 4000


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.6}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.4}, [0, 1, 0, 0]),
    ],
)
def test_draws_follow_the_distribution(changes: dict[str, float], expected: list[float]) -> None:
    assert drawn(**changes).tolist() == pytest.approx(expected, abs=0.03)


def continued(tensor_size: int) -> list[int]:
    mesh = mesh_of_ranks(tensor_size)
    model, _ = tiny_model(mesh)
    return continue_tokens(model.eval(), mesh, [5, 6], 0, settings(max_new_tokens=24), 0)


def test_the_text_is_the_same_at_every_layout(gloo: Pool) -> None:
    expected = continued(1)  # longer than the model's 16 positions: the window slides
    assert len(expected) == 24
    for ids in gloo.run(2, continued, 2) + gloo.run(4, continued, 4):
        assert ids == expected


def test_a_document_ends_at_its_mark() -> None:
    mesh = mesh_of_ranks(1)
    model, _ = tiny_model(mesh)
    arguments = settings(max_new_tokens=24)
    texts = {
        mark: continue_tokens(model.eval(), mesh, [5, 6], mark, arguments, 0) for mark in range(20)
    }
    assert all(mark not in text for mark, text in texts.items())
    assert any(len(text) < 24 for text in texts.values())
