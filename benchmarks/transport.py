"""The transport against raw pyzmq sockets, on loopback, each pair of processes started by the same run.

throughput   16 MiB messages, ours and PUSH/PULL in turn
latency      a control round trip while another process streams 1 MiB messages to the same server socket at a fixed
             rate: ours, a blocking ROUTER/DEALER (the floor) and one of zmq.asyncio in turn
restarts     small messages through SIGKILLs of either end at random times (benchmarks/restarts.py)
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import zmq
import zmq.asyncio

from asyncrl.transport.frames import Kind, Schema
from asyncrl.transport.links import Dialer, Listener
from benchmarks import restarts
from benchmarks.harness import arguments, at_least, at_most, report

SCHEMA = Schema(
    {
        "bulk": Kind({"version": int}, buffers=1),
        "ping": Kind({"n": int}),
        "stop": Kind(),
    }
)
MIB = 1 << 20
LONG = 120.0
LOADS = {"idle": 0.0, "100 MiB/s": 100.0, "flat out": 1e9}  # messages of 1 MiB a second beside the round trips
processes = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def process(target: Callable[..., None], *args: Any) -> Iterator[Any]:
    """A child that ends with the block."""
    child = processes.Process(target=target, args=args, daemon=True)
    child.start()
    try:
        yield child
        child.join(LONG)
    finally:
        child.kill()


# -- throughput -------------------------------------------------------------------------------------------------------


def raw_push(endpoint: str, n: int, size: int) -> None:
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.sndhwm = 8
    push.connect(endpoint)
    payload = np.ones(size, np.uint8)
    for _ in range(n + 1):
        push.send(payload, copy=False)
    push.close()
    context.term()


def raw_throughput(n: int, size: int) -> float:
    """Messages a second into a PULL socket, from the first to the last."""
    context = zmq.Context()
    pull = context.socket(zmq.PULL)
    pull.rcvhwm = 8
    port = pull.bind_to_random_port("tcp://127.0.0.1")
    with process(raw_push, f"tcp://127.0.0.1:{port}", n, size):
        pull.recv(copy=False)
        start = time.perf_counter()
        for _ in range(n):
            pull.recv(copy=False)
        seconds = time.perf_counter() - start
    pull.close()
    context.term()
    return n / seconds


def our_push(endpoint: str, n: int, size: int) -> None:
    async def push() -> None:
        async with Dialer("sender", SCHEMA, endpoint) as dialer:
            payload = np.ones(size, np.uint8)
            for version in range(n + 1):
                await dialer.send("bulk", {"version": version}, [payload])
            await dialer.flush(deadline_s=LONG)

    asyncio.run(push())


def our_throughput(n: int, size: int) -> float:
    """The same into a Listener."""

    async def pull() -> float:
        async with Listener("receiver", SCHEMA) as listener:
            with process(our_push, listener.endpoint, n, size):
                await listener.recv(deadline_s=LONG, waiting_for="the sender")
                await listener.recv(deadline_s=LONG, waiting_for="the first message", auto_done=True)
                start = time.perf_counter()
                for _ in range(n):
                    await listener.recv(deadline_s=LONG, waiting_for="bulk", auto_done=True)
                seconds = time.perf_counter() - start
                await listener.recv(deadline_s=LONG, waiting_for="goodbye")
        return n / seconds

    return asyncio.run(pull())


# -- latency ----------------------------------------------------------------------------------------------------------


def raw_load(endpoint: str, rate: float) -> None:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.sndhwm = 64
    dealer.connect(endpoint)
    payload = np.ones(MIB, np.uint8)
    start, n = time.perf_counter(), 0
    while True:
        n += 1
        time.sleep(max(0.0, start + n / rate - time.perf_counter()))
        dealer.send(payload, copy=False)


def raw_server(endpoint: Any) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    endpoint.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
    while True:
        parts = router.recv_multipart(copy=False)
        if len(parts[1].buffer) < MIB:
            router.send_multipart(parts)


def raw_round_trips(endpoint: str, n: int) -> list[float]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    dealer.connect(endpoint)
    seconds = []
    for _ in range(n):
        start = time.perf_counter()
        dealer.send(b"ping")
        dealer.recv()
        seconds.append(time.perf_counter() - start)
    dealer.close()
    context.term()
    return seconds[n // 10 :]


def asyncio_server(endpoint: Any) -> None:
    async def serve() -> None:
        router = zmq.asyncio.Context().socket(zmq.ROUTER)
        endpoint.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        while True:
            parts = await router.recv_multipart(copy=False)
            if len(parts[1].buffer) < MIB:
                await router.send_multipart(parts)

    asyncio.run(serve())


def asyncio_round_trips(endpoint: str, n: int) -> list[float]:
    async def ask() -> list[float]:
        context = zmq.asyncio.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.connect(endpoint)
        seconds = []
        for _ in range(n):
            start = time.perf_counter()
            await dealer.send(b"ping")
            await dealer.recv()
            seconds.append(time.perf_counter() - start)
        dealer.close()
        context.term()
        return seconds[n // 10 :]

    return asyncio.run(ask())


def our_load(endpoint: str, rate: float) -> None:
    async def load() -> None:
        async with Dialer("load", SCHEMA, endpoint) as dialer:
            payload = np.ones(MIB, np.uint8)
            start, n = time.perf_counter(), 0
            while True:
                n += 1
                await asyncio.sleep(max(0.0, start + n / rate - time.perf_counter()))
                await dialer.send("bulk", {"version": n}, [payload])

    asyncio.run(load())


def our_server(endpoint: Any) -> None:
    async def serve() -> None:
        async with Listener("server", SCHEMA) as listener:
            endpoint.send(listener.endpoint)
            while True:
                message = await listener.recv(deadline_s=None, waiting_for="anything", auto_done=True)
                if message.kind == "ping":
                    await listener.send(message.peer, "ping", message.header)

    asyncio.run(serve())


def our_round_trips(endpoint: str, n: int) -> list[float]:
    async def ask() -> list[float]:
        async with Dialer("client", SCHEMA, endpoint) as dialer:
            seconds = []
            for i in range(n):
                start = time.perf_counter()
                await dialer.send("ping", {"n": i})
                await dialer.recv(deadline_s=LONG, waiting_for="pong", auto_done=True)
                seconds.append(time.perf_counter() - start)
            return seconds[n // 10 :]

    return asyncio.run(ask())


@contextlib.contextmanager
def loaded_server(server: Callable[..., None], load: Callable[..., None], rate: float) -> Iterator[str]:
    """A server process and, at a rate above 0, a process that streams to it."""
    here, there = processes.Pipe()
    children = [processes.Process(target=server, args=(there,), daemon=True)]
    children[0].start()
    try:
        endpoint = here.recv()
        if rate:
            children.append(processes.Process(target=load, args=(endpoint, rate), daemon=True))
            children[1].start()
            time.sleep(1)  # let it come up
        yield endpoint
    finally:
        for child in children:
            child.kill()


def latency(rate: float, rounds: int, n: int) -> dict[str, dict[str, list[float]]]:
    """Percentiles in microseconds of each round, the three in turn."""
    setups: dict[str, tuple[Callable[..., None], Callable[..., None], Callable[..., list[float]]]] = {
        "raw": (raw_server, raw_load, raw_round_trips),
        "zmq.asyncio": (asyncio_server, raw_load, asyncio_round_trips),
        "ours": (our_server, our_load, our_round_trips),
    }
    figures: dict[str, dict[str, list[float]]] = {who: {"p50": [], "p90": [], "p99": []} for who in setups}
    for _ in range(rounds):
        for who, (server, load, round_trips) in setups.items():
            with loaded_server(server, load, rate) as endpoint:
                seconds = round_trips(endpoint, n)
            for name, values in figures[who].items():
                values.append(round(float(np.percentile(seconds, int(name[1:]))) * 1e6, 1))
    return figures


def ratio(figures: dict[str, dict[str, list[float]]], floor: str) -> float:
    """Median over the rounds of our p99 over the floor's: a burst of noise spoils a round, not the figure."""
    return statistics.median(o / f for o, f in zip(figures["ours"]["p99"], figures[floor]["p99"], strict=True))


