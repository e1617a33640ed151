"""What the policy answers to held-out questions, and how many of the answers the task's scorer finds right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from asyncrl.config.evaluation import scores_answers
from asyncrl.config.model_folder import stop_token_ids
from asyncrl.config.schema import Config
from asyncrl.data.corpus import Corpus, EnvCorpus
from asyncrl.data.questions import questions
from asyncrl.envs.rewards import KINDS, RewardResult
from asyncrl.envs.scoring import Scoring
from asyncrl.training.generation import Sampling, complete
from asyncrl.training.step import Trainer


@dataclass
class Answers:
    """Of one version, the same on every rank but for ``rows``, which are rank 0's: ``GENERATION_COLUMNS`` each."""

    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Answering:
    """Asks the first ``eval.generations`` held-out questions that leave room for an answer; a context manager.

    Answers are scored in the killable workers of ``reward``: no scorer can hang the run or end it.
    """

    def __init__(self, cfg: Config, trainer: Trainer, heldout: Sequence[Corpus], tokenizer: Any) -> None:
        """Raises ``DataError`` for a held-out record that cannot be used, and if nothing can be asked."""
        self._trainer, self._tokenizer = trainer, tokenizer
        self._scoring = Scoring(cfg.env, cfg.reward) if scores_answers(cfg) else None
        self._most = cfg.eval.max_tokens or cfg.sampling.max_tokens
        self._temperature, self._seed = cfg.eval.temperature, cfg.seed
        count = cfg.eval.generations if heldout else 0
        self._stop = stop_token_ids(Path(cfg.model.path)) if count else []
        positions = getattr(trainer.policy.lm.config.get_text_config(), "max_position_embeddings", None)
        room = (positions or 1 << 30) - self._most
        self.questions, self.too_long = questions(heldout, count, tokenizer, room, cfg.sft.on_error == "skip")

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        if self._scoring is not None:
            self._scoring.close()

    def __call__(self) -> Answers:
        """Collective. Answers of the policy as it is now: greedy, or sampled at ``eval.temperature``."""
        if not self.questions:
            return Answers()
        sampling = Sampling(self._temperature, self._seed, self._trainer.version) if self._temperature else None
        prompts = [question.ids for question in self.questions]
        drawn = complete(self._trainer, prompts, self._most, self._stop, sampling)
        ended = [bool(len(ids)) and int(ids[-1]) in self._stop for ids in drawn]
        texts = [self._tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in drawn]
        figures = {"eval/answers": len(drawn), "eval/ended_share": sum(ended) / len(drawn)}
        if self.too_long:
            figures["eval/too_long"] = self.too_long
        results: list[RewardResult | None] = [None] * len(drawn)
        if self._scoring is not None:
            results = [*self._score(texts, self._scoring)] or results
            figures |= self._counted(results)
        rows = [
            {
                "prompt": q.prompt,
                "answer": text,
                "reference": q.reference,
                "ended": end,
                "score": result and result.value,
                "failure": result and (result.failure or result.unreadable),
            }
            for q, text, end, result in zip(self.questions, texts, ended, results, strict=True)
        ]
        return Answers(figures, rows)

    def _score(self, texts: Sequence[str], scoring: Scoring) -> list[RewardResult]:
        """Of rank 0, for a scorer may not be a pure function; empty on the others."""
        if self._trainer.mesh.rank:
            return []
        items = []
        for question, text in zip(self.questions, texts, strict=True):
            assert isinstance(question.corpus, EnvCorpus), "only items of env are scored"
            items.append((text, question.corpus.entry(question.index)))
        return scoring.score("heldout", items)

    def _counted(self, results: Sequence[RewardResult | None]) -> dict[str, float]:
        """Collective. What rank 0's ``results`` are, on every rank."""
        found = [result for result in results if result is not None]
        right = sum(result.value is not None and result.value >= 1.0 for result in found)
        unreadable = sum(result.unreadable is not None for result in found)
        kinds = [sum(result.kind == kind for result in found) for kind in KINDS]
        row = self._trainer.mesh.gather_rows(torch.tensor([right, unreadable, *kinds]))[0].tolist()
        failed = {f"eval/failed/{kind}": count for kind, count in zip(KINDS, row[2:], strict=True) if count}
        figures = {"eval/accuracy": row[0] / len(results), "eval/failed": sum(row[2:]), **failed}
        return figures | ({"eval/unreadable": row[1]} if row[1] else {})
