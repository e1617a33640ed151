"""The receiving end inside an engine's worker: bytes of the next version pile up here while the engine generates.

One thread per worker talks to the publisher. The engine's own thread meets it in ``take`` only, after the publisher has
said that everything arrived. Nothing here knows vLLM.

Invariants:
- the staging buffer is written between ``announce`` and ``staged`` and read between ``load`` and ``loaded``; the
  publisher announces the next version only after that;
- chunks arrive in order without a gap, or the version fails.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from asyncrl.transport.blocking import BlockingDialer
from asyncrl.transport.errors import DeadlineExpired, ProtocolError, TransportError
from asyncrl.transport.frames import Message, array_of
from asyncrl.weights.manifest import Manifest, Staged
from asyncrl.weights.messages import PUBLISHER_SCHEMA, worker_name
from asyncrl.weights.planes import ReceivingPlane, ZmqReceiving


class Receiver:
    """Stages what the publisher sends to worker ``rank`` of ``generator``; ``workers`` is how many it has."""

    def __init__(
        self,
        endpoint: str,
        generator: str,
        rank: int,
        workers: int,
        *,
        plane: ReceivingPlane | None = None,
        **link_options: Any,
    ) -> None:
        """``plane``: how bytes come; None: in messages. ``link_options``: see ``BlockingDialer``."""
        self._who = {"generator": generator, "role": "worker", "rank": rank, "workers": workers}
        name = worker_name(generator, rank)
        self._link = BlockingDialer(name, PUBLISHER_SCHEMA, endpoint, events=True, **link_options)
        self._plane = plane or ZmqReceiving()
        self._staged: Staged | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._failure: Exception | None = None
        self._subscribed = threading.Event()  # the publisher knows this worker, or the thread has failed
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=f"{name} receiver", daemon=True)

    def start(self, deadline_s: float = 60) -> None:
        """Dial the publisher and return once it knows this worker, so that the next push comes here too.

        Raises ``DeadlineExpired`` if nobody answers.
        """
        self._link.start(deadline_s=deadline_s)
        self._thread.start()
        if not self._subscribed.wait(deadline_s):
            raise DeadlineExpired(self._link.name, deadline_s, "the publisher to take its subscription")
        if self._failure is not None:
            raise self._failure

    def take(self, version: int) -> Staged:
        """The complete bytes of ``version``. Raises ``RuntimeError`` if they are not here."""
        staged = self._staged
        if staged is None or staged.version != version or staged.digests is None:
            state = "nothing" if staged is None else f"{staged.received} bytes of version {staged.version}"
            why = f"; the receiving thread ended: {self._failure}" if self._failure else ""
            raise RuntimeError(f"{self._link.name} was told to load version {version} but holds {state}{why}")
        return staged

    def report(self, kind: str, **header: Any) -> None:
        """Tell the publisher; callable from any thread."""
        self._link.send(kind, header)

    def close(self) -> None:
        """Leave the publisher and end the thread."""
        self._closing = True
        self._plane.close()
        self._link.close()
        if self._thread.is_alive():
            self._thread.join(10)

    def _run(self) -> None:
        try:
            while True:
                message = self._link.recv(deadline_s=None, waiting_for="weights")
                self._handle(message)
                self._link.done(message)
        except TransportError as error:
            if not self._closing:
                self._failure = error
                self._plane.close()
                self._try_report(error)
            self._subscribed.set()

    def _try_report(self, error: TransportError) -> None:
        version = -1 if self._staged is None else self._staged.version
        try:
            self._link.send("failed", {"version": version, "reason": str(error)}, deadline_s=5)
        except TransportError:
            return  # the link itself is what failed; ``take`` tells

    def _handle(self, message: Message) -> None:
        version = message.header.get("version", -1)
        match message.kind:
            case "$joined":
                self._staged = None
                self._link.send("subscribe", self._who, wait="acked")
                self._subscribed.set()
            case "announce":
                self._announced(version, Manifest.from_bytes(message.buffers[0]))
                if message.header["join"]:
                    self._plane.join(message.header["join"])
                self._link.send("ready", {"version": version})
            case self._plane.kind:
                self._plane.receive(self._current(version), message)
            case "verify":
                data = message.buffers[0]
                staged = self._current(version)
                staged.complete([int(d) for d in array_of(data, "<u8", [data.nbytes // 8])])
                self._link.send("staged", {"version": version, "seconds": time.monotonic() - staged.began})
            case "dropped":
                self._staged = None
            case "chunk" | "lent" | "broadcast":
                raise ProtocolError(f"{message.kind} came to {self._link.name}, which takes {self._plane.kind} only")

    def _announced(self, version: int, manifest: Manifest) -> None:
        if self._buffer.numel() != manifest.nbytes:
            self._buffer = self._plane.staging(manifest.nbytes)
        self._staged = Staged(version, manifest, self._buffer, began=time.monotonic())

    def _current(self, version: int) -> Staged:
        if self._staged is None or self._staged.version != version:
            raise ProtocolError(f"bytes of version {version} without its announcement")
        return self._staged
