"""Hydra's door to ``asyncrl.modes.jobs``: all jobs of a ``-m`` sweep arrive here in one call, on every rank."""

from __future__ import annotations

from collections.abc import Sequence

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, open_dict

NODE = {"_target_": "hydra_plugins.asyncrl_launcher.AsyncrlLauncher"}
ConfigStore.instance().store(group="hydra/launcher", name="asyncrl", node=NODE, provider="asyncrl")


class AsyncrlLauncher(Launcher):
    """Composes every job of a sweep and runs them one after another in this process."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.loader = hydra_context.config_loader
        self.config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        # Imported here, as Hydra imports every plugin at start-up, also for programs that are not ours.
        from asyncrl.config.load import discard_scratch_dir
        from asyncrl.modes.jobs import Job, run_jobs

        discard_scratch_dir()
        common = set.intersection(*(set(overrides) for overrides in job_overrides))
        jobs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            composed = self.loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                composed.hydra.job.id = composed.hydra.job.num = number
            HydraConfig.instance().set_config(composed)
            with open_dict(composed):
                del composed["hydra"]
            jobs.append(Job(number, composed, [text for text in overrides if text not in common]))
        run_jobs(jobs, sweep=True)
        return [JobReturn(overrides=job.overrides, _return_value=None, status=JobStatus.COMPLETED) for job in jobs]
