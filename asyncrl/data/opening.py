"""From ``sft.data`` and ``sft.heldout`` to what the loop learns and evaluates; the files are read once, by one rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from asyncrl.config.context import RunContext
from asyncrl.config.schema import Config, DataConfig
from asyncrl.data.corpus import Corpus, EnvCorpus, FileCorpus
from asyncrl.data.errors import DataError, SourceError
from asyncrl.data.example import Example
from asyncrl.data.mixture import Mixture
from asyncrl.data.preferences import EnvPairs
from asyncrl.data.records import open_records
from asyncrl.data.stored import read_survey, survey
from asyncrl.envs import load_env

T = TypeVar("T")


def open_data(cfg: Config, context: RunContext) -> tuple[Mixture, list[Corpus]]:
    """Collective. (what is learnt, what is evaluated and never learnt: possibly nothing).

    Each file is surveyed by one rank into ``<run>/data``, different files by different ranks; the others wait for that.
    Raises ``SourceError`` for a source that cannot be used at all.
    """
    sources = [(f"sft.data[{k}]", source) for k, source in enumerate(cfg.sft.data)]
    sources += [(f"sft.heldout[{k}]", source) for k, source in enumerate(cfg.sft.heldout)]
    surveys = _surveys([Path(source.path) for _, source in sources], context, cfg.deadline.start_s)
    files = [_open(source, surveys[Path(source.path)], key) for key, source in sources]
    learnt: list[Corpus] = list(files[: len(cfg.sft.data)])
    unseen: list[Corpus] = list(files[len(cfg.sft.data) :])
    weights = [source.weight for source in cfg.sft.data]
    if not learnt:
        items = env_corpus(cfg, "train")
        assert items is not None, "env.size is at least 1"
        learnt, weights = [items], [1.0]
        if not unseen and (held := env_corpus(cfg, "heldout")) is not None:
            unseen = [held]
    if len(learnt) > 1:
        _check_kinds(learnt)
    return Mixture(learnt, weights, cfg.seed, cfg.sft.on_error == "skip"), unseen


def env_corpus(cfg: Config, split: str) -> EnvCorpus | None:
    """The items of ``split``, as what ``sft.loss`` learns from; None without any."""
    found, made = load_env(cfg.env, split), EnvPairs if cfg.sft.loss == "dpo" else EnvCorpus
    return made(found, f"env ({split})") if len(found) else None


def _surveys(paths: Sequence[Path], context: RunContext, deadline_s: float) -> dict[Path, Path]:
    """Where each path's survey is."""
    distinct = list(dict.fromkeys(paths))
    found = {}
    for k, path in enumerate(distinct):
        if k % context.world_size == context.rank:
            found[path] = survey(path, context.run_dir / "data")
            if context.world_size > 1:
                context.publish(f"survey/{k}", str(found[path]))
    for k, path in enumerate(distinct):
        if path not in found:
            found[path] = Path(context.await_published(f"survey/{k}", deadline_s))
    return found


def _open(source: DataConfig, file: Path, key: str) -> FileCorpus:
    stored = read_survey(file)
    return FileCorpus(open_records(stored, source.split), source, stored.digest, key)


def _check_kinds(corpora: Sequence[Corpus]) -> None:
    """Raises ``SourceError`` when preference pairs would be mixed with other examples."""
    kinds = {}
    for corpus in corpora:
        if (first := _first(corpus)) is not None:
            kinds[corpus.name] = first.rejected is not None
    if len(set(kinds.values())) > 1:
        pairs, others = (next(name for name, pair in kinds.items() if pair is wanted) for wanted in (True, False))
        raise SourceError(pairs, f"holds preference pairs and {others} does not", "learn them in runs of their own")


def _first(corpus: Corpus, tried: int = 100) -> Example | None:
    """The first example that is good."""
    for index in range(min(tried, len(corpus))):
        try:
            return corpus.example(index)
        except SourceError:
            raise
        except DataError:
            continue  # it is counted, or ends the run, when its turn comes
    return None


def examples(corpora: Sequence[Corpus], encode: Callable[[Example], T], skip: bool) -> tuple[list[T], dict[str, int]]:
    """(all of ``corpora`` in the order of their files, how many were left out by reason).

    Raises ``DataError`` for a record that cannot be used, unless ``skip``.
    """
    made: list[T] = []
    left_out: dict[str, int] = {}
    for corpus in corpora:
        for index in range(len(corpus)):
            try:
                made.append(encode(corpus.example(index)))
            except SourceError:
                raise
            except DataError as error:
                if not skip:
                    raise
                left_out[error.reason] = left_out.get(error.reason, 0) + 1
    return made, left_out
