"""Any task of reasoning-gym (https://github.com/open-thought/reasoning-gym) as an environment.

- The question is the single user message, unchanged; the completion, stripped of surrounding whitespace, goes to the
  task's own scorer unchanged.
- An answer that the scorer cannot read is a wrong answer, 0. Nearly all scorers say so themselves; those of boxnet,
  coin_flip, game_of_life and prime_factorization raise instead. Taken for failures, unreadable answers would leave
  their groups unpunished: they are worth 0 and counted (``Unreadable``).
- A seed means what it means to the library: item i is ``create_dataset(task, seed=env.train_seed, ...)[i]``, so results
  compare with other frameworks'.
- No training item asks a held-out question. Different seeds do not give that: most tasks draw item i from
  ``Random(seed + i)``, so near seeds share items (refused), and small tasks repeat their few questions under any seed.
  A training item that asks a held-out question is replaced by the next one that does not.
- An item depends on its index alone, except in tasks that iterate over sets of strings (isomorphic_strings,
  polynomial_multiplication, ransom_note, word_ladder): there it also depends on PYTHONHASHSEED, so the process that
  makes items should run with a fixed one. The fingerprint holds the first question and tells when it is another.

Importing the library takes 1 s of CPU time, hence inside functions only.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import hashlib
import importlib.metadata
import json
import logging
import random
import time
from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import EnvConfig
from asyncrl.envs.plain import from_plain, to_plain
from asyncrl.envs.types import EnvError, Item, Split, Unreadable, as_number

log = logging.getLogger(__name__)

_TRIES = 1000
_SLOW_S = 30.0
_UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, SyntaxError)


class ReasoningGymEnv:
    """One split of one reasoning-gym task."""

    def __init__(self, cfg: EnvConfig, split: Split) -> None:
        """Raises ``EnvError`` for an unknown task, a bad configuration or an empty training set."""
        if cfg.size < 1:
            raise EnvError("env.size", f"{cfg.size} training items", "give at least 1")
        _check_ranges(cfg)
        self._cfg, self._split = cfg, split
        self._config = json.dumps(cfg.task_config, sort_keys=True)
        seed, self._size = (
            (cfg.train_seed, cfg.size) if split == "train" else (cfg.heldout_seed, max(cfg.heldout_size, 0))
        )
        # A task refuses size 0, yet an empty held-out split (no evaluation) still scores.
        self._dataset = make_dataset(cfg.task, self._config, seed, max(self._size, 1))

    def __len__(self) -> int:
        return self._size

    def item(self, index: int) -> Item:
        if not 0 <= index < self._size:
            raise IndexError(f"item {index} of a {self._split} split of {self._size} items")
        if self._split == "heldout":
            return self._as_item(index, heldout_entries(*self._heldout_key())[index])
        return self._as_item(index, self._training_entry(index))

    def score(self, text: str, entry: dict[str, Any]) -> float:
        original = from_plain(entry)
        try:
            value = self._dataset.score_answer(text.strip(), original)
        except _UNREADABLE as error:
            # Raised for the right answer too, it is a defect of scorer or entry: that passes through.
            self._dataset.score_answer(original["answer"], from_plain(entry))
            raise Unreadable(f"{type(error).__name__}: {error}") from error
        return as_number(value, f"reasoning-gym's scorer of {self._cfg.task}")

    def fingerprint(self) -> str:
        cfg = self._cfg
        identity = {
            "kind": cfg.kind,
            "task": cfg.task,
            "task_config": cfg.task_config,
            "split": self._split,
            "sizes": [cfg.size, cfg.heldout_size],  # training items depend on the held-out ones
            "seeds": [cfg.train_seed, cfg.heldout_seed],
            "version": importlib.metadata.version("reasoning-gym"),
            "first": self.item(0).messages[0]["content"] if self._size else "",
        }
        return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:32]

    def _heldout_key(self) -> tuple[str, str, int, int]:
        return self._cfg.task, self._config, self._cfg.heldout_seed, self._cfg.heldout_size

    def _training_entry(self, index: int) -> dict[str, Any]:
        held_out = heldout_questions(*self._heldout_key())
        for step in range(min(_TRIES, self._size)):
            entry = generate(self._dataset, (index + step) % self._size, self._cfg.task)
            if entry["question"] not in held_out:
                return entry
        raise EnvError(
            "env.heldout_size",
            f"every question of the {step + 1} training items from {index} on is held out: "
            f"{self._cfg.task} has too few different questions as configured",
            "lower env.heldout_size, raise env.size, or widen env.task_config",
        )

    def _as_item(self, index: int, entry: dict[str, Any]) -> Item:
        messages = [{"role": "user", "content": entry["question"]}]
        return Item(f"{self._split}:{index}", index, messages, to_plain(entry))


@functools.lru_cache(maxsize=4)
def heldout_entries(task: str, config: str, seed: int, size: int) -> tuple[dict[str, Any], ...]:
    """All held-out entries, made once a process: the training split needs their questions too."""
    if size < 1:
        return ()
    dataset = make_dataset(task, config, seed, size)
    entries, start, warned = [], time.monotonic(), False
    for index in range(size):
        entries.append(generate(dataset, index, task))
        if not warned and time.monotonic() - start > _SLOW_S:
            log.warning("%d of %d held-out items of %s made in %g s; env.heldout_size", index + 1, size, task, _SLOW_S)
            warned = True
    return tuple(entries)


@functools.lru_cache(maxsize=4)
def heldout_questions(task: str, config: str, seed: int, size: int) -> frozenset[str]:
    return frozenset(entry["question"] for entry in heldout_entries(task, config, seed, size))


def generate(dataset: Any, index: int, task: str) -> dict[str, Any]:
    """Entry ``index`` of a reasoning-gym dataset: ``question``, ``answer`` and ``metadata``.

    Raises ``EnvError`` when the task fails to make it, which it does for values that its own checks let pass.
    """
    # A few tasks also draw from the global generator: seed it, so that an item depends on its index alone.
    state = random.getstate()
    random.seed(index)
    try:
        return dict(dataset[index])
    except Exception as error:
        raise EnvError(
            "env.task_config",
            f"{task} failed to make item {index}: {type(error).__name__}: {error}",
            "change the values of env.task_config",
        ) from error
    finally:
        random.setstate(state)


def _check_ranges(cfg: EnvConfig) -> None:
    """Item i is drawn from seed + i: training and held-out items must not share these numbers."""
    train_end, heldout_end = cfg.train_seed + cfg.size, cfg.heldout_seed + cfg.heldout_size
    if cfg.heldout_size > 0 and cfg.train_seed < heldout_end and cfg.heldout_seed < train_end:
        raise EnvError(
            "env.heldout_seed",
            f"item i is drawn from seed + i, so held-out items ({cfg.heldout_seed} to {heldout_end - 1}) would be "
            f"training items ({cfg.train_seed} to {train_end - 1})",
            f"set env.heldout_seed={train_end} or higher",
        )


def make_dataset(task: str, config: str, seed: int, size: int) -> Any:
    """``reasoning_gym.create_dataset`` with errors that name the key. ``config`` is env.task_config as JSON."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        raise EnvError("env.task", f"reasoning-gym has no task {task!r}", _nearest(task, sorted(DATASETS)))
    values = json.loads(config)
    _check_keys(task, values, [field.name for field in dataclasses.fields(DATASETS[task][1])])
    if task == "composite":
        values = _composite(values)
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **values)
    except Exception as error:  # the tasks' own checks: assert, TypeError, ValueError, KeyError
        raise EnvError(
            "env.task_config",
            f"{task} refuses {values}: {type(error).__name__}: {error}",
            "change the value; the names and defaults are: " + _defaults(DATASETS[task][1]),
        ) from error


