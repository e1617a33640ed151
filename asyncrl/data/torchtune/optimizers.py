"""``optimizer``, ``lr_scheduler``, ``loss`` and clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

from asyncrl.data.torchtune.leaves import Reading, RecipeError, component, plain
from asyncrl.data.torchtune.recipes import Launch


@dataclass(frozen=True)
class Known:
    """``ours``: optim.name. Defaults are those of the class. ``lost``: what it does that is not done here."""

    ours: str
    weight_decay: float = 0.01
    lost: str = ""


_STATE = "no optimizer state of 8 bits or fewer: trainer.master_dtype=bfloat16 holds 2 bytes a value"
_PAGED = "; trainer.cpu_offload=true holds it in host memory"
OPTIMIZERS = {
    "torch.optim.AdamW": Known("adamw"),
    "torch.optim.Adam": Known("adamw", 0.0),
    "torch.optim.SGD": Known("sgd", 0.0),
    "bitsandbytes.optim.AdamW": Known("adamw"),
    "bitsandbytes.optim.PagedAdamW": Known("adamw", lost="state is not paged: trainer.cpu_offload=true holds it in "
                                           "host memory, optim.in_backward=true frees the gradients"),
    "bitsandbytes.optim.AdamW8bit": Known("adamw", lost=_STATE),
    "bitsandbytes.optim.PagedAdamW8bit": Known("adamw", lost=_STATE + _PAGED),
    "torchao.optim.AdamW8bit": Known("adamw", lost=_STATE),
    "torchao.optim.AdamW4bit": Known("adamw", lost=_STATE),
    "torchao.optim.AdamWFp8": Known("adamw", lost=_STATE),
}  # fmt: skip
_OTHER = Known("adamw", lost="the others are sgd and muon")
_SPEED = ("fused", "foreach", "capturable", "is_paged", "percentile_clipping", "block_wise", "optim_bits")
LOSSES = {"CEWithChunkedOutputLoss", "LinearCrossEntropyLoss", "CrossEntropyLoss"}


def read_optimizer(reading: Reading) -> None:
    """Fills ``optim``: torch's defaults are other ones than those here, so all of them are written out."""
    name = str(reading.get("optimizer._component_", "torch.optim.AdamW"))
    known = OPTIMIZERS.get(name.replace("torchao.prototype.low_bit_optim", "torchao.optim"), _OTHER)
    if known.lost:
        reading.keys["optim.name"] = known.ours
        reading.without("optimizer._component_", f"optim.name={known.ours}: {known.lost}")
    else:
        reading.translate("optimizer._component_", {"optim.name": known.ours})
    if "optimizer.lr" in reading.leaves:
        reading.translate("optimizer.lr", {"optim.lr": reading.number("optimizer.lr", 0.0)})
    decay = reading.number("optimizer.weight_decay", known.weight_decay)
    if name == "torch.optim.Adam" and decay:
        reading.keys["optim.weight_decay"] = 0.0
        reading.without("optimizer.weight_decay", "Adam adds decay to the gradient (L2); optim.weight_decay is AdamW's")
    else:
        why = "of matrices; norms and biases have none"
        reading.translate("optimizer.weight_decay", {"optim.weight_decay": decay}, why)
    if known.ours == "adamw":
        _adam(reading)
    else:
        reading.translate("optimizer.momentum", {"optim.momentum": reading.number("optimizer.momentum", 0.0)})
    for leaf in reading.below("optimizer"):
        key, value = leaf.removeprefix("optimizer."), reading.leaves[leaf]
        if key in _SPEED:
            reading.meaningless(leaf, "how it is computed is chosen here")
        elif not value:
            reading.meaningless(leaf, "off, as it is here")
    _schedule(reading)
    _clipping(reading)


