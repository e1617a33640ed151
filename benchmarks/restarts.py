"""A producer and a consumer that are killed at random times; what the consumer wrote must be 0, 1, 2, ... once each.

The consumer's effect and its cursor are one append to one file: (session, sequence number, number) per message, and
``done`` comes after the append. After a restart it gives its last sequence number per session to the Listener as
``cursors``, and answers every ``$joined`` with how far it got: a producer that was restarted begins there.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.transport.frames import Kind, Message, Schema
from asyncrl.transport.links import Dialer, Listener

SCHEMA = Schema({"number": Kind({"n": int, "tag": str}), "resume": Kind({"next": int})})
RECORD = np.dtype([("session", "<u8"), ("seq", "<u8"), ("n", "<u8")])
LONG = 120.0


def read_log(path: Path) -> np.ndarray:
    """The whole records of the file; a last one cut short by a kill is cut off."""
    with open(path, "a+b") as file:
        file.truncate(file.tell() // RECORD.itemsize * RECORD.itemsize)
    return np.fromfile(path, RECORD)


async def consume(directory: Path) -> None:
    """Write the numbers that come, until killed."""
    path = directory / "log"
    log = read_log(path)
    written = len(log)
    sessions, last = np.unique(log["session"][::-1], return_index=True)
    cursors = {("producer", int(s)): int(log["seq"][::-1][i]) for s, i in zip(sessions, last, strict=True)}
    endpoint_file = directory / "endpoint"
    address = endpoint_file.read_text() if endpoint_file.exists() else "tcp://127.0.0.1:0"
    listener = Listener("consumer", SCHEMA, address=address, cursors=cursors)
    endpoint = await listener.start()
    if not endpoint_file.exists():
        (directory / "endpoint.partial").write_text(endpoint)
        (directory / "endpoint.partial").rename(endpoint_file)
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    while True:
        batch: list[Message] = []
        message: Message | None = await listener.recv(deadline_s=LONG, waiting_for="numbers")
        while message is not None:
            if message.kind == "number":
                batch.append(message)
            if message.kind == "$joined" or len(batch) == 500:
                break
            message = listener.recv_nowait()
        if batch:
            os.write(file, np.array([(m.session, m.seq, m.header["n"]) for m in batch], RECORD).tobytes())
            written += len(batch)
            for m in batch:
                listener.done(m)
        if message is not None and message.kind == "$joined" and message.peer in listener.peers:
            await listener.send(message.peer, "resume", {"next": written})


async def produce(directory: Path, total: int) -> None:
    """Send numbers from where the consumer is, up to ``total``."""
    endpoint = (directory / "endpoint").read_text()
    async with Dialer("producer", SCHEMA, endpoint) as dialer:
        resume = await dialer.recv(deadline_s=LONG, waiting_for="how far the consumer is", auto_done=True)
        for n in range(resume.header["next"], total):
            await dialer.send("number", {"n": n, "tag": "small"}, deadline_s=LONG)
        await dialer.flush(deadline_s=LONG)


def run(total: int, every: tuple[int, int], seed: int = 0, first: str = "consumer") -> dict[str, Any]:
    """Bring ``total`` numbers through, killing the two in turn each time that between ``every`` more are written."""
    chance = random.Random(seed)
    victims = itertools.cycle(sorted(("consumer", "producer"), key=lambda role: role != first))
    kills = {"consumer": 0, "producer": 0}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)

        def start(role: str) -> subprocess.Popen[bytes]:
            return subprocess.Popen([sys.executable, "-m", "benchmarks.restarts", role, name, str(total)])

        begun = time.perf_counter()
        children = {"consumer": start("consumer")}
        while not (directory / "endpoint").exists():
            if children["consumer"].poll() is not None:
                raise RuntimeError("the consumer did not start")
            time.sleep(0.02)
        children["producer"] = start("producer")
        kill_at = chance.randint(*every)
        try:
            while all(child.poll() is None for child in children.values()):  # until the producer is through
                time.sleep(0.02)
                written = (directory / "log").stat().st_size // RECORD.itemsize
                if kill_at <= written < total:
                    role = next(victims)
                    children[role].send_signal(signal.SIGKILL)
                    children[role].wait()
                    kills[role] += 1
                    time.sleep(chance.choice([0.0, 0.5]))
                    children[role] = start(role)
                    kill_at = written + chance.randint(*every)
        finally:
            for child in children.values():
                child.kill()
                child.wait()
        seconds = time.perf_counter() - begun
        if children["producer"].returncode != 0:
            raise RuntimeError(f"the producer ended with status {children['producer'].returncode}")
        numbers = read_log(directory / "log")["n"]
    seen = np.bincount(numbers.astype(np.int64), minlength=total)
    return {
        "messages": len(numbers), "lost": int((seen == 0).sum()), "doubled": int((seen > 1).sum()),
        "in_order": bool(np.all(numbers == np.arange(len(numbers)))), "kills": kills,
        "seconds": round(seconds, 1), "per_second": round(len(numbers) / seconds),
    }  # fmt: skip


if __name__ == "__main__":
    role, where, how_many = sys.argv[1:]
    asyncio.run(consume(Path(where)) if role == "consumer" else produce(Path(where), int(how_many)))
