"""Jobs that differ in everything that may differ, alone and in a pack."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from asyncrl.config.schema import Config
from asyncrl.data.tokens import Conversation
from asyncrl.lora.pack import PackTrainer
from asyncrl.lora.slot import Slot
from asyncrl.training.mesh import open_mesh
from asyncrl.training.metrics import StepReport
from asyncrl.training.model import load_policy
from asyncrl.training.sft import SftTrainer
from tests.training.tiny import VOCAB, tiny_run

JOBS: dict[str, dict] = {
    "plain": {"lora": {"rank": 4, "alpha": 6.0}, "optim": {"lr": 1e-2}, "trainer": {"steps": 5}},
    "dropped": {
        "lora": {"rank": 3, "alpha": 5.0, "dropout": 0.3, "targets": ["q_proj", "v_proj", "mlp.down_proj"]},
        "optim": {"lr": 3e-2, "schedule": "cosine", "warmup_steps": 2, "weight_decay": 0.1, "clip_norm": 0.05},
        "trainer": {"steps": 7, "token_budget": 24},  # several micro-batches a step
        "seed": 3,
    },
    "rs": {
        "lora": {"rank": 8, "alpha": 2.0, "rslora": True, "dropout": 0.1},
        "optim": {"lr": 5e-3, "schedule": "linear", "beta1": 0.8, "beta2": 0.99, "eps": 1e-6, "clip_norm": 0.5},
        "trainer": {"steps": 3},
        "seed": 11,
    },
}
SIZES = {"plain": 5, "dropped": 9, "rs": 2}


def job(path: str, kind: str, dtype: str = "float64", **sections: dict) -> Config:
    given = {key: dict(values) for key, values in JOBS[kind].items() if key != "seed"}
    for section, values in sections.items():
        given[section] = given.get(section, {}) | values
    cfg = tiny_run(path, dtype, **{"optim": {"warmup_steps": 0}} | given)
    cfg.optim.warmup_steps = given["optim"].get("warmup_steps", 0)
    cfg.mode, cfg.seed = "sft", JOBS[kind].get("seed", 0)
    return cfg


def batch(kind: str, step: int) -> list[Conversation]:
    rng = np.random.default_rng([step, len(kind)])
    found = []
    for _ in range(SIZES[kind]):
        n = int(rng.integers(3, 17))
        learnt = rng.random(n) < 0.5
        learnt[0], learnt[-1] = False, True
        found.append(Conversation(rng.integers(2, VOCAB, n).astype(np.int32), learnt))
    return found


def alone(cfg: Config) -> SftTrainer:
    """The job as mode=sft trains it."""
    torch.set_num_threads(1)
    return SftTrainer(cfg, load_policy(cfg.model.path, getattr(torch, cfg.model.compute_dtype)), open_mesh(0, 1))


def packed(cfgs: Mapping[str, Config]) -> tuple[PackTrainer, dict[str, Slot]]:
    pack = PackTrainer(next(iter(cfgs.values())))
    return pack, {kind: Slot(pack, cfg) for kind, cfg in cfgs.items()}


def learn(pack: PackTrainer, slots: Mapping[str, Slot]) -> dict[str, StepReport]:
    """A step of each slot on its next batch."""
    found = pack.learn({slot: batch(kind, slot.version) for kind, slot in slots.items()})
    return {kind: found[slot] for kind, slot in slots.items()}


def state(trainer: SftTrainer) -> dict[str, torch.Tensor]:
    """Weights and moments by name."""
    out = {}
    for name, p in trainer.named_parameters_hf():
        out[name] = p.detach().clone()
        for kind, value in trainer.optimizer.state.get(p, {}).items():
            out[f"{kind}/{name}"] = value.detach().clone().double()
    return out


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of any tensor."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - wanted[n]).norm() / wanted[n].norm().clamp_min(1e-12)) for n in wanted)


def same(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Bit for bit, NaN included."""
    pairs = [(a[n].reshape(-1).view(torch.uint8), b[n].reshape(-1).view(torch.uint8)) for n in a]
    return a.keys() == b.keys() and all(torch.equal(x, y) for x, y in pairs)


def steps_of(trainer: SftTrainer, kind: str, count: int) -> Sequence[StepReport]:
    return [trainer.learn(batch(kind, trainer.version)) for _ in range(count)]
