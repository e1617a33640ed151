"""`make env`: builds once, rebuilds when it must, and never takes an interrupted build for a finished one.

The installs themselves are replaced by a recorder; `.ci/run` in a fresh clone does them for real.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def env(tmp_path, monkeypatch):
    """requirements/env.py as a module whose repository is a small copy, and the commands it would have run."""
    spec = importlib.util.spec_from_file_location("asyncrl_env", ROOT / "requirements" / "env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    repository = tmp_path / "repository"
    (repository / "requirements").mkdir(parents=True)
    (repository / "pyproject.toml").write_text("[project]\n")
    (repository / "requirements" / "cpu.txt").write_text("torch==2.13.0+cpu\n")
    (repository / "requirements" / "cuda.txt").write_text("torch===2.13.0\n")
    monkeypatch.setattr(module, "ROOT", repository)
    module.commands, module.fails_at = [], None

    def run(command, **options):
        module.commands.append(command)
        if module.fails_at is not None and module.fails_at in command:
            if options.get("check"):
                raise subprocess.CalledProcessError(1, command)
            return subprocess.CompletedProcess(command, 1)
        if "venv" in command:
            Path(command[-1]).mkdir(exist_ok=True)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(module.subprocess, "run", run)
    return module


def build(env):
    """What one call does: the kinds of command it runs."""
    env.commands.clear()
    env.build(env.ROOT / ".venv", env.ROOT / "requirements" / "cpu.txt")
    kinds = {"venv": "venv", "-r": "lock", "-e": "project", "--dry-run": "probe", "--extra-index-url": "torch"}
    return [kind for command in env.commands for word, kind in kinds.items() if word in command]


def test_the_second_call_does_nothing(env):
    assert build(env) == ["venv", "probe", "lock", "project"]
    assert build(env) == []


def test_the_lock_is_installed_without_dependencies(env):
    build(env)
    installs = [command for command in env.commands if "-r" in command or "-e" in command]
    assert len(installs) == 2 and all("--no-deps" in command for command in installs)


def test_a_changed_lock_rebuilds_from_nothing(env):
    build(env)
    (env.ROOT / "requirements" / "cpu.txt").write_text("torch==2.14.0+cpu\n")
    assert build(env) == ["venv", "probe", "lock", "project"]
    assert "--clear" in env.commands[0]


def test_a_changed_pyproject_installs_only_the_project(env):
    build(env)
    (env.ROOT / "pyproject.toml").write_text("[project]\nname='x'\n")
    assert build(env) == ["project"]
    assert build(env) == []


@pytest.mark.parametrize(("fails_at", "again"), [("-r", ["venv", "probe", "lock", "project"]), ("-e", ["project"])])
def test_an_interrupted_build_is_not_taken_for_a_finished_one(env, fails_at, again):
    env.fails_at = fails_at
    with pytest.raises(subprocess.CalledProcessError):
        build(env)
    env.fails_at = None
    assert build(env) == again
    assert build(env) == []


def test_a_rebuild_that_fails_does_not_leave_the_old_stamp(env):
    build(env)
    (env.ROOT / "requirements" / "cpu.txt").write_text("torch==2.14.0+cpu\n")
    env.fails_at = "-r"
    with pytest.raises(subprocess.CalledProcessError):
        build(env)
    (env.ROOT / "requirements" / "cpu.txt").write_text("torch==2.13.0+cpu\n")  # back to what the old stamp says
    env.fails_at = None
    assert "lock" in build(env)


def test_the_cpu_index_is_asked_for_torch_alone(env):
    env.fails_at = "--dry-run"
    assert build(env) == ["venv", "probe", "torch", "lock", "project"]
    (torch,) = [command for command in env.commands if "--extra-index-url" in command]
    assert torch[-1] == "torch==2.13.0+cpu" and "--no-deps" in torch and "-r" not in torch


def test_the_cpu_index_is_added_only_when_the_cpu_build_is_not_found(env):
    assert env.index_arguments("python", "torch==2.13.0+cpu") == []
    env.fails_at = "--dry-run"
    assert env.index_arguments("python", "torch==2.13.0+cpu") == ["--extra-index-url", env.TORCH_CPU_INDEX]
    assert env.index_arguments("python", "torch===2.13.0") == [], "PyPI has the CUDA build"


@pytest.mark.parametrize(("answers", "lock"), [(0, "cuda"), (9, "cpu")])
def test_the_lock_is_chosen_by_whether_the_driver_answers(env, tmp_path, monkeypatch, answers, lock):
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver")
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=os.pathsep)
    monkeypatch.setattr(env.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, answers))
    assert env.choose_lock("auto").name == f"{lock}.txt"
    assert env.choose_lock("cpu").name == "cpu.txt", "an explicit choice wins"


def test_no_working_python_is_explained(tmp_path):
    """A pyenv shim exists and fails; it must be passed over, not taken."""
    shim = tmp_path / "python3.12"
    shim.write_text("#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n")
    shim.chmod(0o755)
    script = str(ROOT / "requirements" / "python.sh")
    result = subprocess.run(
        ["/bin/sh", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, cwd=tmp_path
    )
    assert result.returncode == 1 and "make PYTHON=" in result.stderr
    (tmp_path / "python3.11").symlink_to(sys.executable)
    if sys.version_info[:2] in ((3, 11), (3, 12)):
        result = subprocess.run(
            ["/bin/sh", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True, cwd=tmp_path
        )
        assert result.stdout.strip() == str(tmp_path / "python3.11")


def test_an_up_to_date_check_takes_well_under_a_second(env, tmp_path):
    build(env)
    began = time.process_time()
    for _ in range(10):
        assert build(env) == []
    assert (time.process_time() - began) / 10 < 0.1, "two small files are hashed, nothing else"
