"""Scores from the killable reward workers for code without an event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from asyncrl.config.schema import EnvConfig, RewardConfig
from asyncrl.envs.rewards import RewardPool, RewardResult

R = TypeVar("R")


class Scoring:
    """``reward.workers`` processes, started by the first ``score`` and ended by ``close``.

    The pool lives in a thread of its own, with which the kernel ends the workers: they are gone with the process too.
    It keeps the deadlines, of loading the task and of each score, so no wait here has one of its own.
    """

    def __init__(self, env: EnvConfig, reward: RewardConfig) -> None:
        self._env, self._reward = env, reward
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scoring", daemon=True)
        self._pool: RewardPool | None = None

    def score(self, split: str, items: Sequence[tuple[str, dict[str, Any]]]) -> list[RewardResult]:
        """The results of (answer, entry) pairs of one split, in order: a value or a failure each.

        Raises ``RewardError`` when a worker cannot load the task or be replaced.
        """
        if self._pool is None:
            if not self._thread.is_alive():
                self._thread.start()
            self._pool = self._run(RewardPool(self._env, self._reward).__aenter__())
        return self._run(self._pool.score_many(split, list(items)))

    def close(self) -> None:
        if self._pool is not None:
            self._run(self._pool.__aexit__(None, None, None))
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, R]) -> R:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()
