"""The parts of the predicted time, each beside what can be worked out by hand."""

from dataclasses import replace

import pytest

from tests.tools.planning.presets import planned, preset
from tools.planning.anchor import anchor_shape, find_hardware
from tools.planning.hardware import Hardware, load_hardware
from tools.planning.links import Ring
from tools.planning.products import Product, executed_flops
from tools.planning.software import MEGATRON_2019, THIS_PROJECT
from tools.planning.timing import filled, predict

V100 = load_hardware("dgx2h")
PLAIN = replace(V100, link_share=1.0, network_share=1.0, base_latency=0.0, link_latency=0.0,
                network_latency=0.0)  # fmt: skip


@pytest.mark.parametrize(
    ("ring", "bandwidth"),
    [
        (Ring(8, 1), 150e9),  # inside a server
        (Ring(64, 1), 100e9),  # all of a server's adapters
        (Ring(64, 8), 12.5e9),  # eight rings share them
        (Ring(4, 16), 6.25e9),  # one rank a server, sixteen rings
        (Ring(2, 8), 150e9),  # both in one server
    ],
)
def test_a_ring_goes_as_fast_as_its_slowest_hop(ring: Ring, bandwidth: float) -> None:
    assert ring.bandwidth(PLAIN) == bandwidth
    sent = 2 * (ring.ranks - 1) / ring.ranks * 1e9
    assert ring.seconds(1e9, PLAIN) == pytest.approx(sent / bandwidth)
    assert Ring(1, 1).seconds(1e9, PLAIN) == 0


def test_latency_counts_hops() -> None:
    hops = replace(PLAIN, base_latency=1.0, link_latency=10.0, network_latency=1000.0)
    assert Ring(4, 1).latency(hops) == 1 + 6 * 10
    # Four servers of 16 ranks: 2 x 63 hops, of which 2 x 4 leave a server.
    assert Ring(64, 1).latency(hops) == 1 + 118 * 10 + 8 * 1000


def test_waves_of_tiles() -> None:
    whole = Product("whole waves", 1, 256 * 80, 64, 128, 1)
    assert filled(whole, V100) == 1
    assert filled(replace(whole, m=256 * 81), V100) == pytest.approx(81 / 160)
    assert filled(replace(whole, n=96), V100) == pytest.approx(0.75)
    assert filled(replace(whole, m=128, n=256 * 80), V100) == 1  # the tile turned
    assert filled(replace(whole, m=1), replace(V100, multiprocessors=0)) == 1


def test_the_anchor_comes_out() -> None:
    hardware = find_hardware("dgx2h")
    assert hardware.anchor is not None
    shape = anchor_shape(hardware.anchor)
    seconds = predict(shape, MEGATRON_2019, hardware, "fp16").total
    assert executed_flops(shape) / seconds == pytest.approx(39e12)
    assert 0.3 < hardware.attained_share < 1
    assert executed_flops(shape) == executed_flops(planned(preset("gpt2_scaling_1.2b"), 1))


@pytest.mark.parametrize("name", ["dgx2h", "dgx-a100", "dgx-h100", "h200", "cpu"])
def test_every_figure_has_a_source(name: str) -> None:
    hardware = find_hardware(name)
    assert 0 < hardware.attained_share <= 1
    assert all(len(source) > 10 for source in hardware.sources.values())
    assert {f"peak.{each}" for each in hardware.peaks} <= set(hardware.sources)


def times(hardware: Hardware, ranks: int = 512, **changes: object) -> dict[str, float]:
    shape = planned(preset("gpt2_scaling_8.3b"), ranks)
    software = replace(THIS_PROJECT, **changes)
    found = predict(shape, software, hardware, "fp16")
    return vars(found) | {"total": found.total}


def test_f_hides_behind_weight_gradients() -> None:
    hidden, waited = times(V100), times(V100, overlaps_f=False)
    assert waited["tensor_parallel_hidden"] == 0
    # What is hidden is not free: it takes memory bandwidth.
    gained = waited["tensor_parallel_exposed"] - hidden["tensor_parallel_exposed"]
    assert 0 < gained < hidden["tensor_parallel_hidden"]
    assert times(V100, ranks=8)["tensor_parallel_hidden"] == hidden["tensor_parallel_hidden"]


def test_gradients_hide_behind_the_backward() -> None:
    hidden, behind = times(V100), times(V100, overlaps=False)
    assert behind["data_parallel_hidden"] == pytest.approx(0, abs=1e-9)
    assert hidden["data_parallel_exposed"] < 0.3 * behind["data_parallel_exposed"]
    assert times(V100, ranks=8)["data_parallel_exposed"] == 0
    slow = times(replace(V100, network_bandwidth=1e9))
    assert slow["data_parallel_exposed"] > hidden["total"]


@pytest.mark.parametrize(
    ("constant", "part"),
    [
        ("link_bandwidth", "tensor_parallel_exposed"),
        ("network_bandwidth", "data_parallel_hidden"),
        ("memory_bandwidth", "other_kernels"),
    ],
)
def test_what_is_faster_takes_less_time(constant: str, part: str) -> None:
    faster = replace(V100, **{constant: 2 * getattr(V100, constant)})
    assert times(faster)[part] < 0.7 * times(V100)[part]
    assert times(faster)["total"] < times(V100)["total"]


def test_bf16_is_the_default_where_it_is_faster() -> None:
    assert V100.default_precision == "fp32"
    assert load_hardware("h200").default_precision == "bf16"
    slow = replace(V100, peaks={"fp32": 2e9, "bf16": 1e9})
    assert slow.default_precision == "fp32"


def test_a_precision_that_the_device_has_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no peak in bf16; --fp16"):
        V100.peak("bf16")
