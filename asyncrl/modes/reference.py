"""Synchronous GRPO in one process, read from top to bottom: the oracle that tests hold the real trainer against.

It shares no attention, packing, log-prob head, loss, schedule or clipping with ``asyncrl.training``: prompts are
padded, the model is called as transformers ships it, all logits exist, and each formula stands where it is used.
Slow and simple on purpose.

    generate -> score -> advantages -> one optimizer step -> repeat          (staleness 0: weights = behaviour policy)

:func:`train` runs that loop. :func:`replay` takes batches that were recorded elsewhere and returns the weights after
one step on each: fed the batches of an asynchronous run it must end at that run's weights.

    torchrun launch/train.py +experiment=grpo run.dry=true run.dir=DIR      # writes DIR/config.json
    python -m asyncrl.modes.reference DIR                                   # trains it here, one JSON line a step
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.config.schema import Config
from asyncrl.envs import load_env
from asyncrl.envs.types import Unreadable
from asyncrl.rollouts.types import Prompt, TrainSample
from asyncrl.training.exact import exact

ROWS = 64  # samples a forward pass; only memory depends on it


def train(
    cfg: Config,
    prompts: Iterator[Prompt],
    score: Callable[[Prompt, str], float],
    report: Callable[[dict[str, Any]], None] = print,
) -> tuple[dict[str, Tensor], list[list[TrainSample]]]:
    """``cfg.trainer.steps`` steps of synchronous GRPO. Returns the weights and every batch that was trained.

    ``prompts`` yields items for ever; ``score`` maps an item and the decoded completion to a reward.
    """
    lm, tokenizer, optimizer = load(cfg)
    batches = []
    for step in range(cfg.trainer.steps):
        torch.manual_seed(cfg.seed * 1_000_003 + step)
        batch: list[TrainSample] = []
        rewards: list[float] = []
        filtered = 0
        while len(batch) < cfg.batch.samples:
            if filtered > cfg.algorithm.max_filtered_groups:
                raise RuntimeError(f"{filtered} groups in a row had equal rewards: nothing to learn from")
            missing = cfg.batch.groups - len(batch) // cfg.batch.group_size
            for group in generate(lm, [next(prompts) for _ in range(missing)], step, cfg):
                r = [score(group[0], tokenizer.decode(s.token_ids, skip_special_tokens=True)) for s in group[1]]
                rewards += r
                if cfg.algorithm.filter_equal_rewards and max(r) - min(r) < 1e-9:
                    filtered += 1
                    continue
                for sample, reward in zip(group[1], r, strict=True):
                    advantage = reward - sum(r) / len(r)
                    if cfg.algorithm.advantage == "group_norm":
                        advantage /= float(np.std(r)) + cfg.algorithm.advantage_eps
                    sample.advantages[:] = advantage
                    sample.ordinal = len(batch) // cfg.batch.group_size
                    batch.append(sample)
        measured = update(lm, optimizer, batch, step, cfg)
        batches.append(batch)
        report({"step": step + 1, "reward": float(np.mean(rewards)), "filtered": filtered, **measured})
    return weights(lm), batches


def replay(model_path: str | Path, batches: Sequence[Sequence[TrainSample]], cfg: Config) -> dict[str, Tensor]:
    """One step on each recorded batch, starting from ``model_path``. Returns the weights by Hugging Face name."""
    lm, _, optimizer = load(cfg, model_path)
    for step, batch in enumerate(batches):
        update(lm, optimizer, batch, step, cfg)
    return weights(lm)


def load(cfg: Config, path: str | Path | None = None) -> tuple[Any, Any, torch.optim.AdamW]:
    """Model as transformers ships it, with eager attention, its tokenizer, and a plain AdamW."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = str(path or cfg.model.path)
    dtype = getattr(torch, cfg.trainer.master_dtype)
    lm = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", local_files_only=True
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    matrices = [p for p in lm.parameters() if p.ndim >= 2]
    vectors = [p for p in lm.parameters() if p.ndim < 2]  # norms and biases: no weight decay
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": cfg.optim.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        betas=(cfg.optim.beta1, cfg.optim.beta2),
        eps=cfg.optim.eps,
        foreach=False,
    )
    return lm, tokenizer, optimizer


def weights(lm: Any) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in lm.named_parameters()}


