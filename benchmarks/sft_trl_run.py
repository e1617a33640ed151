"""TRL's SFTTrainer on one JSON job; runs in the benchmark's own environment and writes one JSON result.

    .venv-trl/bin/python -m benchmarks.sft_trl_run job.json result.json

It imports nothing of asyncrl. The job's keys are those of ``sft_vs_trl.py``. TRL renders and tokenises conversations by
itself, before training begins; time and memory count from then on.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

job: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
os.environ["OMP_NUM_THREADS"] = str(job["threads"])
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # seconds of the processor are then seconds of work
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402
from datasets import Dataset, disable_caching  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

from benchmarks.meter import Meter, digest  # noqa: E402

disable_caching()


class Steps(TrainerCallback):
    """Times each optimizer step; TRL's own log of it gives loss and real tokens."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        if logs and "loss" in logs:
            self.meter.add(loss=logs["loss"], grad_norm=logs["grad_norm"], all_tokens=logs["num_tokens"])


def settings() -> SFTConfig:
    """TRL's settings for the job, with everything off that costs time or memory and was not asked for."""
    return SFTConfig(
        output_dir=job["folder"],
        use_cpu=not job["gpu"],
        bf16=job["gpu"],
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        assistant_only_loss=True,
        seed=job["seed"],
        max_steps=job["steps"],
        max_length=job["max_length"],
        learning_rate=job["lr"],
        adam_beta1=job["beta1"],
        adam_beta2=job["beta2"],
        adam_epsilon=job["eps"],
        weight_decay=0.0,
        max_grad_norm=job["clip_norm"],
        lr_scheduler_type="constant",
        **job["settings"],
    )


def learnt(rows: Dataset) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokens of each conversation, and which are learnt; nothing predicts the first."""
    for row in rows:
        yield list(row["input_ids"]), [place > 0 and label != -100 for place, label in enumerate(row["labels"])]


def main() -> None:
    torch.set_num_threads(job["threads"])
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    meter = Meter(job["gpu"])
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(
            job["model"], dtype=torch.float32, attn_implementation=job["attention"]
        ),
        processing_class=AutoTokenizer.from_pretrained(job["model"]),
        args=settings(),
        train_dataset=Dataset.from_list(rows),
        callbacks=[Steps(meter)],
    )
    packed = job["settings"].get("packing", False)
    found = None if packed else digest(learnt(trainer.train_dataset))  # packed rows are in another order
    trainer.train()
    versions = {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__}
    result = {**meter.result(), "digest": found, "rows": len(trainer.train_dataset), "versions": versions}
    Path(sys.argv[2]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
