"""CURVE keys: who may talk on a link that leaves this machine.

One file serves a run: a key pair for listeners and one for dialers. A listener accepts only the run's dialer key, a
dialer only the run's listener key, and all traffic is encrypted. Processes that never listen need only
``keys.for_dialers()``.

    python -m asyncrl.transport.keys FOLDER      # makes FOLDER/curve.json; then transport.keys_dir=FOLDER
"""

from __future__ import annotations

import ipaddress
import json
import os
import stat
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import zmq
from zmq.utils import z85

KEYS_FILE = "curve.json"
REMEDY = (
    "without keys anyone who reaches the port could read and inject messages. Either use 127.0.0.1, or make keys once "
    "(python -m asyncrl.transport.keys FOLDER), copy the folder to every machine of the run and name it as "
    "transport.keys_dir"
)


@dataclass(frozen=True, repr=False)
class Keys:
    """Z85-encoded CURVE keys. ``server_secret`` is empty in a copy for dialers."""

    server_public: str
    client_public: str
    client_secret: str
    server_secret: str = ""

    def __repr__(self) -> str:  # secrets stay out of logs
        return f"Keys(server_public={self.server_public!r}, client_public={self.client_public!r})"

    @classmethod
    def generate(cls) -> Keys:
        """Fresh pairs for one run."""
        server, client = zmq.curve_keypair(), zmq.curve_keypair()
        return cls(server[0].decode(), client[0].decode(), client[1].decode(), server[1].decode())

    def for_dialers(self) -> Keys:
        """The same keys without the listener's secret."""
        return Keys(self.server_public, self.client_public, self.client_secret)

    def save(self, path: str | Path) -> None:
        """Write a file that only its owner may read; an existing file is not replaced."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file)
            file.flush()
            os.fsync(file.fileno())

    @classmethod
    def load(cls, path: str | Path) -> Keys:
        """Read what ``save`` wrote; refuses a file that others may read."""
        with open(path) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise PermissionError(f"{path} can be read by others (mode {mode:o}); run chmod 600 on it")
            try:
                keys = cls(**json.load(file))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{path} holds no keys: {error}") from error
        for name, value in asdict(keys).items():
            if not isinstance(value, str) or (len(value) != 40 and not (name == "server_secret" and value == "")):
                raise ValueError(f"{path}: {name} is no Z85 key of 40 characters")
        return keys

    def secure_listener(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE server; the dialers' key is checked by ``Gate``."""
        if not self.server_secret:
            raise ValueError("these keys are for dialers: the listener's secret is not among them")
        socket.curve_server = True
        socket.curve_publickey = self.server_public.encode()
        socket.curve_secretkey = self.server_secret.encode()
        socket.zap_domain = b"asyncrl"

    def secure_dialer(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket a CURVE client of the run's listeners."""
        socket.curve_serverkey = self.server_public.encode()
        socket.curve_publickey = self.client_public.encode()
        socket.curve_secretkey = self.client_secret.encode()


class Gate:
    """Answers libzmq's question whether a client may connect (ZAP, ZeroMQ RFC 27): only the run's dialer key may."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.refused = 0
        self._allowed = z85.decode(keys.client_public.encode())
        self.socket = context.socket(zmq.REP)
        self.socket.linger = 0
        self.socket.bind("inproc://zeromq.zap.01")

    def answer(self) -> None:
        """Answer all requests that wait."""
        while True:
            try:
                request = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            known = len(request) == 7 and request[5] == b"CURVE" and request[6] == self._allowed
            self.refused += not known
            request_id = request[1] if len(request) > 1 else b""
            verdict = [b"200", b"OK", b"dialer"] if known else [b"400", b"this key is not of the run", b""]
            self.socket.send_multipart([b"1.0", request_id, *verdict, b""])


def require_safe(endpoint: str, keys: Keys | None) -> None:
    """Raise ``ValueError`` with the remedy if an endpoint is reachable from elsewhere and there are no keys."""
    if keys is None and not is_loopback(endpoint):
        raise ValueError(f"{endpoint} is not loopback: {REMEDY}")


def is_loopback(endpoint: str) -> bool:
    """Whether only this machine reaches the endpoint."""
    parts = urlsplit(endpoint)
    if parts.scheme in ("ipc", "inproc"):
        return True
    if parts.scheme != "tcp":
        raise ValueError(f"{endpoint!r}: expected tcp://HOST:PORT or ipc://PATH")
    host = parts.netloc.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def main(arguments: list[str]) -> int:
    """Make keys for a run in a folder; exit status 2 when there are some already."""
    if len(arguments) != 1:
        print("usage: python -m asyncrl.transport.keys FOLDER", file=sys.stderr)
        return 2
    path = Path(arguments[0]) / KEYS_FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        Keys.generate().save(path)
    except FileExistsError:
        print(f"{path} exists; keys are never replaced", file=sys.stderr)
        return 2
    print(f"wrote {path}; only you may read it")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
