"""Tokens a second and peak memory of supervised fine-tuning: TRL's SFTTrainer against ours, in one run.

    python -m benchmarks.sft_vs_trl [--quick] [--json FILE]

Same weights, conversations, tokens learnt (the assistant's, compared by digest), conversations a step, AdamW, clipping
and cores or GPU. Each setting is a process of its own, started when no other runs. Tokens are real ones, prompts
included, padding not. Ours is the loop of ``mode=sft`` as it is, so encoding and packing are in its time; TRL encodes
before its clock starts.

TRL's settings are those that somebody would choose who knows it: no gradient checkpointing, fused AdamW, on a CPU fp32
instead of its bf16 autocast; rows padded to the longest of a micro-batch, the same grouped by length, one conversation
at a time (nothing is padded), ``padding_free``, packing by best-fit decreasing (``bfd``) in rows one at a time, because
TRL flattens the rows of a micro-batch into one and SDPA then scores all of it against all; on a GPU with each attention
that works there (flash_attention_2, flex_attention, sdpa) and Liger's layer kernels, as far as they are installed. Logs
every step (its entropy and accuracy cannot be switched off), nothing else. Ours is compared with the fastest.

Where time goes, and what ours should save. A matrix of n weights costs 6 n operations a token, in three products. TRL
1.16 makes no N x V logits any more: its head takes learnt tokens only, in tiles, and computes them again in backward:
four products where ours needs three. With half of the weights in the head (38 M parameters, vocabulary 49,152) and 0.6
of the tokens learnt, products alone give 1.13; with SmolLM2-135M, where a fifth is in the head, 1.05. The rest must
come from what is no product: without a GPU TRL's tiles pass some 25 times over the logits in plain torch and ours some
8 (at 10 GB/s a fifth of TRL's step), a packed row is scored against all of itself, a third or more of padded rows is
empty. Expected on two cores: 1.3 to 1.4 against TRL's best. On a GPU: 2 against SDPA with a mask of packed rows, 1.1 to
1.3 against flash attention, where products and AdamW are all that is left.

Peak memory on a CPU is the process's high-water mark of resident memory after loading; also what that is above loading.
Seconds on a CPU are those of the processor, with waits that sleep, so that other work on the machine does not count;
the wall time is given beside.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.context import Place, RunContext
from asyncrl.config.files import to_dict
from asyncrl.config.schema import Config, DataConfig
from asyncrl.data.example import Example
from asyncrl.data.tokens import Conversation
from benchmarks.harness import Claim, arguments, at_least, at_most, report
from benchmarks.jobs import run_job, trl_python
from benchmarks.meter import digest
from benchmarks.talks import SMALL, SMOLLM2, Shape, draw, write_jsonl, write_model, write_smollm2
from requirements.env import has_nvidia_driver

THREADS = min(2, len(os.sched_getaffinity(0)))
TARGET = 1.3
WARM = 1  # steps that are not timed on a CPU: optimizer states, first allocations
WARM_GPU = 5  # and compilation


@dataclass(frozen=True)
class TrlSetting:
    """``settings`` are arguments of SFTConfig; ``same_batches``: each step learns what ours learns in it."""

    name: str
    settings: dict[str, Any]
    attention: str = "sdpa"
    same_batches: bool = False
    limits_length: bool = True


@dataclass(frozen=True)
class Plan:
    """What one machine runs: ``batch`` conversations a step, ``row`` tokens in a packed row."""

    gpu: bool
    shape: Shape
    batch: int
    row: int
    steps: int
    warm: int
    trl: Sequence[TrlSetting]
    ours: dict[str, dict[str, Any]] = field(default_factory=dict)


def micro(batch: int, size: int) -> dict[str, int]:
    """A step of ``batch`` rows in micro-batches of ``size``."""
    return {"per_device_train_batch_size": size, "gradient_accumulation_steps": batch // size}


def cpu_plan(quick: bool) -> Plan:
    batch, row = 8, 1024
    in_order = {"train_sampling_strategy": "sequential"}
    packed = {"packing": True, "packing_strategy": "bfd"}
    settings = [
        TrlSetting("padded", micro(batch, batch) | in_order, same_batches=True),
        TrlSetting("one by one", micro(batch, 1) | in_order, same_batches=True),
        TrlSetting("packed", micro(2, 1) | packed),
    ]
    if not quick:
        settings += [
            TrlSetting("padded, by length", micro(batch, 4) | {"train_sampling_strategy": "group_by_length"}),
            TrlSetting(
                "padding-free",
                micro(batch, 4) | in_order | {"padding_free": True},
                same_batches=True,
                limits_length=False,
            ),
        ]
    return Plan(
        False, SMALL, batch, row, 3 if quick else 6, WARM, settings, {"ours": {"trainer": {"token_budget": row}}}
    )


def gpu_plan(quick: bool) -> Plan:
    batch, row = 64, 8192
    in_order = {"train_sampling_strategy": "sequential"}
    packed = micro(2, 1) | {"packing": True, "packing_strategy": "bfd"}
    settings = [TrlSetting("padded", micro(batch, 32) | in_order, same_batches=True)]
    attentions = ["sdpa", "flex_attention"] + ["flash_attention_2"] * bool(find_spec("flash_attn"))
    settings += [TrlSetting(f"packed, {name}", packed, attention=name) for name in attentions[-1:] if quick]
    settings += [TrlSetting(f"packed, {name}", packed, attention=name) for name in attentions if not quick]
    if find_spec("liger_kernel"):
        liger = {"use_liger_kernel": True}
        settings.append(TrlSetting(f"packed, {attentions[-1]}, liger", packed | liger, attention=attentions[-1]))
    ours = {"ours": {"trainer": {"token_budget": 2 * row}}}
    if not quick:
        ours["ours, compiled"] = {"trainer": {"token_budget": 2 * row, "compile": True}}
    return Plan(True, SMOLLM2, batch, row, 15 if quick else 30, WARM_GPU, settings, ours)


def our_config(plan: Plan, model: Path, data: Path, overrides: dict[str, dict[str, Any]]) -> Config:
    cfg = Config(mode="sft")
    cfg.model.path, cfg.model.compute_dtype = str(model), "bfloat16" if plan.gpu else "float32"
    cfg.sft.data, cfg.sft.batch_size, cfg.sft.max_length = [DataConfig(path=str(data))], plan.batch, plan.row
    cfg.trainer.steps, cfg.trainer.threads = plan.steps, THREADS
    cfg.optim.lr, cfg.optim.warmup_steps = 1e-4, 0
    cfg.checkpoint.every = 0
    for part, values in overrides.items():
        cfg = dataclasses.replace(cfg, **{part: dataclasses.replace(getattr(cfg, part), **values)})
    return cfg


def in_order(cfg: Config, folder: Path) -> tuple[list[Example], list[Conversation]]:
    """What a run of ours learns, in its order: as examples and as tokens."""
    from transformers import AutoTokenizer

    from asyncrl.data.chat import encode
    from asyncrl.data.opening import open_data

    tokenizer = AutoTokenizer.from_pretrained(cfg.model.path)
    context = RunContext(Place(), folder)
    data, _ = open_data(cfg, context)
    seen: list[Example] = []

    def both(example: Example) -> Conversation:
        seen.append(example)
        [conversation] = encode(tokenizer, example, cfg.sft).samples
        return conversation

    conversations = data.take(cfg.trainer.steps * cfg.sft.batch_size, both)
    context.close()
    return seen, conversations


def trl_job(plan: Plan, cfg: Config, data: Path, setting: TrlSetting, folder: Path) -> dict[str, Any]:
    """What ``sft_trl_run.py`` reads: the numbers of our run's own configuration."""
    return {
        "model": cfg.model.path,
        "data": str(data),
        "gpu": plan.gpu,
        "threads": THREADS,
        "seed": cfg.seed,
        "steps": plan.steps,
        "max_length": plan.row if setting.limits_length else None,
        **{key: getattr(cfg.optim, key) for key in ("lr", "beta1", "beta2", "eps", "clip_norm")},
        "attention": setting.attention,
        "settings": setting.settings,
        "folder": str(folder / "trl_out"),
    }


