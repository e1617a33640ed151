"""One process that scores completions: ``python -m asyncrl.envs.reward_worker PARENT_PID``; see wire.py.

It scores in its main thread, so that scorers may use ``signal.alarm``, and one item at a time, so that the pool knows
which item it hangs or dies on. Whatever a scorer prints goes to stderr: the pipe carries answers only.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from asyncrl.config.errors import ConfigError
from asyncrl.config.processes import die_with_parent
from asyncrl.config.schema import EnvConfig
from asyncrl.config.typed import build
from asyncrl.envs import load_env
from asyncrl.envs.types import BadScore, Env, Unreadable
from asyncrl.envs.wire import Frames, frame

_LONGEST = 500  # characters of a failure


def main() -> int:
    die_with_parent(signal.SIGKILL, parent=int(sys.argv[1]))
    own = os.getpid()
    requests, answers = private_pipes()
    incoming = messages(requests)
    envs: dict[str, Env] = {}
    try:
        cfg = build(EnvConfig, next(incoming)["env"])
        envs["train"] = load(cfg, "train", answers)
        for request in incoming:
            split = request["split"]
            if split not in envs:
                envs[split] = load(cfg, split, answers)
            for text, number in request["items"]:
                # The entry is decoded for every item: a scorer that changes it must not change the next score.
                result = score(envs[split], text, json.loads(request["entries"][number]))
                if os.getpid() != own:
                    os._exit(0)  # a process that the scorer forked and that came back here
                write(answers, result)
    except (ConfigError, CannotLoad) as error:
        write(answers, {"error": str(error)})
        return 1
    return 0


class CannotLoad(Exception):
    """The environment cannot be made; the message is for the user."""


def load(cfg: EnvConfig, split: str, answers: int) -> Env:
    """One split, reported to the pool. Raises ``CannotLoad`` with the reason."""
    try:
        env = load_env(cfg, split)
    except ValueError as error:
        raise CannotLoad(str(error)) from error
    except BaseException as error:  # user code is imported here; sys.exit() in it included
        raise CannotLoad(f"loading the {split} split failed: {describe(error)}") from error
    write(answers, {"loaded": split})
    return env


def score(env: Env, text: str, entry: dict[str, Any]) -> dict[str, Any]:
    """``{"value": reward}``, with ``unreadable`` when that says why it is 0, or ``{"failure": "kind: ..."}``."""
    try:
        value = env.score(text, entry)
    except Unreadable as error:
        return {"value": 0.0, "unreadable": str(error)[:_LONGEST]}
    except BadScore as error:
        return {"failure": f"bad_value: {error}"[:_LONGEST]}
    except BaseException as error:  # noqa: BLE001 - a scorer's failure is a result, sys.exit() included
        return {"failure": f"raised: {describe(error)}"[:_LONGEST]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm left pending would strike the next item
    if not math.isfinite(value):
        return {"failure": f"not_finite: {value}"}
    return {"value": value}


def describe(error: BaseException) -> str:
    """``ValueError: text``, also for exceptions that cannot be turned into text."""
    return traceback.format_exception_only(error)[-1].strip()


def private_pipes() -> tuple[int, int]:
    """The pipes to the pool as descriptors that neither scorers nor their children get at."""
    requests, answers = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    return requests, answers


def messages(requests: int) -> Iterator[dict[str, Any]]:
    """Requests until the pool closes the pipe."""
    frames = Frames()
    while data := os.read(requests, 2**20):
        yield from frames.feed(data)


def write(answers: int, message: dict[str, Any]) -> None:
    data = memoryview(frame(message))
    while data:
        data = data[os.write(answers, data) :]


if __name__ == "__main__":
    sys.exit(main())