def main() -> int:
    options = arguments(__doc__ or "")
    quick = options.quick
    figures: dict[str, Any] = {}

    size, n = 16 * MIB, 24 if quick else 96
    rates: dict[str, list[float]] = {"raw": [], "ours": []}
    for _ in range(3 if quick else 7):
        rates["raw"].append(raw_throughput(n, size) * size / 2**30)
        rates["ours"].append(our_throughput(n, size) * size / 2**30)
    throughput = statistics.median(o / r for o, r in zip(rates["ours"], rates["raw"], strict=True))
    figures["throughput_gib_s"] = rates
    for who, values in rates.items():
        print(f"16 MiB messages, {who:>4}: {statistics.median(values):6.2f} GiB/s  {[round(v, 2) for v in values]}")

    for label, rate in LOADS.items():
        figures[f"round_trip_us_{label}"] = trips = latency(rate, 3 if quick else 9, 400 if quick else 1500)
        for who, values in trips.items():
            text = "  ".join(f"{q} {statistics.median(v):6.0f} us" for q, v in values.items())
            print(f"round trip, {label:>9}, {who:>11}: {text}")

    total = 50_000 if quick else 1_000_000
    figures["restarts"] = outcome = restarts.run(total, (5_000, 15_000) if quick else (20_000, 60_000))
    print(f"restarts: {outcome}")
    trips = figures["round_trip_us_100 MiB/s"]
    claims = [
        at_least("throughput of 16 MiB messages, of raw PUSH/PULL", throughput, 0.5),
        at_most("p99 control round trip at 100 MiB/s, of a raw blocking socket's", ratio(trips, "raw"), 3),
        at_most("p99 control round trip at 100 MiB/s, of a raw zmq.asyncio socket's", ratio(trips, "zmq.asyncio"), 3),
        at_least("small messages through restarts", outcome["messages"], total),
        at_most("messages lost or doubled", outcome["lost"] + outcome["doubled"], 0),
        at_least("processes killed meanwhile", sum(outcome["kills"].values()), 2),
    ]
    return report("transport", figures, claims, json_file=options.json, packages=["pyzmq", "msgpack", "numpy"])


if __name__ == "__main__":
    sys.exit(main())
