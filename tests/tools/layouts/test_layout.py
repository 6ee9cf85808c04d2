"""Layouts by their names and by the settings of a run."""

import pytest

from megatron.config.parallel import TrainingParallelConfig
from tools.layouts.layout import layout_of, parse_layout

NAMES = (
    "serial",
    "tensor=2,data=3,sequence",
    "tensor=4:2d,data=2",
    "tensor=8:2.5d:2,zero=1",
    "tensor=8:3d,pipeline=2",
    "context=2:p2p,data=2,zero=3",
    "pipeline=2,virtual=2,schedule=interleaved",
    "tensor=2,context=2,data=2,pipeline=2,schedule=zb-h1,zero=1",
)


@pytest.mark.parametrize("name", NAMES)
def test_the_layout_of_settings_is_the_one_that_they_are_of(name: str) -> None:
    layout = parse_layout(name)
    assert layout_of(TrainingParallelConfig(**layout.settings), layout.ranks, 4) == layout


def test_settings_in_other_words_are_the_same_layout() -> None:
    layers = TrainingParallelConfig(
        pipeline_model_parallel_size=2, num_layers_per_virtual_pipeline_stage=1
    )
    assert layout_of(layers, 4, 8) == parse_layout("data=2,pipeline=2,virtual=4")
    zero = TrainingParallelConfig(use_distributed_optimizer=True)
    assert layout_of(zero, 4, 8) == parse_layout("data=4,zero=1")
    assert layout_of(zero, 1, 8) == parse_layout("serial")