# ---- figures -------------------------------------------------------------------------------------------------------


def expected_ratio(shape: Shape, learnt: float, theirs: int = 4, ours: int = 3) -> float:
    """Of the products of a step: three of every layer, some of the head for the share ``learnt`` of the tokens."""
    layers, head = shape.weights()
    return (3 * layers + theirs * learnt * head) / (3 * layers + ours * learnt * head)


def with_tokens(steps: list[dict[str, float]], lengths: Sequence[int], batch: int) -> list[dict[str, float]]:
    """``steps`` with the real tokens learnt from up to each, ``batch`` conversations of ``lengths`` a step."""
    ends = range(batch, batch * len(steps) + 1, batch)
    return [step | {"all_tokens": float(sum(lengths[:end]))} for step, end in zip(steps, ends, strict=True)]


def rates(steps: Sequence[dict[str, float]], warm: int) -> dict[str, float]:
    """Real tokens a second after the first ``warm`` steps, of the wall and of the processor (all cores as one)."""
    if len(steps) <= warm:
        raise SystemExit(f"only {len(steps)} steps ran; more than {warm} are needed")
    first, last = steps[warm - 1], steps[-1]
    tokens = last["all_tokens"] - first["all_tokens"]
    return {
        "tokens_per_s": tokens / (last["time_s"] - first["time_s"]),
        "tokens_per_cpu_s": tokens / (last["cpu_s"] - first["cpu_s"]),
    }


