"""Supervised fine-tuning, and the warm start of reinforcement learning.

    conversations -> tokens, answers learnt -> one step on the global batch -> repeat -> checkpoint

With ``sft.loss=dpo`` each example is a pair of answers to one prompt, and the run learns which is preferred.

With ``model.path=""`` the run first makes a model: a Qwen3 decoder of the size in ``model.new`` with random weights,
and a tokenizer built from the questions. So one command makes the checkpoint that ships with the repository:

    torchrun launch/train.py +experiment=sft sft.export=asyncrl/assets/qwen3-tiny

The order of the data, the initial weights and every sum depend on the configuration alone: the same command on the
same machine writes the same bytes.

The loop can be suspended (:data:`Loop`): it hands out each step's batch and is sent the report of it. Who drives it
decides how batches are learnt: :func:`run` one after another, asyncrl/modes/multi_lora.py those of many loops at once.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.config.context import RunContext
from asyncrl.config.errors import RunFailed
from asyncrl.config.schema import Config
from asyncrl.data.errors import DataError
from asyncrl.data.tokens import Conversation, Pair
from asyncrl.report.metrics import read_lines

if TYPE_CHECKING:
    from asyncrl.data.corpus import Corpus
    from asyncrl.data.example import Example
    from asyncrl.data.lengths import Encoded
    from asyncrl.data.mixture import Mixture
    from asyncrl.report.reporter import Reporter
    from asyncrl.report.summary import Ended
    from asyncrl.training.answering import Answering
    from asyncrl.training.metrics import StepReport
    from asyncrl.training.sft import Learner

S = TypeVar("S", Conversation, Pair)


# Gives (trainer, what it is to learn next) and is sent the report; returns why it ended before its last step, or "".
Loop = Generator["tuple[Learner[Any], list[Any]]", "StepReport", str]
Open = Callable[..., "Learner[Any]"]  # as asyncrl.training.opening.open_trainer


def run(cfg: Config, context: RunContext) -> None:
    """Train as one rank. Raises on any failure, which ends the run; ``RunFailed`` for data that cannot be learnt."""
    from asyncrl.training.opening import open_trainer

    drive(job(cfg, context, open_trainer))


def drive(loop: Loop) -> None:
    """Learns what ``loop`` gives until it ends. An error is thrown into it, so that it can say why the run ended."""
    with suppress(StopIteration):
        trainer, samples = next(loop)
        while True:
            try:
                report = trainer.learn(samples)
            except BaseException as error:
                loop.throw(error)
                raise
            trainer, samples = loop.send(report)


def job(cfg: Config, context: RunContext, open_learner: Open) -> Loop:
    """The loop of one run with its reports and its summary. Raises as :func:`run` does."""
    from asyncrl.report.reporter import Reporter

    reporter = Reporter(context.run_dir, cfg) if context.rank == 0 else None
    ended: Ended = "failed"
    reason = ""
    try:
        reason = yield from train(cfg, context, reporter, open_learner)
        ended = "finished"
    except DataError as error:
        reason = str(error)
        raise RunFailed(reason) from error
    except RunFailed as error:
        reason = str(error)
        raise
    except KeyboardInterrupt as stop:
        ended, reason = "interrupted", f"interrupted by {stop}"
        raise
    except BaseException as error:
        reason = f"{type(error).__name__}: {error}"
        raise
    finally:
        if reporter is not None:
            reporter.finish(reporter.summary(ended, reason))
    return reason


def train(cfg: Config, context: RunContext, reporter: Reporter | None, open_learner: Open) -> Loop:
    """Data, trainer, steps, evaluations and checkpoints. Returns why it ended before its last step; empty otherwise."""
    from transformers import AutoTokenizer

    from asyncrl.data.ahead import Ahead
    from asyncrl.data.chat import encode, encode_pair
    from asyncrl.data.lengths import fates
    from asyncrl.data.opening import open_data
    from asyncrl.training import checkpoint
    from asyncrl.training.answering import Answering
    from asyncrl.training.dpo import DpoTrainer, must_be_recorded
    from asyncrl.training.early_stop import EarlyStop
    from asyncrl.training.keeping import keep_of
    from asyncrl.training.new_model import with_new_model
    from asyncrl.training.reference import Upcoming, record
    from asyncrl.training.sft import SftTrainer

    checkpoints = context.run_dir / "checkpoints"
    data, heldout = open_data(cfg, context)
    if reporter is not None:
        for corpus in (*data.corpora, *heldout):
            reporter.event(f"data: {corpus}")
    if not cfg.model.path:
        cfg = with_new_model(cfg, context, data.corpora[0])
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)
    pairs = cfg.sft.loss == "dpo"
    kind: type[Learner[Any]] = DpoTrainer if pairs else SftTrainer

    def encoded(example: Example) -> Encoded[Any]:
        return (encode_pair if pairs else encode)(tokenizer, example, cfg.sft)

    def draw() -> list[Any]:
        return samples_of(data.take(cfg.sft.batch_size, encoded))

    def say(text: str) -> None:
        if reporter is not None:
            reporter.event(text)

    def prepare(trainer: Learner[Any]) -> None:
        if isinstance(trainer, DpoTrainer) and must_be_recorded(cfg):
            upcoming = Upcoming(data, draw, cfg.trainer.steps)
            record(trainer, context.run_dir / "reference", upcoming, unseen, say)

    unseen = encoded_heldout(heldout, encoded, cfg, reporter)
    trainer = open_learner(cfg, context, kind, data_of(cfg, data), prepare)
    if trainer.position:
        data.seek(trainer.position)
    own = AutoTokenizer.from_pretrained(cfg.model.path, local_files_only=True)  # the other is the reading thread's
    early = EarlyStop(cfg, trainer.position)
    trained = tokens_before(trainer.version, context.run_dir / "metrics.jsonl")
    if reporter is not None:
        reporter.start_training()
    saved = trainer.version

    def save(position: dict[str, Any]) -> None:
        checkpoint.begin(trainer, checkpoints, keep_of(cfg, context.run_dir), {**position, **early.position()})

    steps = cfg.trainer.steps - trainer.version
    ahead = Ahead(data, cfg.sft.batch_size, encoded, steps, cfg.deadline.batch_s)
    with Answering(cfg, trainer, heldout, own) as answering, ahead as batches:
        if trainer.version == 0:
            early.see(0, evaluate(trainer, unseen, answering, reporter))
        while trainer.version < cfg.trainer.steps and not early.reason:
            trainer.saves.check()
            try:
                examples = batches.take()
            except DataError:  # on every rank: what was learnt before it is kept
                if trainer.version > saved:
                    save(batches.position())
                trainer.saves.close()
                raise
            report = yield trainer, samples_of(examples)
            trained += 0 if report.skipped else report.tokens
            if reporter is not None:
                figures = {**measured(report), **fates(examples), **batches.metrics(), **trainer.saves.metrics()}
                reporter.step({"step": report.version, "tokens/trained": trained, **figures})
            if due(trainer.version, cfg.eval.every, cfg):
                early.see(trainer.version, evaluate(trainer, unseen, answering, reporter))
            ill = trainer.strikes > 0 and trainer.version < cfg.trainer.steps
            if early.reason or (due(trainer.version, cfg.checkpoint.every, cfg) and not ill):
                save(batches.position())
                saved = trainer.version
    trainer.end()
    if cfg.sft.export and reporter is not None:
        exported = export(checkpoints, Path(cfg.sft.export), checkpoint.export_of(trainer).folder, cfg)
        reporter.event(f"{exported} is exported to {cfg.sft.export}")
    return early.reason


def due(step: int, every: int, cfg: Config) -> bool:
    """After the last step, and after each ``every`` (0: never)."""
    return step == cfg.trainer.steps or (every > 0 and step % every == 0)


def data_of(cfg: Config, data: Mixture) -> dict[str, Any]:
    """What decides which examples a step learns: with another value a resumed run would learn other ones."""
    return {**data.identity(), "sft.batch_size": cfg.sft.batch_size, "seed": cfg.seed}


def encoded_heldout(
    heldout: list[Corpus], encoded: Callable[[Example], Encoded[S]], cfg: Config, reporter: Reporter | None
) -> list[S]:
    """All of ``heldout`` as tokens; what is left out or cut is said."""
    from asyncrl.data.lengths import fates
    from asyncrl.data.opening import examples

    found, left_out = examples(heldout, encoded, cfg.sft.on_error == "skip")
    said = left_out | {key.removeprefix("sample/"): number for key, number in fates(found).items() if number}
    if said and reporter is not None:
        counts = ", ".join(f"{reason} {number}" for reason, number in sorted(said.items()))
        reporter.event(f"{sum(said.values())} held-out examples are left out, cut or split ({counts})", warning=True)
    return samples_of(found)


def samples_of(examples: Iterable[Encoded[S]]) -> list[S]:
    return [sample for example in examples for sample in example.samples]


def evaluate(trainer: Learner[S], unseen: list[S], answering: Answering, reporter: Reporter | None) -> dict[str, float]:
    """Report the loss on the held-out examples and what the policy answers, if there are any; the figures."""
    if not unseen:
        return {}
    began, answers = time.perf_counter(), answering()
    figures = {**trainer.evaluation(unseen), "eval/items": len(unseen), **answers.figures}
    figures["eval/seconds"] = time.perf_counter() - began
    if reporter is not None:
        reporter.evaluation(trainer.version, figures)
        reporter.generations(trainer.version, answers.rows)
    return figures


def tokens_before(version: int, metrics: Path) -> int:
    """Tokens that the steps up to ``version`` have trained, as earlier attempts of the run reported them."""
    steps = [line for line in read_lines(metrics) if "tokens/trained" in line and line["step"] <= version]
    return int(steps[-1]["tokens/trained"]) if steps else 0


def measured(report: StepReport) -> dict[str, float | str]:
    """A step's figures under their declared keys; those of reinforcement learning are left out."""
    kept = {"loss", "grad_norm", "lr", "tokens", "samples", "skipped"}
    kept |= {"micro_batches", "padding_share", "packing_efficiency"}
    kept |= {"clip_scale", "guarded_units", "partial_units", "partial_total"}  # of optim.in_backward
    found = report.metrics()
    return {key: value for key, value in found.items() if key in report.figures or key.removeprefix("train/") in kept}


def export(checkpoints: Path, target: Path, folder: str, cfg: Config) -> str:
    """Copy a checkpoint's folder for other programs (``hf`` or ``adapter``) to ``target``, replacing it; its name.

    The checkpoint is the best one if ``checkpoint.keep_best`` is set and any has a finite score, else the newest.
    """
    from asyncrl.training.checkpoint import latest, preferred
    from asyncrl.training.files import publish

    chosen = (preferred if cfg.checkpoint.keep_best else latest)(checkpoints)
    assert chosen is not None, "a checkpoint is saved after the last step"
    temporary = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    shutil.copytree(chosen / folder, temporary)
    publish(temporary, target)
    return chosen.name
