"""A process whose event loop is held ends with the reason; one that is slow, busy or stopped as a whole does not."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from asyncrl.actors.silence import LOOKS
from asyncrl.actors.watchdog import Watchdog

PATIENCE = LOOKS + 2  # looks: the first one sees a sign of life, the watchdog itself


class FakeLoop:
    """Takes calls from the watchdog and makes them in the looks ``turning`` (all, if None)."""

    def __init__(self, turning: set[int] | None = None) -> None:
        self.turning, self.looks = turning, 0

    def call_soon_threadsafe(self, callback) -> None:
        if self.turning is None or self.looks in self.turning:
            callback()
        self.looks += 1


def bites(loop: FakeLoop, looks: int) -> list[str]:
    """What the watchdog says within that many looks. No time passes."""
    waits: list[float] = []
    said: list[str] = []

    def over(seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == looks

    Watchdog(loop, "generator/0", 20, "a call", bite=said.append).watch(over)
    assert set(waits) == {20 / LOOKS}
    return said


def test_a_loop_that_never_turns_is_found_after_the_limit_and_not_before():
    assert bites(FakeLoop(set()), PATIENCE - 1) == []
    assert bites(FakeLoop(set()), PATIENCE) == ["generator/0: waited 20 s for a call"]


def test_a_loop_that_turns_is_left_alone():
    assert bites(FakeLoop(), 1000) == []


def test_a_loop_that_turns_now_and_then_is_left_alone_until_it_stops():
    seldom = set(range(0, 100, LOOKS))
    assert bites(FakeLoop(seldom), 100) == []
    assert bites(FakeLoop(seldom), 100 + 2 * LOOKS) != []


def test_a_watchdog_ends_with_what_it_watches():
    async def scenario() -> list[str]:
        said: list[str] = []
        with Watchdog(asyncio.get_running_loop(), "generator/0", 1000, "a call", bite=said.append) as dog:
            await asyncio.sleep(0)
        assert not dog._thread.is_alive()
        return said

    assert asyncio.run(scenario()) == []


HELD = """
import asyncio, threading
from asyncrl.actors.watchdog import Watchdog

def hold():
    threading.Event().wait()

async def main():
    with Watchdog(asyncio.get_running_loop(), "generator/7", 0.2, "a call that holds the event loop"):
        await asyncio.sleep(0)
        hold()

asyncio.run(main())
"""


def test_a_process_whose_loop_is_really_held_ends_with_its_stack_and_the_reason():
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "generator/7: waited 0.2 s for a call that holds the event loop"
    assert "in hold" in done.stderr, "the stack shows who holds it"


SERVES = """
import asyncio, sys, threading, time
from asyncrl.actors import generator
from asyncrl.config.schema import Config

class FakeEngine:
    def __init__(self, *_):
        time.sleep(float(sys.argv[1]))  # vLLM starts, in the event loop's thread

    async def died(self):
        threading.Event().wait()

cfg = Config()
cfg.generator.start_deadline_s, cfg.generator.token_deadline_s = float(sys.argv[2]), 0.2
generator.Engine = FakeEngine
sys.exit(asyncio.run(generator.serve(cfg, "generator/0", "tcp://127.0.0.1:1")))
"""


@pytest.mark.parametrize(
    ("takes_s", "limit_s", "reason"),
    [
        (2, 100, "waited 0.2 s for a call that holds the event loop to return (generator.token_deadline_s"),
        (1000, 0.2, "waited 0.2 s for vLLM to start (generator.start_deadline_s)"),
    ],
)
def test_a_generator_may_take_long_to_start_and_may_not_be_held_then(takes_s, limit_s, reason):
    """The engine is a fake. A start of ten times the limit on calls is no offence; one beyond its own limit is."""
    command = [sys.executable, "-c", SERVES, str(takes_s), str(limit_s)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(f"generator/0: {reason}"), done.stderr