def _adam(reading: Reading) -> None:
    betas = reading.get("optimizer.betas", [0.9, 0.999])
    if not isinstance(betas, list) or len(betas) != 2 or not all(isinstance(beta, float | int) for beta in betas):
        raise RecipeError(f"optimizer.betas is {plain(betas)}\n    -> two numbers")
    reading.translate("optimizer.betas", {"optim.beta1": float(betas[0]), "optim.beta2": float(betas[1])})
    reading.translate("optimizer.eps", {"optim.eps": reading.number("optimizer.eps", 1e-8)})


def _schedule(reading: Reading) -> None:
    kind = component(reading.get("lr_scheduler"))
    if not kind:
        reading.translate("lr_scheduler", {"optim.schedule": "constant", "optim.warmup_steps": 0})
        return
    if kind != "get_cosine_schedule_with_warmup":
        reading.without(
            "lr_scheduler._component_", "optim.schedule knows constant, linear and cosine; cosine is written"
        )
        reading.keys |= {"optim.schedule": "cosine", "optim.final_lr_share": 0.0}
    else:
        reading.translate(
            "lr_scheduler._component_", {"optim.schedule": "cosine", "optim.final_lr_share": 0.0}, "over trainer.steps"
        )
    warmup = reading.number("lr_scheduler.num_warmup_steps", 0)
    reading.translate(
        "lr_scheduler.num_warmup_steps", {"optim.warmup_steps": warmup}, "one step ahead: the first is lr/n, there 0"
    )
    if reading.get("lr_scheduler.num_cycles", 0.5) == 0.5:
        reading.meaningless("lr_scheduler.num_cycles", "half a cosine here too")
    else:
        reading.without("lr_scheduler.num_cycles", "the schedule is half a cosine")


def _clipping(reading: Reading) -> None:
    norm = reading.number("clip_grad_norm", math.inf)
    reading.translate("clip_grad_norm", {"optim.clip_norm": norm}, "never clipped" if norm == math.inf else "")


def read_loss(reading: Reading, launch: Launch) -> None:
    """Fills ``sft.loss`` and ``dpo``."""
    kind = component(reading.get("loss"))
    if launch.preference:
        _preference(reading, kind)
    elif kind in LOSSES:
        reading.meaningless("loss._component_", "the head computes loss and gradient in chunks, whatever the loss")
    else:
        reading.without("loss._component_", "sft.loss knows likelihood and dpo")
    for name in ("num_output_chunks", "tiled"):
        reading.meaningless(f"loss.{name}", "trainer.loss_chunk_bytes bounds a chunk of logits")
    reading.meaningless("loss.ignore_index", "which tokens are learnt is a mask, not a label")
    reading.meaningless("loss.mask_ignored_tokens", "tokens that are not learnt never reach the head")


_PREFERENCES = {"DPOLoss": ("sigmoid", "beta"), "RSOLoss": ("hinge", "gamma")}


def _preference(reading: Reading, kind: str) -> None:
    reading.keys["sft.loss"] = "dpo"
    if kind not in _PREFERENCES:
        reading.without("loss._component_", "dpo.loss knows sigmoid (DPO), ipo and hinge (RSO)")
        return
    ours, leaf = _PREFERENCES[kind]
    reading.translate("loss._component_", {"dpo.loss": ours}, "sft.loss=dpo")
    reading.translate(f"loss.{leaf}", {"dpo.beta": reading.number(f"loss.{leaf}", 0.1)})
    if "loss.label_smoothing" in reading.leaves:
        reading.translate("loss.label_smoothing", {"dpo.label_smoothing": reading.number("loss.label_smoothing", 0.0)})
    where, start = (reading.get(f"{name}.checkpoint_dir") for name in ("ref_checkpointer", "checkpointer"))
    for leaf in reading.below("ref_checkpointer"):
        if str(where).rstrip("/") == str(start).rstrip("/"):
            reading.meaningless(leaf, "the reference is the model that the run starts from, as it is there")
        else:
            reading.without(leaf, "the reference is the model that the run starts from; no other one is loaded")