def figures_of(leg: dict[str, Any], warm: int) -> dict[str, Any]:
    return {
        **rates(leg["steps"], warm),
        "peak_bytes": leg["peak_bytes"],
        "above_loaded_bytes": leg["peak_bytes"] - leg["loaded_bytes"],
        "losses": [step["loss"] for step in leg["steps"]],
        "wall_s": leg["wall_s"],
    }


def worst_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Largest relative difference of two runs' losses, step by step."""
    return max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True))


def compare(plan: Plan, ours: dict[str, Any], trl: dict[str, Any], same: dict[str, bool]) -> list[Claim]:
    """The best of ``ours`` against the best of ``trl`` by name: figures as :func:`figures_of` makes them.

    ``same`` says of each TRL setting that could be compared whether it learns the tokens that ours learns.
    """
    by = "tokens_per_s" if plan.gpu else "tokens_per_cpu_s"
    best, peer = (max(legs.values(), key=lambda leg: leg[by]) for legs in (ours, trl))

    def ratio(key: str) -> float:
        return best[key] / peer[key]

    claims = [at_least("tokens per second, over TRL", ratio("tokens_per_s"), TARGET)]
    if not plan.gpu:
        claims.insert(0, at_least("tokens per second of the processor, over TRL", ratio(by), TARGET))
        claims.append(at_most("peak memory above loading, over TRL", ratio("above_loaded_bytes"), 1.0))
    claims.append(at_most("peak memory, over TRL", ratio("peak_bytes"), 1.0))
    in_step = [setting.name for setting in plan.trl if setting.same_batches and setting.name in trl]
    difference = max(worst_difference(trl[name]["losses"], best["losses"]) for name in in_step)
    claims.append(at_most("worst relative difference of a step's loss", difference, 1e-2 if plan.gpu else 1e-4))
    claims.append(at_least("share of TRL's settings that learn the same tokens", statistics.mean(same.values()), 1.0))
    return claims


# ---- legs ----------------------------------------------------------------------------------------------------------


