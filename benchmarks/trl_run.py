"""TRL's GRPOTrainer on one JSON job; runs in the benchmark's own environment and writes one JSON result.

    .venv-trl/bin/python -m benchmarks.trl_run job.json result.json

It imports nothing of asyncrl. The job's keys are those of ``grpo_vs_trl.py``; time starts when ``train`` starts, so
neither imports nor model loading count.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
os.environ["OMP_NUM_THREADS"] = str(job["threads"])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import reasoning_gym  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


class Steps(TrainerCallback):
    """When each optimizer step ended, and TRL's own log of it."""

    def __init__(self) -> None:
        self.began = self.began_cpu = 0.0
        self.rows: list[dict[str, float]] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began = time.perf_counter()
        self.began_cpu = time.process_time()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        now, cpu = time.perf_counter() - self.began, time.process_time() - self.began_cpu
        self.rows.append({"step": state.global_step, "time_s": now, "cpu_s": cpu})
        if self.rows[-1]["time_s"] > job["limit_s"]:
            control.should_training_stop = True
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "reward" in logs and self.rows:
            self.rows[-1] |= {
                "reward": logs["reward"],
                "length_mean": logs["completions/mean_length"],
                "grad_norm": logs.get("grad_norm", float("nan")),
            }


def settings() -> GRPOConfig:
    """TRL's settings for the job.

    ``tuned`` switches off what TRL's defaults cost a small model on a CPU: bfloat16 autocast, gradient checkpointing
    and micro-batches of 8. Without it they stay, and the batch is cut by gradient accumulation.
    """
    samples = job["groups"] * job["group_size"]
    tuned = {"bf16": False, "gradient_checkpointing": False, "per_device_train_batch_size": samples}
    default = {"gradient_accumulation_steps": samples // 8}
    generation: dict[str, dict[str, Any]] = {
        "dynamic": {},
        "static": {"cache_implementation": "static"},
        "continuous": {"use_transformers_continuous_batching": True},
    }
    return GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        shuffle_dataset=False,  # the job's order is ours
        seed=job["seed"],
        max_steps=job["steps"],
        num_generations=job["group_size"],
        max_completion_length=job["max_tokens"],
        temperature=job["temperature"],
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        loss_type="dapo",  # token mean over the global batch
        scale_rewards="group",
        learning_rate=job["lr"],
        adam_beta1=job["beta1"],
        adam_beta2=job["beta2"],
        adam_epsilon=job["eps"],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["clip_norm"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup_steps"],
        **(tuned if job["tuned"] else default),
        **generation[job["generation"]],
    )


def dataset(tokenizer: Any) -> Dataset:
    """The job's prompts in its order; checks that this tokenizer makes of the first what ours made."""
    rows = job["prompts"]
    messages = [{"role": "user", "content": rows[0]["question"]}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    if list(ids) != rows[0]["token_ids"]:
        raise SystemExit(f"the prompts differ: {ids} here, {rows[0]['token_ids']} in the job")
    return Dataset.from_list(
        [{"prompt": [{"role": "user", "content": row["question"]}], "index": row["index"]} for row in rows]
    )


def main() -> None:
    torch.set_num_threads(job["threads"])
    source = reasoning_gym.create_dataset(job["task"], seed=job["train_seed"], size=job["size"], **job["task_config"])

    def score(completions: list[Any], index: list[int], **_: Any) -> list[float]:
        texts = [completion[0]["content"].strip() for completion in completions]
        return [source.score_answer(text, source[i]) for text, i in zip(texts, index, strict=True)]

    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    steps = Steps()
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32),
        processing_class=tokenizer,
        reward_funcs=score,
        args=settings(),
        train_dataset=dataset(tokenizer),
        callbacks=[steps],
    )
    trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    Path(sys.argv[2]).write_text(json.dumps({"steps": steps.rows, "versions": versions}, indent=1))


if __name__ == "__main__":
    main()
