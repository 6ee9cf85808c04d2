"""Section 5.1: its points, the proportions of the miniatures, and what is computed of seconds."""

from typing import Any

import pytest
import torch

from benchmarks import steps
from benchmarks.harness import Flags
from benchmarks.scaling import COLUMNS, LINEAR, SPEED_UP, Point, contenders, studies
from megatron.train.launch import default_precision
from tools.plan.hardware import load_hardware
from tools.plan.timing import predict
from tools.plan.trace import Step

CPU = torch.device("cpu")


def step(point: Point, *, is_small: bool, precision: str = "fp16") -> Step:
    size = point.tensor * point.copies
    return Step(steps.read(point.flags(precision, is_small=is_small), size), size, precision, "cpu")


def test_the_points_are_those_of_section_5_1() -> None:
    found = studies(512, is_small=False)
    weak = [(p, paper[LINEAR]) for p, paper in found.items() if LINEAR in paper and not p.heads]
    assert [each for _, each in weak] == [100, 95, 82, 77, 96, 83, 79, 74]
    assert [p.tensor * p.copies for p, _ in weak] == [1, 2, 4, 8, 64, 128, 256, 512]
    strong = {p.tensor: paper[SPEED_UP] for p, paper in found.items() if SPEED_UP in paper}
    assert strong == {1: 1, 2: 1.64, 4: 2.34, 8: 2.98}
    heads = {p.heads: (p.tensor, paper[LINEAR]) for p, paper in found.items() if p.heads}
    assert heads == {16: (8, 82), 24: (8, 80)}  # the preset has 32
    whole = [step(point, is_small=False) for point, _ in weak[:4]]
    assert [round(each.parameters / 1e9, 1) for each in whole] == [1.2, 2.5, 4.2, 8.3]
    for each in whole:
        model, training = each.config.model, each.config.training
        assert (training.micro_batch_size, model.recompute_granularity) == (8, "full")
        assert model.attention_dropout == model.hidden_dropout == 0.1
        assert model.hidden_size // model.num_attention_heads == 96
    cut = [step(Point("gpt2_scaling_1.2b", size), is_small=False) for size in (1, 8)]
    assert cut[0].executed_flops == cut[1].executed_flops  # the vocabulary is padded alike


def test_figures_are_those_of_the_formulas() -> None:
    points, precision = list(contenders(Flags(), hardware="cpu")), default_precision(CPU)
    base = {**points[0].facts, "wall": 4.0}
    runs = {x.name: {**x.facts, "wall": 2.5} for x in points}
    by_title = {each.title: each for each in COLUMNS}

    def value(name: str, title: str) -> Any:
        return by_title[title].value(runs[name], base)

    second, copy = points[1].name, points[4].name
    linear = points[1].facts["parameters"] / (2 * base["parameters"])
    assert value(second, LINEAR) == pytest.approx(linear * 4 / 2.5)
    # Copies train as many more samples, and so are not divided by.
    assert value(copy, LINEAR) == pytest.approx(4 / 2.5)
    strong = "1.2B, 8 heads, t x d = 2 x 1"
    assert value(strong, SPEED_UP) == pytest.approx(4 / 2.5)
    with pytest.raises(KeyError):
        value(strong, LINEAR)
    model = steps.read(Point("gpt2_scaling_2.5b", 2).flags(precision, is_small=True), 2).model
    n, h, layers, s, v = 8 * 128, model.hidden_size, model.num_layers, 128, 1600
    forward, logits = layers * (24 * n * h**2 + 4 * n * s * h), 2 * n * h * v
    executed, useful = 4 * forward + 3 * logits, 3 * (forward + logits)
    assert value(second, "TFLOP/s of a rank") == pytest.approx(executed / (2 * 2.5) / 1e12)
    peak = load_hardware("cpu").peak(precision)
    assert value(second, "MFU, %") == pytest.approx(100 * useful / (2 * 2.5) / peak)
    pair = [Point("gpt2_scaling_1.2b", size) for size in (1, 2)]
    cut = [step(each, is_small=True, precision=precision) for each in pair]
    one, two = (predict(each, load_hardware("cpu")).total for each in cut)
    assert value(strong, f"{SPEED_UP}, predicted") == pytest.approx(one / two)
    assert value(points[2].name, f"{LINEAR}, paper") == 0.82


def test_ranks_that_share_a_core_are_predicted_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for cores in (1, 4):
        monkeypatch.setattr("os.cpu_count", lambda cores=cores: cores)
        points = contenders(Flags(small=True), "cpu", ("zero-1",))
        found.append([each.facts["planned_seconds"] for each in points])
    apart, ranks = found.pop(), (1, 2, 4)
    assert found == [[pytest.approx(n * each) for n, each in zip(ranks, apart, strict=True)]]