def run(plan: Plan, folder: Path) -> tuple[dict[str, Any], list[Claim]]:
    model, data, ordered = folder / "model", folder / "talks.jsonl", folder / "ordered.jsonl"
    figures: dict[str, Any] = {"threads": THREADS, "shape": dataclasses.asdict(plan.shape)}
    if plan.gpu:
        figures["weights"] = write_smollm2(model)
    else:
        write_model(model, plan.shape)
        figures["weights"] = "random"
    write_jsonl(draw(plan.steps * plan.batch), data)
    cfg = our_config(plan, model, data, {})
    examples, conversations = in_order(cfg, folder / "order")
    write_jsonl([example.messages or [] for example in examples], ordered)
    lengths = [len(conversation) for conversation in conversations]
    learnt = sum(int(conversation.learnt.sum()) for conversation in conversations) / sum(lengths)
    wanted = digest((c.ids.tolist(), c.learnt.tolist()) for c in conversations)
    figures |= {"conversations": len(lengths), "tokens": sum(lengths), "longest": max(lengths), "learnt": learnt}
    figures["expected_from_products"] = expected_ratio(plan.shape, learnt)
    print(f"{figures['weights']} weights, {len(lengths)} conversations, {sum(lengths)} tokens, {learnt:.2f} learnt")
    ours, trl, same, errors = {}, {}, {}, {}
    for number, (name, overrides) in enumerate(plan.ours.items()):
        config = to_dict(our_config(plan, model, data, overrides))
        job = {"config": config, "run_dir": str(folder / f"run{number}"), "gpu": plan.gpu}
        leg = run_job(sys.executable, "sft_run", job, folder, f"ours{number}")
        if "error" in leg:
            raise SystemExit(f"{name}: {leg['error']}")
        leg["steps"] = with_tokens(leg["steps"], lengths, plan.batch)
        ours[name] = figures_of(leg, plan.warm) | {"padding_share": leg["steps"][-1]["padding_share"]}
        show(name, ours[name])
    python = trl_python()
    for number, setting in enumerate(plan.trl):
        job = trl_job(plan, cfg, ordered, setting, folder)
        leg = run_job(python, "sft_trl_run", job, folder, f"trl{number}")
        if "error" in leg:
            errors[setting.name] = leg["error"]
            print(f"  TRL {setting.name}: {leg['error'].splitlines()[-1]}", flush=True)
            continue
        figures["trl_versions"] = leg["versions"]
        trl[setting.name] = figures_of(leg, plan.warm) | {"settings": setting.settings, "attention": setting.attention}
        if leg["digest"] is not None:
            same[setting.name] = leg["digest"] == wanted
        show(f"TRL {setting.name}", trl[setting.name])
    if not trl:
        raise SystemExit("TRL ran with none of its settings")
    figures |= {"ours": ours, "trl": trl, "trl_errors": errors, "same_tokens": same}
    return figures, compare(plan, ours, trl, same)


def show(name: str, leg: dict[str, Any]) -> None:
    print(
        f"  {name:28s} {leg['tokens_per_s']:9.0f} tokens/s {leg['tokens_per_cpu_s']:8.1f} a CPU second "
        f"{leg['peak_bytes'] / 2**20:8.0f} MiB ({leg['above_loaded_bytes'] / 2**20:.0f} above loading)  "
        f"loss {leg['losses'][0]:.5f} .. {leg['losses'][-1]:.5f}",
        flush=True,
    )


def main() -> int:
    """Command line; 1 if a claim is not met."""
    options = arguments(__doc__.splitlines()[0])
    plan = (gpu_plan if has_nvidia_driver() else cpu_plan)(options.quick)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS] if not plan.gpu else os.sched_getaffinity(0))
    print(json.dumps({s.name: {"attention": s.attention, **s.settings} for s in plan.trl}))
    with tempfile.TemporaryDirectory(prefix="sft_vs_trl-") as name:
        figures, claims = run(plan, Path(name))
    return report("sft_vs_trl", figures, claims, json_file=options.json, packages=("torch", "transformers", "trl"))


if __name__ == "__main__":
    sys.exit(main())
