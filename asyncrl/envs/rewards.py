"""Rewards from killable processes: no scorer can hang, crash or corrupt the run.

Invariants:
- every item gets exactly one result, in the order asked for, whatever a scorer does;
- an item that gives no answer within ``reward.deadline_s`` has its worker killed (SIGKILL, with its process group) and
  replaced, and it alone fails with ``timeout``; an item on which a worker dies alone fails with ``died``;
- an item is scored again only if its worker was killed before reaching it;
- no worker outlives the pool or its process.

A failure is ``kind: what happened``, of :data:`KINDS`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import json
import math
import os
import signal
import sys
from typing import Any

from asyncrl.config.errors import RunFailed
from asyncrl.config.processes import clean_environment, describe_exit
from asyncrl.config.schema import EnvConfig, RewardConfig
from asyncrl.envs.wire import Frames, frame

KINDS = ("raised", "timeout", "not_finite", "bad_value", "died")
LATE_LOOK_S = 0.05
MOST_AT_ONCE = 64  # items in one request


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """Exactly one of ``value`` and ``failure`` is set. ``unreadable``: why a value of 0 is one, see ``Unreadable``."""

    value: float | None
    failure: str | None
    unreadable: str | None = None

    @property
    def kind(self) -> str | None:
        """The part of the failure that is counted."""
        return None if self.failure is None else self.failure.partition(":")[0]


class RewardError(RunFailed):
    """No worker can be started; the message says why."""


@dataclasses.dataclass(eq=False)
class _Job:
    split: str
    text: str
    entry: dict[str, Any]
    result: asyncio.Future[RewardResult]


class RewardPool:
    """``reward.workers`` processes that score; an async context manager.

    Enter it in a thread that lives as long as the pool: the kernel ends the workers with the thread that started them.
    """

    def __init__(self, env: EnvConfig, reward: RewardConfig) -> None:
        self._env, self._reward = env, reward
        self._queue: collections.deque[_Job] = collections.deque()
        self._filled = asyncio.Event()
        self._broken: RewardError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._workers: list[_Worker] = []

    async def __aenter__(self) -> RewardPool:
        """Start the workers.

        Raises:
            RewardError: one cannot load the environment, with its reason.
        """
        self._workers = [_Worker(self._env, self._reward.load_deadline_s) for _ in range(self._reward.workers)]
        try:
            started = await asyncio.gather(*(worker.start() for worker in self._workers), return_exceptions=True)
            for error in started:
                if error is not None:
                    raise error
        except BaseException:
            await self._end_workers()
            raise
        self._tasks = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._end_workers()
        self._fail(RewardError("the reward workers were ended while scores were waited for"))

    async def score_many(self, split: str, items: list[tuple[str, dict[str, Any]]]) -> list[RewardResult]:
        """The results of (completion, entry) pairs of one split, in order.

        Raises:
            RewardError: a worker that ended cannot be replaced.
        """
        if self._broken:
            raise self._broken
        if not items:
            return []
        loop = asyncio.get_running_loop()
        jobs = [_Job(split, text, entry, loop.create_future()) for text, entry in items]
        self._queue.extend(jobs)
        self._filled.set()
        try:
            return await asyncio.gather(*(job.result for job in jobs))
        finally:
            for job in jobs:
                job.result.cancel()  # given up by the caller: not scored if still queued

    # ---- one task a worker ------------------------------------------------------------------------------------

    async def _serve(self, worker: _Worker) -> None:
        try:
            while True:
                while not (jobs := self._take()):
                    self._filled.clear()
                    await self._filled.wait()
                await self._score(worker, jobs)
        except RewardError as error:
            self._fail(error)
        except Exception as error:  # a defect of the pool: whoever waits for a score must hear of it
            self._fail(RewardError(f"the reward pool failed: {type(error).__name__}: {error}"))
            raise

    def _take(self) -> list[_Job]:
        """The next jobs of one split: a fair share of what is queued."""
        share = min(MOST_AT_ONCE, max(1, math.ceil(len(self._queue) / len(self._workers))))
        jobs: list[_Job] = []
        while self._queue and len(jobs) < share:
            if self._queue[0].result.done():
                self._queue.popleft()
            elif jobs and jobs[0].split != self._queue[0].split:
                break
            else:
                jobs.append(self._queue.popleft())
        return jobs

    async def _score(self, worker: _Worker, jobs: list[_Job]) -> None:
        """Score ``jobs``; after a hang or a death the rest goes back to the head of the queue."""
        left = collections.deque(jobs)
        try:
            failure = await self._ask(worker, left)
            if failure is None:
                return
            _settle(left.popleft(), RewardResult(None, failure))
        finally:
            self._queue.extendleft(reversed(left))
            self._filled.set()
        await worker.restart()

    async def _ask(self, worker: _Worker, left: collections.deque[_Job]) -> str | None:
        """Send ``left`` and take off it what is answered. Returns the failure of its head, or None when all are."""
        deadline_s = self._reward.deadline_s
        if worker.ended:  # killed while idle, which is no item's fault
            await worker.restart()
        await worker.load(left[0].split)
        worker.send(_request(left))
        while left:
            try:
                answers = await worker.receive(deadline_s)
            except TimeoutError:
                if not worker.ended:
                    return f"timeout: no answer within {deadline_s:g} s"
                answers = None  # dead, yet a process that it forked holds the pipe open
            if answers is None:
                return f"died: {describe_exit(await worker.exit_code())}"
            for answer in answers:
                result = RewardResult(answer.get("value"), answer.get("failure"), answer.get("unreadable"))
                _settle(left.popleft(), result)
        return None

    def _fail(self, error: RewardError) -> None:
        self._broken = error
        for job in self._queue:
            if not job.result.done():
                job.result.set_exception(error)
        self._queue.clear()

    async def _end_workers(self) -> None:
        await asyncio.gather(*(worker.kill() for worker in self._workers))


def _settle(job: _Job, result: RewardResult) -> None:
    if not job.result.done():
        job.result.set_result(result)


def _request(jobs: collections.deque[_Job]) -> dict[str, Any]:
    """The samples of one group share one entry: it is sent once."""
    numbers: dict[int, int] = {}
    entries: list[str] = []
    for job in jobs:
        if id(job.entry) not in numbers:
            numbers[id(job.entry)] = len(entries)
            entries.append(json.dumps(job.entry))
    items = [[job.text, numbers[id(job.entry)]] for job in jobs]
    return {"split": jobs[0].split, "entries": entries, "items": items}


class _Worker:
    """One process and the pipes to it."""

    def __init__(self, env: EnvConfig, load_deadline_s: float) -> None:
        self._env, self._load_deadline_s = env, load_deadline_s
        self._process: asyncio.subprocess.Process | None = None
        self._frames = Frames()
        self._splits: set[str] = set()

    async def start(self) -> None:
        """Raises ``RewardError`` when the worker cannot load the environment."""
        self._frames, self._splits = Frames(), set()
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncrl.envs.reward_worker",
            str(os.getpid()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=clean_environment({"OMP_NUM_THREADS": "1"}),
            start_new_session=True,
        )
        self.send({"env": dataclasses.asdict(self._env)})
        await self._loaded("train")

    @property
    def ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def load(self, split: str) -> None:
        """Make the worker ready for ``split``, so that loading does not count against an item's deadline."""
        if split not in self._splits:
            self.send({"split": split, "entries": [], "items": []})
            await self._loaded(split)

    async def _loaded(self, split: str) -> None:
        try:
            answers = await self.receive(self._load_deadline_s)
        except TimeoutError:
            raise RewardError(
                f"a reward worker did not load the {split} split within {self._load_deadline_s:g} s; "
                "raise reward.load_deadline_s or make the task's import faster"
            ) from None
        if answers is None:
            code = await self.exit_code()
            raise RewardError(f"a reward worker ended while loading the {split} split: {describe_exit(code)}")
        if "error" in answers[0]:
            raise RewardError(f"a reward worker cannot start: {answers[0]['error']}")
        self._splits.add(split)

    def send(self, message: dict[str, Any]) -> None:
        """Queue a message. A worker that is gone does not read it; :meth:`receive` tells."""
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(frame(message))

    async def receive(self, deadline_s: float) -> list[dict[str, Any]] | None:
        """The answers that have come, at least one; None when the worker has ended. Raises ``TimeoutError``."""
        while True:
            try:
                data = await asyncio.wait_for(self._read(), deadline_s)
            except TimeoutError:
                # If this process itself was held up, the answer lies in the pipe.
                data = await asyncio.wait_for(self._read(), LATE_LOOK_S)
            if not data:
                return None
            if answers := self._frames.feed(data):
                return answers

    async def _read(self) -> bytes:
        assert self._process is not None and self._process.stdout is not None
        return await self._process.stdout.read(2**16)

    async def exit_code(self) -> int:
        """The code of a worker whose pipe closed. One that closed it and lives on is killed."""
        assert self._process is not None
        try:
            return await asyncio.wait_for(self._process.wait(), 5.0)
        except TimeoutError:
            await self.kill()
            return -signal.SIGKILL

    async def kill(self) -> None:
        """End the worker and whatever it started in its process group."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
