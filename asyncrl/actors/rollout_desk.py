"""The rollout side of the controller: admission, dispatch, scoring, filtering, held-out evaluation.

``RolloutDesk`` owns the staleness slots, the fleet of generators and every group until a batch takes it. It reacts to
samples and to generators that come, commit and go; its owner calls ``pump`` after each reaction. Rewards are scored in
worker processes; the result comes back through ``post``, so that all state changes happen in the owner's loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from asyncrl.actors.batches import Batch, rewards_of, trainable
from asyncrl.actors.evaluation import Evaluation
from asyncrl.actors.fleet import Fleet
from asyncrl.actors.outbox import Outbox
from asyncrl.actors.progress import Progress
from asyncrl.actors.prompting import PromptSource
from asyncrl.algorithms.advantage import has_variance
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config
from asyncrl.envs.rewards import RewardPool
from asyncrl.rollouts.ledger import Ledger
from asyncrl.rollouts.slots import Slots
from asyncrl.rollouts.types import Group, Prompt, Sample
from asyncrl.rollouts.validate import defect

Post = Callable[[Callable[[], None]], None]


class RolloutDesk:
    """See the module's docstring. ``tasks`` and ``post`` are set by the owner before the first reaction."""

    tasks: asyncio.TaskGroup
    post: Post

    def __init__(
        self,
        cfg: Config,
        prompts: PromptSource,
        rewards: RewardPool,
        ledger: Ledger,
        progress: Progress,
        outbox: Outbox,
    ) -> None:
        self.cfg, self.prompts, self.rewards = cfg, prompts, rewards
        self.ledger, self.progress, self.outbox = ledger, progress, outbox
        self.slots = Slots(cfg.batch.groups, cfg.staleness.max_steps, cfg.staleness.window)
        self.fleet = Fleet()
        self.groups: dict[int, Group] = {}  # until trained, filtered or failed
        self.evaluation: Evaluation | None = None
        self.evaluated: set[int] = set()  # versions
        self.reward_failures: Counter[str] = Counter()
        self.unreadable = 0  # answers to training prompts, see asyncrl.envs.types
        self.advances = 0  # samples that were owed, groups decided and evaluation results so far
        self.scoring = 0  # samples handed to the reward workers
        self._evaluation_began = 0.0
        self._filtered_in_a_row = 0
        self._owed: dict[int, set[int]] = {}  # samples to be asked for (again), by group
        self._outcomes: deque[str | None] = deque(maxlen=cfg.batch.samples)  # reward failures of the last samples

    # ---- generators -----------------------------------------------------------------------------------------

    def committed(self, name: str, version: int) -> None:
        """``name`` serves ``version``. The first time this makes it live, unless live ones are ahead of it: then the
        push of a newer version is on its way to it."""
        if version < self.slots.floor:
            return
        if self.fleet.committed(name, version):
            self.slots.join(name, version)
            self.progress.event(f"{name} serves version {version}")
        else:
            self.slots.committed(name, version)
        self.ledger.committed(name, version)

    def lose(self, name: str) -> None:
        """``name`` is gone: what it owed is asked for again, under the same ordinals."""
        for ordinal, indices in self.fleet.lose(name).items():
            self._owe(ordinal, indices)
        if name in self.slots.generators:
            self.slots.leave(name)
        self.progress.generator_load(name, 0)

    def _owe(self, ordinal: int, indices: set[int]) -> None:
        if indices:
            self._owed.setdefault(ordinal, set()).update(indices)

    def restore(self, group: Group, missing: set[int]) -> None:
        """A group that was in flight before a restart; its ``missing`` samples are asked for again."""
        self.groups[group.ordinal] = group
        self._owe(group.ordinal, missing)
        if not missing:
            self._score_group(group)

    # ---- samples --------------------------------------------------------------------------------------------

    def sample(self, sample: Sample, generator: str) -> None:
        """One finished completion. A repeat (its generator was given up, then answered) is dropped, on record."""
        if not self.fleet.received(generator, sample.ordinal, sample.index):
            self.ledger.drop(sample, "not owed")
            return
        self.advances += 1
        self.progress.generated(len(sample.token_ids))
        self.progress.generator_load(generator, self.fleet.load(generator))
        sample.failure = sample.failure or defect(sample, self.slots.version)
        sample.text = self.prompts.text(sample.token_ids)
        if sample.ordinal < 0 and sample.failure is not None:
            self._evaluation_scored(sample)
            return
        if sample.ordinal < 0:
            self._score([sample], self._evaluation_prompt(sample.ordinal), lambda: self._evaluation_scored(sample))
            return
        self.ledger.sample(sample)
        group = self.groups[sample.ordinal]
        group.samples.append(sample)
        if len(group.samples) == self.cfg.batch.group_size:
            self._score_group(group)

    def _score_group(self, group: Group) -> None:
        waiting = [s for s in group.samples if s.reward is None and s.failure is None]
        self._score(waiting, group.prompt, lambda: self._group_scored(group, waiting))

    def _score(self, samples: list[Sample], prompt: Prompt, then: Callable[[], None]) -> None:
        split = "heldout" if samples and samples[0].ordinal < 0 else "train"

        async def score() -> None:
            results = await self.rewards.score_many(split, [(s.text, prompt.entry) for s in samples])
            for sample, result in zip(samples, results, strict=True):
                sample.reward, sample.failure = result.value, result.failure
                if result.unreadable is not None:
                    self._count_unreadable(sample, result.unreadable)
            self.scoring -= len(samples)
            self.post(then)

        self.scoring += len(samples)
        self.tasks.create_task(score())

    def _count_unreadable(self, sample: Sample, why: str) -> None:
        if sample.ordinal < 0 and self.evaluation is not None:
            self.evaluation.unreadable += 1
            return
        self.unreadable += 1
        if self.unreadable == 1:
            text = f"the task's scorer cannot read the answer {sample.text!r:.80} ({why}): it is worth 0"
            self.progress.event(f"{text}, and such are counted in reward/unreadable", warning=True)

    def _group_scored(self, group: Group, samples: list[Sample]) -> None:
        for sample in group.samples:
            self._outcomes.append(sample.failure)
            if sample.failure is not None:
                self.reward_failures[_kind(sample.failure)] += 1
        for sample in samples:
            self.ledger.scored(sample.ordinal, sample.index, reward=sample.reward, failure=sample.failure)
        self._check_failures()
        self.decide(group)

    def decide(self, group: Group) -> None:
        """A scored group becomes trainable, or leaves with a reason and frees its slot at once."""
        self.advances += 1
        samples = trainable(group)
        if len(samples) < 2:
            self._fail(group, _kind(next((s.failure for s in group.samples if s.failure), "no tokens")))
        elif self.cfg.algorithm.filter_equal_rewards and not has_variance(rewards_of(samples)):
            self.slots.filter(group.ordinal, "equal rewards")
            self.ledger.filtered(group.ordinal, "equal rewards")
            del self.groups[group.ordinal]
            self._count_filtered(samples[0].reward)
        else:
            self._filtered_in_a_row = 0
            self.slots.finish(group.ordinal)

    def _fail(self, group: Group, reason: str) -> None:
        self.slots.fail(group.ordinal, reason)
        self.ledger.failed(group.ordinal, reason)
        del self.groups[group.ordinal]

    def _count_filtered(self, reward: float | None) -> None:
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self.cfg.algorithm.max_filtered_groups:
            raise RunFailed(
                f"0 of the last {self._filtered_in_a_row} groups had reward variance (the last reward was {reward:g}): "
                "there is nothing to learn from. Raise sampling.temperature or batch.group_size, make "
                "env.task_config easier or harder, or raise algorithm.max_filtered_groups"
            )

    def _check_failures(self) -> None:
        failed = [f for f in self._outcomes if f is not None]
        full = len(self._outcomes) == self._outcomes.maxlen
        if full and len(failed) > self.cfg.reward.max_failures_share * len(self._outcomes):
            raise RunFailed(
                f"{len(failed)} of the last {len(self._outcomes)} rewards failed, the last with: {failed[-1]}. "
                "Mend the reward, or raise reward.deadline_s or reward.max_failures_share"
            )

    # ---- what has become possible ---------------------------------------------------------------------------

    def pump(self, version: int) -> None:
        """Ask for what is owed, evaluate ``version`` when that is due, fill free slots."""
        if not self.fleet.live:
            return
        self._ask_for_owed()
        self._start_evaluation(version)
        if self.evaluated:
            self._admit()

    def _ask_for_owed(self) -> None:
        while self.slots.readmit() is not None:
            pass
        waiting = self.slots.waiting  # only after a restart that lost a batch; see asyncrl.rollouts.slots
        with self.ledger.transaction():
            for ordinal in sorted(self._owed.keys() - waiting):
                self._dispatch(ordinal, self._owed.pop(ordinal))

    def _dispatch(self, ordinal: int, indices: set[int]) -> None:
        name = self.fleet.assign(ordinal, indices)
        prompt, temperature, max_tokens = self._terms(ordinal)
        header = {
            "ordinal": ordinal,
            "indices": sorted(indices),
            "temperature": temperature,
            "max_tokens": max_tokens,
        }
        self.outbox.put(name, "generate", header, [prompt.token_ids])
        self.progress.generator_load(name, self.fleet.load(name))
        if ordinal >= 0:
            size, cursor = self.cfg.batch.group_size, self.prompts.cursor.state()
            self.ledger.dispatched(self.groups[ordinal], name, size=size, version=self.slots.floor, cursor=cursor)

    def _terms(self, ordinal: int) -> tuple[Prompt, float, int]:
        sampling = self.cfg.sampling
        if ordinal < 0:
            return self._evaluation_prompt(ordinal), 0.0, self.cfg.eval.max_tokens or sampling.max_tokens
        return self.groups[ordinal].prompt, sampling.temperature, sampling.max_tokens

    def _admit(self) -> None:
        """Fill the free slots, but start no group that the remaining steps cannot use."""
        self.progress.begin_training()
        wanted = self.cfg.trainer.steps * self.cfg.batch.groups
        with self.ledger.transaction():
            while self._useful() < wanted:
                ordinal = self.slots.admit()
                if ordinal is None:
                    return
                prompt, epoch = self._next_prompt()
                self.groups[ordinal] = Group(ordinal, prompt, epoch=epoch)
                self._dispatch(ordinal, set(range(self.cfg.batch.group_size)))

    def _next_prompt(self) -> tuple[Prompt, int]:
        before = self.prompts.cursor.too_long
        found = self.prompts.next()
        if not before and self.prompts.cursor.too_long:
            self._tell_too_long("a training prompt is", "prompts/too_long")
        return found

    def _tell_too_long(self, what: str, key: str) -> None:
        self.progress.event(
            f"{what} longer than the {self.prompts.room} tokens that generator.max_model_len leaves beside the answer: "
            f"passed over, never cut, and counted in {key}",
            warning=True,
        )

    def _useful(self) -> int:
        """Groups that have been trained or still may be."""
        counts = self.slots.counters()
        return counts["dispatched"] - sum(counts["filtered"].values()) - sum(counts["failed"].values())

    def take(self) -> list[Group] | None:
        """The groups of the next batch, or None while it is not full."""
        ordinals = self.slots.take()
        if ordinals is None:
            return None
        self.slots.check_conservation()
        return [self.groups[ordinal] for ordinal in ordinals]

    def trained(self, groups: list[Group]) -> None:
        """The batch of ``groups`` is consumed; they are forgotten here."""
        for group in groups:
            del self.groups[group.ordinal]

    # ---- held-out evaluation --------------------------------------------------------------------------------

    def _start_evaluation(self, version: int) -> None:
        """At the first version served, at the last, and every ``eval.every``; one at a time."""
        every = self.cfg.eval.every
        due = not self.evaluated or version == self.cfg.trainer.steps or (every > 0 and version % every == 0)
        settled = all(engine.version == version for engine in self.fleet.live)
        if self.evaluation is not None or version in self.evaluated or not due or not settled:
            return
        prompts, too_long = self.prompts.heldout()
        if not prompts:
            self.evaluated.add(version)
            return
        if too_long and not self.evaluated:
            self._tell_too_long(f"{too_long} of {len(prompts) + too_long} held-out prompts are", "eval/too_long")
        self.evaluation = Evaluation.of(version, prompts, too_long)
        self._evaluation_began = time.monotonic()
        for ordinal in self.evaluation.prompts:
            self._dispatch(ordinal, {0})

    def _evaluation_prompt(self, ordinal: int) -> Prompt:
        if self.evaluation is None:
            raise RuntimeError(f"sample {ordinal} of an evaluation that is over")
        return self.evaluation.prompts[ordinal]

    def _evaluation_scored(self, sample: Sample) -> None:
        if self.evaluation is None:
            raise RuntimeError(f"score of sample {sample.ordinal} of an evaluation that is over")
        self.advances += 1
        self.evaluation.record(sample)
        if self.evaluation.done:
            self.evaluated.add(self.evaluation.version)
            self.progress.evaluated(self.evaluation, time.monotonic() - self._evaluation_began)
            self.evaluation = None

    def rows(self, batch: Batch) -> list[dict[str, Any]]:
        """The batch as rows of the rollouts table."""
        advantage = {(s.ordinal, s.index): float(s.advantages[0]) for s in batch.samples}
        return [
            {
                "step": batch.version + 1,
                "prompt": self.prompts.text(group.prompt.token_ids),
                "completion": sample.text,
                "reward": sample.reward,
                "advantage": advantage.get((sample.ordinal, sample.index)),
                "version": int(sample.versions.min()) if len(sample.versions) else None,
                "finish_reason": sample.finish_reason,
                "generator": sample.generator,
            }
            for group in batch.groups
            for sample in group.samples
        ]

    # ---- figures --------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        """Figures of generators, prompts and rewards at this moment."""
        proven = {e.name.replace("/", "_"): e.proven for e in self.fleet.live if e.proven is not None}
        return {
            **{f"weights/version/{name}": version for name, (version, _) in proven.items()},
            **{f"weights/digest/{name}": digest for name, (_, digest) in proven.items()},
            "generators/live": len(self.fleet.live),
            "prompts/epoch": self.prompts.cursor.epoch,
            "prompts/too_long": self.prompts.cursor.too_long,
            "reward/unreadable": self.unreadable,
            **{f"reward/failed/{kind}": count for kind, count in self.reward_failures.items()},
        }


def _kind(failure: str) -> str:
    """``timeout`` of ``timeout: no answer within 10 s``: few enough values to count by."""
    return failure.partition(":")[0]
