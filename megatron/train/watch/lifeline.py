"""How a rank learns that its neighbour's process is dead, whatever killed it.

Each rank listens, and connects to the rank after it; nothing is ever sent or accepted. When a
process dies its kernel closes the connection; when it is only stopped or slow, it does not.
"""

from __future__ import annotations

import selectors
import socket
from collections.abc import Mapping


def open_door() -> socket.socket:
    """A listening socket on all interfaces of this host."""
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def address_of(door: socket.socket, towards: str, port: int) -> tuple[str, int]:
    """Where other hosts find `door`: this host's address on the way to `towards`.

    Where that is the loopback, `towards` is this host, and its name is what others know.
    """
    family, kind, *_, target = socket.getaddrinfo(towards, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(target)  # of a datagram socket: chooses the way, sends nothing
        host = probe.getsockname()[0]
    if host == "::1" or host.startswith("127."):
        host = towards
    return host, door.getsockname()[1]


class Lifeline:
    """Connections that tell of deaths, by name, and a bell that wakes who waits on them.

    door: kept open for the rank before this one.
    """

    def __init__(self, door: socket.socket, lines: Mapping[str, socket.socket]) -> None:
        self._bell, self._ear = socket.socketpair()
        self._ends = [door, self._bell, self._ear, *lines.values()]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._ear, selectors.EVENT_READ)
        for name, line in lines.items():
            self._selector.register(line, selectors.EVENT_READ, name)

    def wait(self, seconds: float) -> list[str]:
        """Wait for `seconds` or the bell; the lines whose far ends were closed, each once."""
        closed = []
        for key, _ in self._selector.select(seconds):
            if key.data is None:
                self._ear.recv(64)
            else:
                self._selector.unregister(key.fileobj)
                closed.append(key.data)
        return closed

    def ring(self) -> None:
        self._bell.send(b"!")

    def close(self) -> None:
        self._selector.close()
        for end in self._ends:
            end.close()