def _check_keys(task: str, values: Mapping[str, Any], known: list[str]) -> None:
    for key, instead in (("seed", "env.train_seed and env.heldout_seed"), ("size", "env.size and env.heldout_size")):
        if key in values:
            raise EnvError(f"env.task_config.{key}", "is set for both splits elsewhere", f"set {instead} instead")
    for key in values:
        if key not in known:
            choices = [name for name in known if name not in ("seed", "size")]
            raise EnvError(f"env.task_config.{key}", f"{task} has no such setting", _nearest(key, choices))


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else "choose one of: " + ", ".join(known)


def _defaults(config_class: type) -> str:
    fields = [f for f in dataclasses.fields(config_class) if f.name not in ("seed", "size")]
    return ", ".join(f.name if f.default is dataclasses.MISSING else f"{f.name}={f.default!r}" for f in fields)


def _composite(values: dict[str, Any]) -> dict[str, Any]:
    """``datasets`` of the task ``composite`` is a list of dicts with name, weight and config."""
    from reasoning_gym.composite import DatasetSpec

    try:
        return {**values, "datasets": [DatasetSpec(**spec) for spec in values.get("datasets", [])]}
    except TypeError as error:
        raise EnvError(
            "env.task_config.datasets",
            f"is not a list of tasks: {error}",
            "write [{name: spell_backward, weight: 1.0, config: {}}, ...]",
        ) from error
