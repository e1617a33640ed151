"""An engine without vLLM: a real receiving thread and a frontend thread that follow the protocol."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from asyncrl.transport.blocking import BlockingDialer
from asyncrl.transport.errors import TransportError
from asyncrl.weights.digest import combined, tensor_digests
from asyncrl.weights.messages import PUBLISHER_SCHEMA, frontend_name
from asyncrl.weights.planes import ReceivingPlane
from asyncrl.weights.staging import Receiver


class FakeEngine:
    """``weights`` holds clones of what it loaded last; ``deaf_to`` lists kinds its frontend never answers.

    ``keeps`` its first weights for ever, and commits later versions all the same. ``before_ready`` is called first,
    ``before_frontend`` with the engine when all workers have subscribed.
    ``plane(rank)`` makes the data plane of a worker; ``link``: options of all links.
    """

    def __init__(
        self,
        endpoint: str,
        name: str = "generator/0",
        workers: int = 1,
        deaf_to: tuple[str, ...] = (),
        keeps: bool = False,
        before_ready: Callable[[], object] = lambda: None,
        before_frontend: Callable[[FakeEngine], object] = lambda engine: None,
        plane: Callable[[int], ReceivingPlane | None] = lambda rank: None,
        **link: Any,
    ) -> None:
        self.name, self.deaf_to, self.keeps, self.before_ready = name, deaf_to, keeps, before_ready
        self.weights: dict[str, torch.Tensor] = {}
        self.versions: list[int] = []
        self.announced: list[int] = []
        self.told = ""
        self.receivers = [Receiver(endpoint, name, rank, workers, plane=plane(rank), **link) for rank in range(workers)]
        self._link = BlockingDialer(frontend_name(name), PUBLISHER_SCHEMA, endpoint, events=True, **link)
        for receiver in self.receivers:
            receiver.start()
        before_frontend(self)
        self._link.start()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                message = self._link.recv(deadline_s=None, waiting_for="weights", auto_done=True)
                if message.kind not in self.deaf_to:
                    self._handle(message.kind, message.header)
        except TransportError:
            return

    def _handle(self, kind: str, header: dict) -> None:
        if kind == "$joined":
            who = {"generator": self.name, "role": "frontend", "rank": -1, "workers": 0}
            self._link.send("subscribe", who)
        elif kind == "announce":
            self.announced.append(header["version"])
            self.before_ready()
            self._link.send("ready", {"version": header["version"]})
        elif kind == "load":
            self._load(header["version"])
            self._link.send("committed", {"version": header["version"], "pause_s": 0.25})
        elif kind == "dropped":
            self.told = header["reason"]

    def _load(self, version: int) -> None:
        for receiver in self.receivers:
            staged = receiver.take(version)
            tensors = {spec.name: tensor for spec, tensor in staged.tensors()}
            assert tensor_digests(tensors.values()) == staged.digests
            if not (self.weights and self.keeps):
                self.weights = {name: tensor.clone() for name, tensor in tensors.items()}
            digest = combined(tensor_digests(self.weights.values()))
            receiver.report("loaded", version=version, digest=digest, load_s=0.5, digest_s=0.125)
        self.versions.append(version)

    def close(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self._link.close()
