"""Ports of 127.0.0.1: free ones, remembered ones, and who holds a taken one."""

import errno
import random
import socket
from collections.abc import Mapping
from pathlib import Path

from deploy.local.private_files import read_json, write_json

# Above 32767 the kernel gives ports to outgoing connections: a free one there may be taken a moment later.
FIRST_PORT, LAST_PORT = 20_000, 32_767
_random = random.SystemRandom()


def is_free(port: int) -> bool:
    """Whether a server may listen there. Raises PermissionError for a port that needs root."""
    with socket.socket() as probe:
        # As servers do it: connections of an ended server that linger do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EACCES:
                raise
            return False
    return True


def free_port(besides: frozenset[int] = frozenset()) -> int:
    """A free port below the kernel's own range, not one of `besides`."""
    while True:
        port = _random.randint(FIRST_PORT, LAST_PORT)
        if port not in besides and is_free(port):
            return port


class PortBook:
    """Which port each process had, kept in a file and used again when it is still free."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = _ports(read_json(path))

    def port(self, name: str) -> int:
        """The port of a process; the same as the last time where possible."""
        known = self._known.get(name)
        if known is None or not is_free(known):
            self._known[name] = known = free_port(frozenset(self._known.values()))
            write_json(self._path, self._known)
        return known


def _ports(found: Mapping[str, object]) -> dict[str, int]:
    return {name: port for name, port in found.items() if isinstance(port, int)}
