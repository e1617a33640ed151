"""The owner task: the only code that touches a ZeroMQ socket.

It sleeps until the socket's descriptor is readable, someone calls ``wake`` or a tick is due; then it receives a
bounded burst, lets the link transmit, and gives way to the other tasks. libzmq signals its descriptor on edges, so
the owner never sleeps while the socket still reports input.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

import zmq

from asyncrl.transport.errors import ProtocolError
from asyncrl.transport.frames import MAX_BUFFERS

BURST = 64  # messages received before the other tasks get a turn
COPY_BELOW = 1 << 16  # bytes: smaller buffers are cheaper to copy than to lend


class Link(Protocol):
    """What the owner drives."""

    def on_frame(self, route: bytes, envelope: memoryview, buffers: Sequence[memoryview]) -> None: ...

    def on_bad_frame(self, route: bytes, error: ProtocolError) -> None: ...

    def transmit(self) -> None: ...

    def tick(self) -> None: ...


class SocketOwner:
    """Owns one ROUTER or DEALER socket (and sockets beside it, such as its monitor) for one link."""

    def __init__(self, link: Link, tick_s: float) -> None:
        self._link = link
        self._tick_s = tick_s
        self._socket: zmq.Socket[bytes] | None = None
        self._router = False
        self._beside: dict[zmq.Socket[bytes], Callable[[], None]] = {}
        self._wake = asyncio.Event()
        self._closing = False
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._tick_due = False

    def start(self, name: str, on_crash: Callable[[BaseException], None]) -> None:
        """Start the task; ``on_crash`` hears of an error that ended it."""
        self._task = asyncio.create_task(self._run(), name=name)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                on_crash(error)

        self._task.add_done_callback(ended)
        self._arm()

    def adopt(self, socket: zmq.Socket[bytes]) -> None:
        """Own this socket from now on."""
        self._socket = socket
        self._router = socket.type == zmq.ROUTER
        self._watch(socket)

    def adopt_beside(self, socket: zmq.Socket[bytes], serve: Callable[[], None]) -> None:
        """Own a second socket: ``serve`` must receive all that waits on it."""
        self._beside[socket] = serve
        self._watch(socket)

    def release(self, linger_ms: int) -> None:
        """Close the sockets; unsent bytes get ``linger_ms`` to leave."""
        loop = asyncio.get_running_loop()
        for socket in [*self._beside, self._socket]:
            if socket is not None and not socket.closed:
                loop.remove_reader(socket.fileno())
                socket.close(linger=linger_ms)
        self._beside.clear()
        self._socket = None

    async def stop(self) -> None:
        """End the task after one last transmission."""
        self._closing = True
        self._wake.set()
        if self._timer:
            self._timer.cancel()
        if self._task:
            await asyncio.wait([self._task])

    def wake(self) -> None:
        """Something may have to be sent."""
        self._wake.set()

    def send(self, route: bytes, envelope: bytes, buffers: Sequence[memoryview] = ()) -> bool:
        """Hand one message to ZeroMQ; False if the route is no longer connected. Only for ``Link.transmit``."""
        socket = self._socket
        if socket is None:
            return False
        more = zmq.NOBLOCK | zmq.SNDMORE
        try:
            if self._router:
                socket.send(route, more)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        if not buffers:
            socket.send(envelope, zmq.NOBLOCK)
            return True
        socket.send(envelope, more)
        for buffer in buffers[:-1]:
            socket.send(buffer, more, copy=buffer.nbytes < COPY_BELOW)
        socket.send(buffers[-1], zmq.NOBLOCK, copy=buffers[-1].nbytes < COPY_BELOW)
        return True

    def _watch(self, socket: zmq.Socket[bytes]) -> None:
        asyncio.get_running_loop().add_reader(socket.fileno(), self._wake.set)
        self._wake.set()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._tick_s, self._on_timer)

    def _on_timer(self) -> None:
        self._tick_due = True
        self._wake.set()
        self._arm()

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            closing = self._closing
            self._receive()
            for serve in list(self._beside.values()):
                serve()
            if self._tick_due:
                self._tick_due = False
                self._link.tick()
            self._link.transmit()
            if closing:
                return
            if self._has_input():
                await asyncio.sleep(0)
            else:
                await self._wake.wait()

    def _has_input(self) -> bool:
        sockets = [self._socket, *self._beside] if self._socket is not None else list(self._beside)
        return any(socket is not None and int(socket.get(zmq.EVENTS)) & zmq.POLLIN for socket in sockets)

    def _receive(self) -> None:
        for _ in range(BURST):
            socket = self._socket  # the link may replace it in on_frame
            if socket is None:
                return
            try:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            route = b""
            if self._router:
                route = frame.bytes
                if not frame.more:
                    self._link.on_bad_frame(route, ProtocolError("an empty message"))
                    continue
                frame = socket.recv(zmq.NOBLOCK, copy=False)
            envelope = frame.buffer
            buffers: list[memoryview] = []
            count = 0
            while frame.more:
                frame = socket.recv(zmq.NOBLOCK, copy=False)
                count += 1
                if count <= MAX_BUFFERS:
                    buffers.append(frame.buffer)
            if count > MAX_BUFFERS:
                self._link.on_bad_frame(route, ProtocolError(f"{count} buffers; the limit is {MAX_BUFFERS}"))
            else:
                self._link.on_frame(route, envelope, buffers)
