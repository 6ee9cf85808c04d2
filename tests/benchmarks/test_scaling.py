"""Section 5.1: its points."""

from benchmarks import steps
from benchmarks.scaling import LINEAR, SPEED_UP, Point, studies
from tools.plan.trace import Step


def step(point: Point) -> Step:
    size = point.tensor * point.copies
    return Step(steps.read(point.flags("fp16", is_small=False), size), size, "fp16", "cpu")


def test_the_points_are_those_of_section_5_1() -> None:
    found = studies(512, is_small=False)
    weak = [(p, paper[LINEAR]) for p, paper in found.items() if LINEAR in paper and not p.heads]
    assert [each for _, each in weak] == [100, 95, 82, 77, 96, 83, 79, 74]
    assert [p.tensor * p.copies for p, _ in weak] == [1, 2, 4, 8, 64, 128, 256, 512]
    strong = {p.tensor: paper[SPEED_UP] for p, paper in found.items() if SPEED_UP in paper}
    assert strong == {1: 1, 2: 1.64, 4: 2.34, 8: 2.98}
    heads = {p.heads: (p.tensor, paper[LINEAR]) for p, paper in found.items() if p.heads}
    assert heads == {16: (8, 82), 24: (8, 80)}  # the preset has 32
    whole = [step(point) for point, _ in weak[:4]]
    assert [round(each.parameters / 1e9, 1) for each in whole] == [1.2, 2.5, 4.2, 8.3]
    for each in whole:
        model, training = each.config.model, each.config.training
        assert (training.micro_batch_size, model.recompute_granularity) == (8, "full")
        assert model.attention_dropout == model.hidden_dropout == 0.1
        assert model.hidden_size // model.num_attention_heads == 96
    cut = [step(Point("gpt2_scaling_1.2b", size)) for size in (1, 8)]
    assert cut[0].executed_flops == cut[1].executed_flops  # the vocabulary is padded alike
