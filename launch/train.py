"""Starts a run: ``torchrun launch/train.py +experiment=grpo``; with ``-m`` and lists of values, a sweep.

Composes the configuration with Hydra, checks it without importing torch, then runs ``asyncrl.modes.<mode>`` on every
rank. Works from any working directory, and without torchrun as a world of one. Exit status: 0 finished, 1 the run
failed, 2 the configuration is wrong, 130 interrupted (Ctrl-C, SIGTERM); torchrun's own is 1 for all but the first.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # torchrun puts launch/ there; Hydra must find hydra_plugins/, and children inherit it

import hydra  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from asyncrl.actors.ending import INTERRUPTED_STATUS  # noqa: E402
from asyncrl.config.errors import exit_on_config_error  # noqa: E402
from asyncrl.config.load import check_overrides, config_groups, register_schema  # noqa: E402
from asyncrl.config.offline import set_offline_defaults  # noqa: E402
from asyncrl.config.processes import die_with_torchrun, end_in_order  # noqa: E402
from asyncrl.modes.jobs import Job, run_jobs  # noqa: E402


def run_one(composed: DictConfig) -> None:
    """Hydra's task function of a single run; a sweep goes through hydra_plugins/asyncrl_launcher.py."""
    run_jobs([Job(0, composed)], sweep=False)


def main() -> None:
    """Entry point of every rank."""
    end_in_order()
    conf = ROOT / "conf"
    try:
        die_with_torchrun()
        set_offline_defaults()
        register_schema()
        with exit_on_config_error():
            check_overrides(sys.argv[1:], config_groups(conf))
        hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(run_one)()
    except KeyboardInterrupt as stop:  # before there was a run
        print(f"asyncrl: interrupted by {stop}; nothing was started", file=sys.stderr)
        sys.exit(INTERRUPTED_STATUS)


if __name__ == "__main__":
    main()
