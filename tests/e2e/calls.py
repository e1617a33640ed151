"""Whom the processes of a run tried to reach. ``calls.c`` is loaded into all of them and writes it down."""

from __future__ import annotations

import ipaddress
import socket
import subprocess
from pathlib import Path

import psutil


class Calls:
    """``env`` goes to the command; ``away`` is what was tried and is not this machine."""

    def __init__(self, folder: Path) -> None:
        self._log = folder / "calls.txt"
        library = folder / "calls.so"
        source = Path(__file__).with_name("calls.c")
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
        self.env = {"LD_PRELOAD": str(library), "ASYNCRL_TEST_CALLS": str(self._log)}

    def all(self) -> set[tuple[str, str]]:
        """(what, whom), each once."""
        lines = self._log.read_text().splitlines() if self._log.exists() else []
        return {(what, whom) for what, _, whom in (line.partition(" ") for line in lines)}

    def away(self) -> set[tuple[str, str]]:
        """Those that leave this machine: an address of none of its interfaces, a name that is not its own."""
        return {(what, whom) for what, whom in self.all() if not _is_here(whom)}


def _is_here(whom: str) -> bool:
    own = {socket.gethostname(), socket.getfqdn(), "localhost"}
    try:
        address = ipaddress.ip_address(whom.partition("%")[0])
    except ValueError:
        return whom in own
    addresses = {a.address.partition("%")[0] for each in psutil.net_if_addrs().values() for a in each}
    mapped = getattr(address, "ipv4_mapped", None) or address
    return mapped.is_loopback or mapped.is_unspecified or str(mapped) in addresses
