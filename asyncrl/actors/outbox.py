"""What the controller sends, in order for each peer and without the controller's loop ever waiting for a peer.

One queue and one task a peer: a slow peer holds back only its own messages. A peer that is lost takes its queue with
it; whoever counts on an answer learns of the loss from the link's ``$left``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from asyncrl.transport.links import Listener, PeerLost

SEND_DEADLINE_S = 120.0


class Outbox:
    """Per-peer ordered sends over one ``Listener``."""

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._queues: dict[str, asyncio.Queue[tuple[str, dict[str, Any], Sequence[Any]]]] = {}
        self._senders: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    def start(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks

    def put(self, peer: str, kind: str, header: dict[str, Any], buffers: Sequence[Any] = ()) -> None:
        """Queue one message; the buffers must not change afterwards."""
        if self._tasks is None:
            raise RuntimeError("Outbox.put before Outbox.start")
        if peer not in self._queues:
            self._queues[peer] = asyncio.Queue()
            self._senders[peer] = self._tasks.create_task(self._send_all(peer, self._queues[peer]))
        self._queues[peer].put_nowait((kind, header, buffers))

    async def _send_all(self, peer: str, queue: asyncio.Queue[tuple[str, dict[str, Any], Sequence[Any]]]) -> None:
        while True:
            kind, header, buffers = await queue.get()
            try:
                await self._listener.send(peer, kind, header, buffers, deadline_s=SEND_DEADLINE_S)
            except PeerLost:
                self._forget(peer, queue)
                return
            finally:
                queue.task_done()

    def _forget(self, peer: str, queue: asyncio.Queue[tuple[str, dict[str, Any], Sequence[Any]]]) -> None:
        while not queue.empty():
            queue.get_nowait()
            queue.task_done()
        if self._queues.get(peer) is queue:
            del self._queues[peer], self._senders[peer]

    async def flush(self, deadline_s: float) -> None:
        """Until everything queued has been handed to the link, at most ``deadline_s``."""
        await asyncio.wait_for(asyncio.gather(*(q.join() for q in self._queues.values())), deadline_s)

    def stop(self) -> None:
        for task in self._senders.values():
            task.cancel()