@torch.no_grad()
def generate(lm: Any, prompts: list[Prompt], version: int, cfg: Config) -> list[tuple[Prompt, list[TrainSample]]]:
    """``cfg.batch.group_size`` completions of each prompt by transformers, with the log-probs they were drawn with."""
    device, n = lm.device, cfg.batch.group_size
    pad = lm.config.pad_token_id or 0
    longest = max(len(p.token_ids) for p in prompts)
    ids = torch.full((len(prompts), longest), pad, dtype=torch.int64)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):  # padding on the left: every row generates at its right end
        ids[row, longest - len(prompt.token_ids) :] = torch.as_tensor(prompt.token_ids)
        real[row, longest - len(prompt.token_ids) :] = 1
    with exact(lm.dtype):
        out = lm.generate(
            input_ids=ids.repeat_interleave(n, 0).to(device),
            attention_mask=real.repeat_interleave(n, 0).to(device),
            do_sample=True,
            temperature=cfg.sampling.temperature,
            top_k=0,
            top_p=1.0,
            max_new_tokens=cfg.sampling.max_tokens,
            pad_token_id=pad,
            return_dict_in_generate=True,
            output_scores=True,
        )
    drawn = out.sequences[:, longest:]
    logp = torch.stack([s.log_softmax(-1) for s in out.scores], 1).gather(2, drawn[..., None])[..., 0]
    ends = lm.generation_config.eos_token_id
    ends = set(ends if isinstance(ends, list) else [ends])
    samples = []
    for i, row in enumerate(drawn.tolist()):
        length = next((t + 1 for t, token in enumerate(row) if token in ends), len(row))
        samples.append(
            TrainSample(
                prompt_ids=prompts[i // n].token_ids,
                token_ids=np.asarray(row[:length], dtype=np.int32),
                logprobs=logp[i, :length].float().cpu().numpy(),
                versions=np.full(length, version, dtype=np.int32),
                advantages=np.zeros(length, dtype=np.float32),
                index=i % n,
            )
        )
    return [(prompt, samples[g * n : (g + 1) * n]) for g, prompt in enumerate(prompts)]


def update(lm: Any, optimizer: torch.optim.AdamW, batch: Sequence[TrainSample], step: int, cfg: Config) -> dict:
    """One optimizer step on ``batch``; returns loss, gradient norm and the ratio's mean."""
    algorithm = cfg.algorithm
    tokens = sum(len(s.token_ids) for s in batch)
    loss, ratio_sum = 0.0, 0.0
    for start in range(0, len(batch), ROWS):
        rows = batch[start : start + ROWS]
        with exact(lm.dtype):
            logp, behaviour, advantage, trained = score_rows(lm, rows, cfg.sampling.temperature)
            ratio = torch.exp(logp - behaviour)
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high)
            objective = torch.where(trained, torch.minimum(ratio * advantage, clipped * advantage), 0.0)
            if algorithm.aggregation == "token_mean":
                part = -objective.sum() / tokens
            else:  # sequence_mean: each sample's mean over its tokens, then the mean over samples
                part = -(objective.sum(1) / trained.sum(1)).sum() / len(batch)
            part.backward()
        loss += part.item()
        ratio_sum += torch.where(trained, ratio, 0.0).sum().item()
    for group in optimizer.param_groups:
        group["lr"] = rate(step, cfg)
    clip = cfg.optim.clip_norm if cfg.optim.clip_norm > 0 else math.inf
    norm = float(torch.nn.utils.clip_grad_norm_(lm.parameters(), clip))
    if math.isfinite(loss) and math.isfinite(norm):
        optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "grad_norm": norm, "ratio": ratio_sum / tokens}


def score_rows(lm: Any, rows: Sequence[TrainSample], temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-prob, behaviour log-prob, advantage and "is trained", each (rows, longest - 1), of padded rows."""
    longest = max(len(s) for s in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.int64)
    real = torch.zeros_like(ids)
    trained = torch.zeros(len(rows), longest - 1, dtype=torch.bool)
    behaviour = torch.zeros(len(rows), longest - 1, dtype=lm.dtype)
    advantage = torch.zeros(len(rows), longest - 1, dtype=lm.dtype)
    for i, s in enumerate(rows):
        ids[i, : len(s)] = torch.as_tensor(np.concatenate([s.prompt_ids, s.token_ids]))
        real[i, : len(s)] = 1
        predicted = slice(len(s.prompt_ids) - 1, len(s) - 1)  # position t predicts token t + 1
        trained[i, predicted] = True
        behaviour[i, predicted] = torch.as_tensor(s.logprobs).to(lm.dtype)
        advantage[i, predicted] = torch.as_tensor(s.advantages).to(lm.dtype)
    device = lm.device
    logits = lm(input_ids=ids.to(device), attention_mask=real.to(device), use_cache=False).logits
    logp_all = torch.log_softmax(logits[:, :-1] / temperature, dim=-1)
    logp = logp_all.gather(2, ids[:, 1:, None].to(device))[..., 0]
    return logp, behaviour.to(device), advantage.to(device), trained.to(device)


def rate(step: int, cfg: Config) -> float:
    """Learning rate of 0-based ``step``."""
    o = cfg.optim
    if step < o.warmup_steps:
        return o.lr * (step + 1) / o.warmup_steps
    if o.schedule == "constant":
        return o.lr
    done = (step - o.warmup_steps + 1) / max(1, cfg.trainer.steps - o.warmup_steps)
    left = 1 - min(1, done) if o.schedule == "linear" else (1 + math.cos(math.pi * min(1, done))) / 2
    return o.lr * (o.final_lr_share + (1 - o.final_lr_share) * left)


def main() -> None:
    """Trains the configuration of a run folder and prints a JSON line a step."""
    from asyncrl.actors.prompting import PromptSource
    from asyncrl.config.files import load_config

    parser = argparse.ArgumentParser(description="Synchronous single-process GRPO on the configuration of a run.")
    parser.add_argument("run", type=Path, help="a run folder, or its config.json")
    cfg = load_config(parser.parse_args().run)
    torch.set_num_threads(cfg.trainer.threads)
    source = PromptSource(cfg, load(cfg)[1])
    scorer = load_env(cfg.env, "train")
    started = time.monotonic()

    def prompts() -> Iterator[Prompt]:
        while True:
            yield source.next()[0]

    def line(values: dict[str, Any]) -> None:
        print(json.dumps({**values, "seconds": round(time.monotonic() - started, 2)}), flush=True)

    def score(prompt: Prompt, text: str) -> float:
        try:
            return scorer.score(text, prompt.entry)
        except Unreadable:
            return 0.0

    train(cfg, prompts(), score, line)


if __name__ == "__main__":
    main()
