"""A process with one fake engine: ``python -m tests.weights.plane_engine PLANE ENDPOINT NAME DEADLINE_S``.

It writes a JSON line for each version that it has loaded, with the digests of what it holds, and "held" when bytes have
come that it was told to "hold" (a line on its standard input). "go" ends that.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

from asyncrl.weights.digest import tensor_digests
from tests.weights.cpu_planes import receiving
from tests.weights.fake_engine import FakeEngine

LINK = {"heartbeat_s": 1.0, "dead_after_s": 4.0}


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


class Loud(FakeEngine):
    """Says what it loads, and waits at the gate before it takes bytes."""

    def _load(self, version: int) -> None:
        super()._load(version)
        say(loaded=version, digests=tensor_digests(self.weights.values()), announced=self.announced)

    def _handle(self, kind: str, header: dict) -> None:
        super()._handle(kind, header)
        if kind == "dropped":
            say(dropped=header["reason"])


def main() -> None:
    name, endpoint, generator, deadline_s = sys.argv[1:]
    gate = threading.Event()
    gate.set()
    plane = receiving(name, deadline_s=float(deadline_s))
    receive = plane.receive

    def wait_and_receive(*arguments: Any) -> None:
        if not gate.is_set():
            say(held=True)
            gate.wait()
        receive(*arguments)

    plane.receive = wait_and_receive  # type: ignore[method-assign]
    engine = Loud(endpoint, generator, plane=lambda rank: plane, **LINK)
    say(started=generator)
    for line in sys.stdin:
        (gate.clear if line.strip() == "hold" else gate.set)()
        say(did=line.strip())
    engine.close()


if __name__ == "__main__":
    main()
