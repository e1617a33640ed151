"""Runs one job, or the jobs of a sweep one after another, on this rank: check, run folder, mode.

The jobs of ``mode=multi_lora`` run together (asyncrl/modes/multi_lora.py). Each is a run of mode=sft in every other
respect: that is what its folder says, and what it is checked as.

Every rank composes and checks all jobs before the first one starts; a mistake in the last job of a sweep costs nothing.
Rank 0 chooses the folder and publishes it with the configuration, so that all ranks act on the same one. A failed job
ends the launch: the other ranks may be inside a collective, and torchrun ends them when this process is gone.
"""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from asyncrl.actors.ending import end_rank, how_it_ended
from asyncrl.config.check import check
from asyncrl.config.context import Place, RunContext, lead_context
from asyncrl.config.data import uses_env
from asyncrl.config.errors import ConfigError, Problem, RunFailed, exit_on_config_error
from asyncrl.config.files import CONFIG_FILE, from_dict, save_config, to_dict
from asyncrl.config.load import resolve
from asyncrl.config.packing import check_pack, check_packed
from asyncrl.config.run_folder import (
    Launch,
    changed_on_resume,
    choose_run_dir,
    choose_sweep_dir,
    earlier_attempt,
    job_name,
    link_latest,
)
from asyncrl.config.schema import Config
from asyncrl.envs import EnvError, load_env

PACKED = "multi_lora"


@dataclass
class Job:
    """What Hydra composed for one job. ``overrides`` are those in which the jobs of the sweep differ."""

    number: int
    composed: DictConfig
    overrides: Sequence[str] = ()


def run_jobs(jobs: Sequence[Job], sweep: bool) -> None:
    """Runs ``jobs`` in order.

    Ends the process with status 2 for a configuration error, 1 for a failed run, 130 for an interrupted one.
    """
    place = Place.from_environment()
    with exit_on_config_error():
        configs = check_jobs(jobs, place)
    folders = Folders(place, sweep)
    if packs(jobs):
        run_packed(jobs, configs, folders)
        return
    for job, config in zip(jobs, configs, strict=True):
        folders.run_dir = None
        try:
            with exit_on_config_error():
                opened = folders.lead(job, config) if place.rank == 0 else folders.follow(job, config)
            if opened is not None:
                run_mode(*opened)
                if place.rank == 0:
                    folders.record_return(opened[1])
            continue
        except (Exception, KeyboardInterrupt) as error:
            if not isinstance(error, RunFailed | KeyboardInterrupt):
                logging.getLogger(__name__).exception("asyncrl: rank %d failed", place.rank)
            how = how_it_ended(error)
        end_rank(config, folders.run_dir, place.rank, *how)


def packs(jobs: Sequence[Job]) -> bool:
    """Whether the jobs train together on one base; a mode that only some of them have is refused by the check."""
    return all(job.composed.mode == PACKED for job in jobs)


def run_packed(jobs: Sequence[Job], configs: Sequence[Config], folders: Folders) -> None:
    """Runs all jobs at once, each in its own folder; ends the process as :func:`run_jobs` does."""
    resumed = next((config.resume for config in configs if config.resume), "")
    if resumed and folders.sweep:
        folders.sweep_dir = Path(resumed).parent
    try:
        with exit_on_config_error():
            opened = [folders.lead(job, config) for job, config in zip(jobs, configs, strict=True)]
        runs = [run for run in opened if run is not None]
        if configs[0].run.dry:
            for run in runs:
                run_mode(*run)
            return
        from asyncrl.modes import multi_lora

        multi_lora.run(runs, folders.sweep_dir, folders.record_return)
        return
    except (Exception, KeyboardInterrupt) as error:
        if not isinstance(error, RunFailed | KeyboardInterrupt):
            logging.getLogger(__name__).exception("asyncrl: rank %d failed", folders.place.rank)
        how = how_it_ended(error)
    end_rank(configs[0], None, folders.place.rank, *how)


def own_folder(job: Job, resume: str) -> str:
    """The folder in which ``job`` goes on when the sweep in ``resume`` does; empty if it had not begun there."""
    folder = Path(resume)
    if (folder / CONFIG_FILE).is_file() or not folder.is_dir():
        return resume  # of a run, or nothing: the check says so
    mine = folder / job_name(job.number, job.overrides)
    return str(mine) if (mine / CONFIG_FILE).is_file() else ""


