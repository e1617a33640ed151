"""How a run ends that does not finish: in time, with no process left, and with its reason where a user looks for it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.e2e.command import Launch, gone, interrupt, settings, steps, summary, until
from tests.e2e.faults import Fault, plan

pytestmark = pytest.mark.timeout(600)
BOUND_S = 10.0  # from a death to the last process gone
END_S = 40.0  # where other tests may run beside this one
LAST_LINES = 20  # torchrun's report of a failed rank takes most of them

OPENING = "asyncrl.training.opening:open_trainer"
STEP = "asyncrl.training.step:Trainer.step"
REPORT = "asyncrl.actors.conductor:Conductor._on_step"
ENGINE = "asyncrl.actors.engine:_start_llm"


def told_at_the_end(launch: Launch, reason: str) -> bool:
    return reason in "\n".join(launch.output.splitlines()[-LAST_LINES:])


FAILURES = {
    "trainer": (Fault(STEP, "raise", nth=2, text="CUDA out of memory"), "RuntimeError: CUDA out of memory", 2),
    "trainer before it knows the controller": (
        Fault(OPENING, "raise", text="no such file"),
        "RuntimeError: no such file",
        2,
    ),
    "controller": (Fault(REPORT, "raise", nth=2, text="a defect"), "RuntimeError: a defect (traceback in", 1),
    "engine": (
        Fault(ENGINE, "raise", text="no such dtype", always=True),
        "generator/0 died 2 times, the last time with exit code 1: vLLM did not start: no such dtype",
        1,
    ),
}
QUICK = ("trainer",)


@pytest.mark.parametrize(
    "what", [pytest.param(key, marks=[] if key in QUICK else pytest.mark.slow) for key in FAILURES]
)
def test_a_failure_is_told_at_the_end_and_in_the_summary(tmp_path, what):
    fault, reason, tracebacks = FAILURES[what]
    launch = Launch(
        settings(tmp_path / "run", trainer__steps=500, generator__max_restarts=1), env=plan(tmp_path / "plan", fault)
    )
    launch.start(tmp_path / "output.log")
    code, everything = launch.wait_watching()
    assert code == 1, launch.output
    assert not gone(list(everything), END_S)
    assert told_at_the_end(launch, reason), launch.output
    assert launch.output.count("Traceback (most recent call last)") <= tracebacks, launch.output  # torchrun's is one
    result = summary(tmp_path / "run")
    assert result["ended"] == "failed" and reason in result["reason"]
    assert result["generator_restarts"] == (what == "engine")


def rank(launch: Launch, number: int) -> psutil.Process:
    ranks = [p for p in launch.descendants() if "launch/train.py" in " ".join(p.cmdline())]
    return next(p for p in ranks if p.environ().get("RANK") == str(number))


def has_engine(processes: list[psutil.Process]) -> bool:
    """Whether a process of vLLM is among them, a child of a generator."""
    generators = {p.pid for p in processes if "asyncrl.actors.generator" in " ".join(p.cmdline())}
    return any(p.ppid() in generators and "EngineCore" in " ".join(p.cmdline()) for p in processes)


DEATHS: dict[str, tuple[Callable[[Launch], psutil.Process], str]] = {
    "controller": (
        lambda launch: launch.child("asyncrl.actors.controller"),
        "the controller ended (killed by SIGKILL)",
    ),
    "supervisor": (
        lambda launch: launch.child("asyncrl.actors.supervisor"),
        "the supervisor ended (killed by SIGKILL)",
    ),
    "rank 0": (lambda launch: rank(launch, 0), "trainer/0 died"),
    "rank 1": (lambda launch: rank(launch, 1), "trainer/1 died"),
}


@pytest.mark.parametrize(
    ("victim", "limit_s"),
    [
        ("controller", END_S),
        pytest.param("controller", BOUND_S, marks=pytest.mark.slow),
        pytest.param("supervisor", END_S, marks=pytest.mark.slow),
        pytest.param("rank 0", BOUND_S, marks=pytest.mark.slow),
        pytest.param("rank 1", BOUND_S, marks=pytest.mark.slow),
    ],
)
def test_a_death_ends_the_run_as_failed_with_the_reason_and_leaves_no_process(tmp_path, victim, limit_s):
    find, reason = DEATHS[victim]
    run_dir = tmp_path / "run"
    launch = Launch(settings(run_dir, trainer__steps=500), ranks=1 if victim == "controller" else 2)
    launch.start(tmp_path / "output.log")
    until(lambda: len(steps(run_dir)) >= 2, "step 2", launch)
    everything = launch.descendants()
    assert has_engine(everything)
    died = time.monotonic()
    find(launch).kill()
    assert not gone(everything, limit_s)
    assert launch.wait() == 1
    seconds = time.monotonic() - died
    print(f"the last process was gone {seconds:.1f} s after the death of the {victim}")
    assert seconds <= limit_s
    result = summary(run_dir)
    assert result["ended"] == "failed" and reason in result["reason"], launch.output
    if victim.startswith("rank"):
        assert told_at_the_end(launch, "Signal 9 (SIGKILL)"), launch.output  # torchrun saw it
    else:
        assert told_at_the_end(launch, reason), launch.output


# ---- signals ------------------------------------------------------------------------------------------------------


def sft(run_dir: Path) -> list[str]:
    values = {"run.dir": run_dir, "trainer.steps": 100_000, "trainer.threads": 1, "model.new.layers": 1}
    return [f"{key}={value}" for key, value in values.items()] + ["report.wandb.enabled=false"]


def terminate(launch: Launch) -> None:
    """What a scheduler does to end a job."""
    launch.process.terminate()


def kill_torchrun(launch: Launch) -> None:
    """Its ranks get SIGTERM from the kernel."""
    launch.process.kill()


def interrupt_twice(launch: Launch) -> None:
    interrupt(launch)
    interrupt(launch)


def stepped(launch: Launch, run_dir: Path) -> bool:
    return len(steps(run_dir)) >= 2


def begun(launch: Launch, run_dir: Path) -> bool:
    """The run has its folder; nothing else has been started, or is about to be."""
    return (run_dir / "config.json").exists()


def supervised(launch: Launch, run_dir: Path) -> bool:
    return any("asyncrl.actors.supervisor" in " ".join(p.cmdline()) for p in launch.descendants())


def starting(launch: Launch, run_dir: Path) -> bool:
    return "starting the generators and trainers" in launch.output


def test_torchrun_killed_before_its_rank_has_done_anything(tmp_path):
    launch = Launch(settings(tmp_path / "run", trainer__steps=100_000))
    launch.start(tmp_path / "output.log")
    found: list[psutil.Process] = []
    while not found:
        assert launch.process.poll() is None, launch.output
        found = launch.descendants()
    launch.process.kill()
    assert not gone(found, END_S)


SIGNALS = [
    ("grpo", 1, starting, interrupt),
    ("grpo", 1, stepped, interrupt_twice),
    ("sft", 1, stepped, terminate),
]
SLOW_SIGNALS = [
    ("grpo", 1, stepped, terminate),
    ("grpo", 1, stepped, kill_torchrun),
    ("grpo", 1, begun, interrupt),
    ("grpo", 1, supervised, interrupt_twice),
    ("grpo", 2, begun, interrupt),
    ("grpo", 2, starting, interrupt),
    ("grpo", 2, starting, terminate),
    ("grpo", 2, stepped, terminate),
    ("grpo", 2, stepped, interrupt_twice),
    ("grpo", 2, stepped, kill_torchrun),
    ("sft", 1, begun, interrupt),
    ("sft", 1, stepped, interrupt_twice),
    ("sft", 2, begun, terminate),
    ("sft", 2, stepped, interrupt),
    ("sft", 2, stepped, terminate),
]


def name_of(value) -> str:
    return value.__name__ if callable(value) else str(value)


@pytest.mark.parametrize(
    ("mode", "ranks", "moment", "act"),
    [*SIGNALS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_SIGNALS)],
    ids=name_of,
)
def test_a_signal_ends_the_run_as_interrupted_and_leaves_no_process(tmp_path, mode, ranks, moment, act):
    run_dir = tmp_path / "run"
    overrides = sft(run_dir) if mode == "sft" else settings(run_dir, trainer__steps=100_000)
    launch = Launch(overrides, ranks, experiment=mode)
    launch.start(tmp_path / "output.log")
    until(lambda: moment(launch, run_dir), moment.__name__, launch)
    everything = launch.descendants()
    act(launch)
    assert launch.wait() != 0
    assert not gone(everything, END_S)
    result = summary(run_dir)
    assert result["ended"] == "interrupted", (result["reason"], launch.output)
    assert any(name in result["reason"] for name in (signal.SIGINT.name, signal.SIGTERM.name))
