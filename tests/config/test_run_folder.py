"""A run folder is used once; the link to the newest is never missing; a restart finds its earlier attempt."""

from __future__ import annotations

import os
import threading

import pytest

from asyncrl.config.errors import ConfigError
from asyncrl.config.files import from_dict, save_config
from asyncrl.config.run_folder import (
    Launch,
    changed_on_resume,
    choose_run_dir,
    choose_sweep_dir,
    earlier_attempt,
    job_name,
    link_latest,
    make_unique,
)


def config_for(tmp_path, **run):
    return from_dict({"run": {"root": str(tmp_path / "outputs"), "sweep_root": str(tmp_path / "multirun")} | run})


def test_two_runs_in_one_second_get_two_folders(tmp_path):
    config = config_for(tmp_path)
    first, second = choose_run_dir(config), choose_run_dir(config)
    assert first != second and first.is_dir() and second.is_dir()
    assert first.name.endswith("_grpo") and first.parent == tmp_path / "outputs"


def test_concurrent_starts_never_share_a_folder(tmp_path):
    """prime-rl #2992: mkdir and rename races."""
    made = []
    threads = [threading.Thread(target=lambda: made.append(make_unique(tmp_path / "run"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 16


def test_a_folder_in_use_is_refused_with_the_remedy(tmp_path):
    folder = tmp_path / "mine"
    config = config_for(tmp_path, dir=str(folder))
    assert choose_run_dir(config) == folder
    assert choose_run_dir(config) == folder, "an empty folder may be given"
    (folder / "metrics.jsonl").write_text("{}")
    with pytest.raises(ConfigError, match=f"not empty.*\n.*resume={folder}"):
        choose_run_dir(config)


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"run\.dir.*cannot be made"):
        choose_run_dir(config_for(tmp_path, dir=str(tmp_path / "file" / "run")))


def test_sweep_jobs_share_a_folder_and_are_told_apart(tmp_path):
    config = config_for(tmp_path)
    sweep = choose_sweep_dir(config)
    jobs = [choose_run_dir(config, sweep, n, [f"optim.lr={lr}"]) for n, lr in enumerate(["1e-4", "3e-4"])]
    assert [job.name for job in jobs] == ["0_optim.lr=1e-4", "1_optim.lr=3e-4"]
    assert {job.parent for job in jobs} == {sweep} and sweep.parent == tmp_path / "multirun"
    assert choose_sweep_dir(config) != sweep


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        ([], "3"),
        (["a=1", "b=x/y z"], "3_a=1,b=x-y-z"),
        (["model.path=../../etc"], "3_model.path=..-..-etc"),
        (["a=" + "x" * 500], "3_a=" + "x" * 116),
    ],
)
def test_job_names_are_safe(overrides, name):
    assert job_name(3, overrides) == name


def test_latest_points_at_the_newest(tmp_path):
    root = tmp_path / "outputs"
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        link_latest(root, root / name)
        assert (root / "latest").resolve() == root / name
    assert os.readlink(root / "latest") == "b", "relative, so that the folder can be moved"
    (tmp_path / "elsewhere").mkdir()
    link_latest(root, tmp_path / "elsewhere")
    assert (root / "latest").resolve() == tmp_path / "elsewhere"
    assert sorted(path.name for path in root.iterdir()) == ["a", "b", "latest"]


def test_a_folder_named_latest_is_not_replaced(tmp_path):
    (tmp_path / "latest").mkdir()
    with pytest.raises(ConfigError, match="move"):
        link_latest(tmp_path, tmp_path)


def test_history_forbids_some_changes_on_resume(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    save_config(from_dict({"optim": {"lr": 1e-3}, "seed": 1, "env": {"task": "a"}}), run)
    same = {"resume": str(run), "seed": 1, "env": {"task": "a"}}
    assert changed_on_resume(from_dict(same | {"optim": {"lr": 1e-4}, "trainer": {"steps": 9}})) == []
    changed = changed_on_resume(from_dict(same | {"seed": 2, "env": {"task": "b"}, "batch": {"groups": 4}}))
    assert [problem.key for problem in changed] == ["seed", "env.task", "batch.groups"]
    assert "seed=1" in changed[0].remedy


def test_a_restart_finds_its_earlier_attempt_and_no_other(tmp_path):
    config = config_for(tmp_path)
    mine, others = Launch.now(job=1, attempt=0), Launch.now(job=0, attempt=0)
    other_agent = Launch.now(job=1, attempt=0)
    other_agent.agent = [mine.agent[0], mine.agent[1] + 1]  # the pid was used again
    again = Launch.now(job=1, attempt=1)
    for record in (others, other_agent):
        record.write(choose_run_dir(config))
    (choose_run_dir(config) / "launch.json").write_text('{"argv": [')  # the start of that one was cut off
    assert earlier_attempt(config, again) is None
    folder = choose_run_dir(config, choose_sweep_dir(config), 1, ["a=1"])
    mine.write(folder)
    link_latest(tmp_path / "outputs", folder)
    assert earlier_attempt(config, again) == (folder, mine)