def check_jobs(jobs: Sequence[Job], place: Place) -> list[Config]:
    """The Config of every job; raises one ConfigError with the problems of all of them."""
    configs: list[Config] = []
    problems: dict[str, Problem] = {}
    packed = packs(jobs)
    for job in jobs:
        try:
            config = resolve(job.composed)
            if config.mode == PACKED and not packed:
                problem = Problem("mode", "the other jobs of the sweep have another one", "one mode for all of them")
                problems[problem.key] = problem
            if packed:
                config.mode = "sft"
                config.resume = own_folder(job, config.resume) if config.resume else ""
                problems |= {str(problem): problem for problem in check_packed(config, place)}
            check(config, place)
            if config.resume:
                problems |= {str(problem): problem for problem in changed_on_resume(config)}
            if place.rank == 0 and uses_env(config):
                load_env(config.env, "train")  # over a second for reasoning-gym, so not on every rank
            if len(jobs) > 1 and (config.run.dir or (config.resume and not packed)):
                key = "run.dir" if config.run.dir else "resume"
                problems[key] = Problem(key, "names one folder for all jobs of a sweep", f"leave {key} out")
            configs.append(config)
        except EnvError as error:
            problems[str(error)] = error.problem
        except ConfigError as error:
            problems |= {str(problem): problem for problem in error.problems}
    if packed and any(job.composed.resume for job in jobs) and not any(config.resume for config in configs):
        problems["resume"] = Problem("resume", "none of these jobs is in it", "the folder and overrides of the sweep")
    if packed and len(configs) == len(jobs):
        problems |= {str(problem): problem for problem in check_pack(configs, [job.number for job in jobs])}
    if problems:
        raise ConfigError(list(problems.values()))
    return configs


class Folders:
    """Chooses the run folder of each job on rank 0 and makes it known to the others."""

    def __init__(self, place: Place, sweep: bool) -> None:
        self.place = place
        self.sweep = sweep
        self.sweep_dir: Path | None = None
        self.run_dir: Path | None = None  # of the job in hand, on rank 0

    def lead(self, job: Job, config: Config) -> tuple[Config, RunContext] | None:
        """Rank 0: the job's folder, written and published; None when an earlier attempt has finished the job."""
        launch = Launch.now(job.number, self.place.attempt)
        earlier = earlier_attempt(config, launch) if self.place.attempt else None
        if earlier is not None:
            run_dir, record = earlier
            self.sweep_dir = run_dir.parent if self.sweep else None
            if record.returned:
                self._context(job, config, run_dir, skip=True).close()
                return None
            config.resume = str(run_dir)
        elif config.resume:
            run_dir = Path(config.resume)
        else:
            if self.sweep and self.sweep_dir is None:
                self.sweep_dir = choose_sweep_dir(config)
            run_dir = choose_run_dir(config, self.sweep_dir, job.number, job.overrides)
        self.run_dir = run_dir
        if not config.run.dry:  # an earlier attempt's must not speak for this one
            (run_dir / "summary.json").unlink(missing_ok=True)
        save_config(config, run_dir)
        launch.write(run_dir)
        link_latest(Path(config.run.root).absolute(), run_dir)
        return config, self._context(job, config, run_dir)

    def _context(self, job: Job, config: Config, run_dir: Path, skip: bool = False) -> RunContext:
        text = json.dumps({"run_dir": str(run_dir), "skip": skip, "config": to_dict(config)})
        return lead_context(self.place, run_dir, job.number, config.deadline.start_s, {"start": text})

    def follow(self, job: Job, config: Config) -> tuple[Config, RunContext] | None:
        """Any other rank: what rank 0 published. On a node that does not share rank 0's disk it makes the folder."""
        context = RunContext(self.place, Path(), job.number, config.deadline.start_s)
        start = json.loads(context.await_published("start", config.deadline.start_s))
        context.run_dir, config = Path(start["run_dir"]), from_dict(start["config"])
        if start["skip"]:
            context.close()
            return None
        if self.place.local_rank == 0 and not (context.run_dir / CONFIG_FILE).exists():
            context.run_dir.mkdir(parents=True, exist_ok=True)
            save_config(config, context.run_dir)
        return config, context

    def record_return(self, context: RunContext) -> None:
        """Notes in ``launch.json`` that the mode has returned, so that a restart does not run the job again."""
        launch = Launch.now(context.job, self.place.attempt)
        launch.returned = True
        launch.write(context.run_dir)


def run_mode(config: Config, context: RunContext) -> None:
    """Runs ``asyncrl.modes.<mode>`` and closes the context; of a dry run only what every process would read is left."""
    failed = True
    try:
        if config.run.dry:
            context.connect()
            print(f"dry run, rank {context.rank} of {context.world_size}: {context.run_dir / CONFIG_FILE}", flush=True)
        else:
            importlib.import_module(f"asyncrl.modes.{config.mode}").run(config, context)
        failed = False
    finally:
        context.close(failed)
