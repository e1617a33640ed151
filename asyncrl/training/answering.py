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
from asyncrl.training.generation import complete
from asyncrl.training.step import Trainer


@dataclass
class Answers:
    """Of one version, the same on every rank but for ``rows``, which are rank 0's: ``GENERATION_COLUMNS`` each."""

    figures: dict[str, float] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)


class Answering:
    """Asks the first ``eval.generations`` held-out questions that leave room for an answer."""

    def __init__(self, cfg: Config, trainer: Trainer, heldout: Sequence[Corpus], tokenizer: Any) -> None:
        """Raises ``DataError`` for a held-out record that cannot be used, and if nothing can be asked."""
        self._trainer, self._tokenizer, self._scored = trainer, tokenizer, scores_answers(cfg)
        self._most = cfg.eval.max_tokens or cfg.sampling.max_tokens
        count = cfg.eval.generations if heldout else 0
        self._stop = stop_token_ids(Path(cfg.model.path)) if count else []
        positions = getattr(trainer.policy.lm.config.get_text_config(), "max_position_embeddings", None)
        room = (positions or 1 << 30) - self._most
        self.questions, self.too_long = questions(heldout, count, tokenizer, room, cfg.sft.on_error == "skip")

    def __call__(self) -> Answers:
        """Collective. Greedy answers of the policy as it is now."""
        if not self.questions:
            return Answers()
        drawn = complete(self._trainer, [question.ids for question in self.questions], self._most, self._stop)
        ended = [bool(len(ids)) and int(ids[-1]) in self._stop for ids in drawn]
        texts = [self._tokenizer.decode(ids.tolist(), skip_special_tokens=True) for ids in drawn]
        figures = {"eval/answers": len(drawn), "eval/ended_share": sum(ended) / len(drawn)}
        if self.too_long:
            figures["eval/too_long"] = self.too_long
        scores: list[float | None] = [None] * len(drawn)
        if self._scored:
            scores, share, failed = self._score(texts)
            figures |= {"eval/accuracy": share, "eval/failed": failed}
        asked = zip(self.questions, texts, ended, scores, strict=True)
        rows = [
            {"prompt": q.prompt, "answer": text, "reference": q.reference, "ended": end, "score": score}
            for q, text, end, score in asked
        ]
        return Answers(figures, rows)

    def _score(self, texts: Sequence[str]) -> tuple[list[float | None], float, int]:
        """(scores, share of 1, answers without a score); rank 0 scores, for a scorer may not be a pure function."""
        scores: list[float | None] = []
        for question, text in zip(self.questions, texts, strict=True) if self._trainer.mesh.rank == 0 else ():
            assert isinstance(question.corpus, EnvCorpus), "only items of env are scored"
            try:
                scores.append(question.corpus.score(question.index, text))
            except Exception:  # noqa: BLE001 - a scorer may raise anything, which is counted
                scores.append(None)
        mine = torch.tensor([sum(s is not None and s >= 1.0 for s in scores), sum(s is None for s in scores)])
        right, failed = self._trainer.mesh.gather_rows(mine)[0].tolist()
        return scores or [None] * len(texts), right / len(texts), failed
