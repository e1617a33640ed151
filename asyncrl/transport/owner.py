"""The owner of a socket: the only code that touches it, always from the same event loop.

It steps when the socket's descriptor is readable, when someone asked for it (``wake``) or when a tick is due: it
receives a bounded burst, lets the link transmit, and gives way to the other tasks. libzmq signals its descriptor on
edges, so the owner never rests while the socket still reports input. It is a chain of callbacks and no
``asyncio.Task`` because a task would cost another turn of the loop for each arrival and each departure.
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
NOBLOCK, MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)


class Link(Protocol):
    """What the owner drives."""

    def on_frame(self, route: bytes, envelope: memoryview, buffers: Sequence[memoryview]) -> None: ...

    def on_bad_frame(self, route: bytes, error: ProtocolError) -> None: ...

    def transmit(self) -> None: ...

    def tick(self) -> None: ...


class SocketOwner:
    """Owns one ROUTER or DEALER socket (and sockets beside it, such as its monitor) for one link."""

    def __init__(self, link: Link, tick_s: float, on_crash: Callable[[BaseException], None]) -> None:
        """``on_crash`` hears of an error that ended the owner."""
        self._link, self._tick_s, self._on_crash = link, tick_s, on_crash
        self._loop = asyncio.get_running_loop()
        self._socket: zmq.Socket[bytes] | None = None
        self._router = False
        self._beside: list[zmq.Socket[bytes]] = []
        self._scheduled = False
        self._flushed = False  # one flush a step
        self._input_left = True
        self._sent = False
        self._tick_due = False
        self._timer = self._loop.call_later(tick_s, self._on_timer)

    def adopt(self, socket: zmq.Socket[bytes]) -> None:
        """Own this socket from now on."""
        self._socket = socket
        self._router = socket.type == zmq.ROUTER
        self._input_left = True
        self._loop.add_reader(socket.fileno(), self._guarded, self._receive_and_transmit)
        self.wake()

    def adopt_beside(self, socket: zmq.Socket[bytes], serve: Callable[[], None]) -> None:
        """Own a second socket: ``serve`` is called on its input and must receive until nothing is left."""
        self._beside.append(socket)
        self._loop.add_reader(socket.fileno(), self._guarded, serve)
        self._loop.call_soon(lambda: None if socket.closed else self._guarded(serve))

    def release(self, linger_ms: int) -> None:
        """Close the sockets; unsent bytes get ``linger_ms`` to leave."""
        for socket in [*self._beside, self._socket]:
            if socket is not None and not socket.closed:
                self._loop.remove_reader(socket.fileno())
                socket.close(linger=linger_ms)
        self._beside.clear()
        self._socket = None

    def stop(self, linger_ms: int) -> None:
        """Transmit once more and end."""
        self._timer.cancel()
        self._guarded(self._receive_and_transmit)
        self.release(linger_ms)

    def wake(self) -> None:
        """Something has to be sent, next turn."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._step)

    def flush(self) -> None:
        """Something has to be sent, at once; but what comes in a burst is left to the next step."""
        if self._flushed:
            self.wake()
        else:
            self._flushed = True
            self._guarded(self._transmit)

    def send(self, route: bytes, envelope: bytes, buffers: Sequence[memoryview] = ()) -> bool:
        """Hand one message to ZeroMQ; False if the route is no longer connected. Only for ``Link.transmit``."""
        socket = self._socket
        if socket is None:
            return False
        self._sent = True
        try:
            if self._router:
                socket.send(route, MORE)
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                return False
            raise
        if not buffers:
            socket.send(envelope, NOBLOCK)
            return True
        socket.send(envelope, MORE)
        for buffer in buffers[:-1]:
            socket.send(buffer, MORE, copy=buffer.nbytes < COPY_BELOW)
        socket.send(buffers[-1], NOBLOCK, copy=buffers[-1].nbytes < COPY_BELOW)
        return True

    def _on_timer(self) -> None:
        self._tick_due = True
        self._timer = self._loop.call_later(self._tick_s, self._on_timer)
        self.wake()

    def _step(self) -> None:
        self._scheduled = self._flushed = False
        self._guarded(self._receive_and_transmit if self._input_left else self._transmit)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # reported to everyone who waits on the link
            self._timer.cancel()
            self.release(0)
            self._on_crash(error)

    def _receive_and_transmit(self) -> None:
        self._input_left = self._receive()
        self._flushed = False
        self._transmit()
        if self._input_left:
            self.wake()

    def _transmit(self) -> None:
        if self._tick_due:
            self._tick_due = False
            self._link.tick()
        self._link.transmit()
        if self._sent:
            self._sent = False
            if self._has_input():  # sending may have swallowed the edge that announced it
                self._input_left = True
                self.wake()

    def _has_input(self) -> bool:
        socket = self._socket
        return socket is not None and bool(int(socket.get(EVENTS)) & POLLIN)

    def _receive(self) -> bool:
        """Receive a burst; whether there may be more."""
        for i in range(BURST):
            socket = self._socket  # the link may replace it in on_frame
            if socket is None or (i == 1 and not self._has_input()):  # a lone message is spared the exception
                return False
            try:
                route = socket.recv(NOBLOCK) if self._router else b""  # ROUTER puts it before the message's parts
                frame = socket.recv(NOBLOCK, copy=False)
            except zmq.Again:
                return False
            envelope = frame.buffer
            buffers: list[memoryview] = []
            count = 0
            while frame.more:
                frame = socket.recv(NOBLOCK, copy=False)
                count += 1
                if count <= MAX_BUFFERS:
                    buffers.append(frame.buffer)
            if count > MAX_BUFFERS:
                self._link.on_bad_frame(route, ProtocolError(f"{count} buffers; the limit is {MAX_BUFFERS}"))
            else:
                self._link.on_frame(route, envelope, buffers)
        return True
