"""The share of peak and memory bandwidth that kernels attain, from one run on one device.

It is one number for matrix products and other kernels alike: that with which the time of the known
run comes out. So it carries whatever is not in the datasheet, and is known before anything is
scaled.
"""

from __future__ import annotations

from dataclasses import replace

from tools.planning.hardware import Anchor, Hardware, load_hardware
from tools.planning.products import executed_flops
from tools.planning.shape import WIDTHS, Shape
from tools.planning.software import SOFTWARE
from tools.planning.timing import predict


def anchor_shape(anchor: Anchor) -> Shape:
    return Shape(
        kind="gpt2",
        layers=anchor.num_layers,
        hidden=anchor.hidden_size,
        heads=anchor.heads,
        sequence=anchor.sequence,
        positions=anchor.sequence,
        vocabulary=anchor.vocabulary,
        divisible_by=1,
        batch=anchor.batch,
        micro_batches=1,
        tensor=1,
        data=1,
        width=WIDTHS[anchor.precision],
        recompute="full",
    )


def anchored(hardware: Hardware) -> Hardware:
    """The hardware with the share that its anchor tells; as it is where it has none."""
    anchor = hardware.anchor
    if anchor is None:
        return hardware
    if anchor.software not in SOFTWARE:
        raise ValueError(
            f"anchor.software is {anchor.software!r}, not one of {', '.join(SOFTWARE)}"
        )
    shape, software = anchor_shape(anchor), SOFTWARE[anchor.software]
    of_datasheet = replace(hardware, attained_share=1.0)
    ideal = predict(shape, software, of_datasheet, anchor.precision).total
    known = executed_flops(shape) / anchor.flops_per_second
    return replace(hardware, attained_share=ideal / known)


def find_hardware(name: str) -> Hardware:
    """As load_hardware, with the share that kernels attain."""
    return anchored(load_hardware(name))
