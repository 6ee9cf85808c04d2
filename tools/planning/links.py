"""How long an all-reduce takes: a ring, as NCCL makes one over NVLink and over the network.

Every rank of r sends, and gets, (r - 1) / r of the bytes twice: once while the parts are summed,
once while the sums go round. The slowest hop of the ring sets the pace:

    seconds = 2 (r - 1) / r x bytes / bandwidth + latency of the start and of 2 (r - 1) hops
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.planning.hardware import Hardware
from tools.planning.shape import Shape

# A byte that is reduced moves 6 in memory on each rank: of the two rounds each writes what the
# neighbour sends, reads it, and reads or writes this rank's own.
RING_PASSES = 6


@dataclass(frozen=True)
class Ring:
    """Ranks that reduce together, `stride` apart; servers are filled in the order of ranks."""

    ranks: int
    stride: int

    def seconds(self, size: float, hardware: Hardware) -> float:
        """Of an all-reduce of `size` bytes, while the other rings of the job do the same."""
        if self.ranks == 1:
            return 0.0
        sent = 2 * (self.ranks - 1) / self.ranks * size
        return sent / self.bandwidth(hardware) + self.latency(hardware)

    def inside(self, hardware: Hardware) -> int:
        """Ranks of the ring in one server."""
        return max(1, min(self.ranks, hardware.devices_per_server // self.stride))

    def bandwidth(self, hardware: Hardware) -> float:
        """Bytes a second that pass each hop in one direction."""
        inside = self.inside(hardware)
        link = hardware.link_bandwidth * hardware.link_share
        if inside == self.ranks:
            return link
        rings = hardware.devices_per_server // inside  # that share the server's adapters
        network = hardware.network_bandwidth * hardware.network_share / rings
        return network if inside == 1 else min(link, network)

    def latency(self, hardware: Hardware) -> float:
        inside, hops = self.inside(hardware), 2 * (self.ranks - 1)
        outer = 0 if inside == self.ranks else min(hops, 2 * self.ranks // inside)
        return (
            hardware.base_latency
            + (hops - outer) * hardware.link_latency
            + outer * hardware.network_latency
        )


def tensor_ring(shape: Shape) -> Ring:
    return Ring(shape.tensor, 1)


def data_ring(shape: Shape) -> Ring:
    return Ring(shape.data, shape.tensor)
