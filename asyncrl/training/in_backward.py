"""An ordinary optimizer that steps in the backward pass: one fused update of a unit when its gradients are complete.

A unit is what FSDP2 reduces together; in a plain model a decoder layer, or one parameter outside of the layers. Hooks
count the unit's gradients down (FSDP2 runs post-accumulate hooks on its sharded parameters after the reduction, on its
reduction stream). The last one makes one update on the local shards, without DTensor dispatch, and frees the gradients.
So the gradients of one unit live at a time, not those of the model.

    optimizer.arm()          # the next backward steps: nothing changes weights before this call
    loss.backward()
    optimizer.step()         # the units that some parameter gave no gradient; facts in `optimizer.taken`

Without ``arm`` gradients are kept and ``step`` updates all units: the ordinary loop with the same arithmetic. After
``discard`` the next backwards' gradients are thrown away. ``param_groups``, ``state`` and ``state_dict`` are those of
the ordinary optimizer; learning rates are read when a unit steps.

With several ranks each unit's square norm is added over the ranks before the unit steps (8 bytes, on the stream of the
reduction), so that all ranks cut or drop alike. That is safe because all ranks run their hooks in the same order, the
order of their identical graphs.

What can still go wrong: a gradient is known to be finite only when it is there. If it is not, its unit is dropped
(weights and state stay) while the units after it, and those before it in the backward pass, have stepped or will.
"""

from __future__ import annotations

import enum
import functools
import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from asyncrl.config.schema import OptimConfig
from asyncrl.training.clipping import DelayedClip
from asyncrl.training.errors import ModelError
from asyncrl.training.mesh import Mesh
from asyncrl.training.model import Policy, layers
from asyncrl.training.optim import local_square_norm, parameter_groups, replicas
from asyncrl.training.rules import AdamWRule, MomentumRule, MuonRule, Rule, Slot, local_shard


@dataclass
class Taken:
    """What a step did. ``norm``: of the unscaled gradient before any cut (folded portions: the sum of their norms)."""

    norm: float = 0.0
    dropped: list[str] = field(default_factory=list)  # units whose gradient was not finite: they stayed as they were
    guarded: int = 0  # units that were cut
    moved: bool = False  # a weight changed
    folded: bool = False  # gradients are in the state


@dataclass(eq=False)
class Unit:
    """``arrived`` holds the parameters whose gradient of the current backward is there."""

    name: str
    parameters: list[nn.Parameter]
    arrived: set[int] = field(default_factory=set)
    done: bool = False  # has stepped in this step
    folded: int = 0
    stepped: list[nn.Parameter] = field(default_factory=list)  # whose counter goes up unless the step is dropped
    squares: list[Tensor] = field(default_factory=list)
    factors: list[Tensor] = field(default_factory=list)


class Phase(enum.Enum):
    KEEP = "gradients stay, or are folded into the state"
    STEP = "a complete unit steps"
    DISCARD = "gradients are thrown away"


class UnitOptimizer(torch.optim.Optimizer):
    """``units`` name -> parameters, each in exactly one unit and one of ``groups``.

    ``fold``: gradients of every backward go into the state at once (:meth:`Rule.fold`). ``whole``: all ranks hold the
    same whole parameters; in the backward pass their gradients are added here, after it they have been added before.
    """

    def __init__(
        self,
        units: dict[str, list[nn.Parameter]],
        groups: list[dict[str, Any]],
        rule: Rule,
        clip: DelayedClip | None = None,
        *,
        in_backward: bool = True,
        fold: bool = False,
        ranks: int = 1,
        whole: bool = False,
    ) -> None:
        self.rule, self.clip, self.fold, self.in_backward = rule, clip, fold, in_backward
        self.ranks, self.whole = ranks, whole
        self._sums = whole and ranks > 1 and in_backward
        super().__init__(groups, dict(rule.defaults))
        self.units = [Unit(name, list(parameters)) for name, parameters in units.items()]
        self.taken = Taken()
        self._phase = Phase.KEEP
        self._scale = 1.0
        self._unit = {p: unit for unit in self.units for p in unit.parameters}
        self._number = {p: i for i, p in enumerate(p for g in self.param_groups for p in g["params"])}
        self._group = {p: g for g in self.param_groups for p in g["params"]}
        self._steps: dict[nn.Parameter, tuple[Tensor, int]] = {}
        if set(self._unit) != set(self._number):
            raise ValueError("units and parameter groups must hold the same parameters")
        if in_backward:
            on_gradient = weakref.WeakMethod(self._on_gradient)  # the garbage collector does not see these hooks
            for p in self._unit:
                p.register_post_accumulate_grad_hook(functools.partial(_call, on_gradient))

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # what load_state_dict ends with: the groups are other objects now
        self._group = {p: g for g in self.param_groups for p in g["params"]}

    @property
    def loss_scale(self) -> float:
        """What to multiply the loss by before its backward (delayed clipping)."""
        return self.clip.loss_scale if self.clip else 1.0

    def arm(self) -> None:
        """The next backward, of a loss multiplied by :attr:`loss_scale`, steps."""
        if not self.in_backward:
            raise RuntimeError("this optimizer steps after the backward pass: it has no hooks to arm")
        self._begin()
        self._phase = Phase.STEP

    def discard(self) -> None:
        """Gradients are measured and thrown away until :meth:`step`, which then changes nothing."""
        self._begin()
        self._phase = Phase.DISCARD

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Finishes the step: units that did not get all their gradients, then norms, averages and counters."""
        if closure is not None:
            raise ValueError("a closure would be a second backward pass")
        if self._phase is Phase.KEEP:
            self._begin()
            self._phase = Phase.STEP
        for unit in self.units:
            if not unit.done:
                self._complete(unit)
        self._close()

    def _begin(self) -> None:
        """Fixes the scale of this step and folds what an earlier backward left incomplete."""
        self._scale = self.loss_scale
        for unit in self.units:
            if self.fold and unit.arrived and self._phase is Phase.KEEP:
                self._complete(unit)
            unit.arrived.clear()

    @torch.no_grad()
    def _on_gradient(self, p: nn.Parameter) -> None:
        if self._phase is Phase.KEEP and not self.fold:
            return
        unit = self._unit[p]
        if unit.done or id(p) in unit.arrived:
            raise RuntimeError(
                f"{unit.name}: a parameter got a second gradient after the first had been used; "
                "one backward pass a step may be armed, and it may not run twice through the same graph"
            )
        self._scale = self.loss_scale
        unit.arrived.add(id(p))
        if len(unit.arrived) == len(unit.parameters):
            self._complete(unit)

    def _complete(self, unit: Unit) -> None:
        """Uses the gradients of ``unit`` that are there, and frees them."""
        stepping = self._phase is Phase.STEP
        unit.arrived.clear()
        unit.done = stepping
        slots = list(self._slots(unit))
        if slots:
            factor = self._factor(unit, slots)
            if self._phase is Phase.DISCARD:
                pass
            elif self.fold:
                self.rule.fold(slots, factor, first=unit.folded == 0)
                unit.folded += 1
            else:
                self.rule.apply(slots, factor)
                unit.stepped = [s.parameter for s in slots]
            self._free(slots)
        if self.fold and stepping and unit.folded:
            held = [self._slot(p, p) for p in unit.parameters if self.state.get(p)]
            self.rule.move(held, torch.ones((), device=held[0].weight.device))
            unit.stepped = [s.parameter for s in held]

    def _slots(self, unit: Unit) -> Iterator[Slot]:
        for p in unit.parameters:
            if p.grad is None and self._sums and self._phase is not Phase.DISCARD:
                p.grad = torch.zeros_like(p)  # another rank may have one
            if p.grad is not None:
                yield self._slot(p, p.grad)

    def _slot(self, p: nn.Parameter, grad: Tensor) -> Slot:
        state = self.state[p]
        if not state:
            self.rule.start(state, p)
        if isinstance(grad, DTensor) and isinstance(p, DTensor) and grad.placements != p.placements:
            grad = grad.redistribute(placements=p.placements)  # tensor parallelism leaves partial sums
        shard = local_shard(grad)
        if isinstance(shard, AsyncCollectiveTensor):
            shard = shard.wait()
        known = self._steps.get(p)
        if known is None or known[0] is not state["step"]:
            self._steps[p] = known = (state["step"], int(state["step"]))
        return Slot(p, local_shard(p), shard, state, self._group[p], self._number[p], known[1] + 1)

    def _factor(self, unit: Unit, slots: list[Slot]) -> Tensor:
        """What to multiply the gradients by: 1, less if the unit is cut, -1 if they are not finite anywhere."""
        grads = [s.grad for s in slots]
        if self._sums:
            flat = torch.cat([g.flatten() for g in grads])
            dist.all_reduce(flat)
            for grad, new in zip(grads, flat.split([g.numel() for g in grads]), strict=True):
                grad.copy_(new.view_as(grad))
        copies = [1 if self.whole else replicas(s.parameter, self.ranks) for s in slots]
        square = local_square_norm(grads, copies)
        if self.ranks > 1 and not self.whole:
            dist.all_reduce(square)
        norm = square.sqrt() / self._scale
        limit = self.clip.limit(unit.name) if self.clip else math.inf
        factor = (limit / norm).clamp(max=1.0)
        factor = torch.where(torch.isfinite(square), torch.where(norm > 0, factor, 1.0), -1.0)
        unit.squares.append(square)
        unit.factors.append(factor)
        return factor

    def _free(self, slots: list[Slot]) -> None:
        for s in slots:
            torch.autograd.graph.increment_version(s.parameter)  # torch's fused calls do not; see a stale use of it
            if s.grad.is_cuda:  # under HSDP it was made on another stream, whose next reduction could reuse it
                s.grad.record_stream(torch.cuda.current_stream(s.grad.device))
            s.parameter.grad = None

    def _close(self) -> None:
        """Reads the norms, on a GPU the one wait of a step, and forgets what belongs to it."""
        used = [u for u in self.units if u.squares]
        flat = [x for u in used for x in (*u.squares, *u.factors)]
        numbers = iter(torch.stack([x.double() for x in flat]).tolist() if flat else [])
        norms, taken = {}, Taken()
        for unit in used:
            squares = [next(numbers) for _ in unit.squares]
            factors = [next(numbers) for _ in unit.factors]
            norms[unit.name] = sum(math.sqrt(s) if s >= 0 else math.nan for s in squares) / self._scale
            if any(f < 0 for f in factors):
                taken.dropped.append(unit.name)
            taken.guarded += self._phase is Phase.STEP and any(0 <= f < 1 for f in factors)
            taken.folded |= unit.folded > 0
            if self.fold or factors[-1] >= 0:
                taken.moved |= bool(unit.stepped)
                for p in unit.stepped:
                    counter, steps = self._steps[p]
                    self._steps[p] = (counter, steps + 1)
        taken.norm = math.hypot(*norms.values())
        if self.clip and self._phase is Phase.STEP:
            self.clip.learn(norms)
        self.taken = taken
        for unit in self.units:
            for record in (unit.arrived, unit.squares, unit.factors, unit.stepped):
                record.clear()
            unit.done, unit.folded = False, 0
        self._phase = Phase.KEEP


def _call(method: weakref.WeakMethod[Any], p: nn.Parameter) -> None:
    """A hook's work, unless the optimizer is gone."""
    found = method()
    if found is not None:
        found(p)


def plan_units(policy: Policy, sharded: bool) -> dict[str, list[nn.Parameter]]:
    """Trained parameters by FSDP2 unit or, in a plain model, by decoder layer; there the others are units of one."""
    if sharded:
        owners = [name for name, module in policy.named_modules() if isinstance(module, FSDPModule)]
    else:
        mine = {id(layer) for layer in layers(policy.lm)}
        owners = [name for name, module in policy.named_modules() if id(module) in mine]
    owners.sort(key=len, reverse=True)
    units: dict[str, list[nn.Parameter]] = {}
    for name, p in policy.named_parameters():
        if p.requires_grad:
            unit = next((o for o in owners if not o or name.startswith(f"{o}.")), name)
            units.setdefault(unit or "root", []).append(p)
    return units


def build_unit_optimizer(policy: Policy, cfg: OptimConfig, mesh: Mesh, sharded: bool, seed: int) -> UnitOptimizer:
    """The optimizer that ``cfg`` names, stepping in the backward pass or, with the same arithmetic, after it.

    Raises :class:`ModelError` for what cannot be built on this mesh.
    """
    units = plan_units(policy, sharded)
    hidden = {id(p) for layer in layers(policy.lm) for p in layer.parameters() if p.ndim == 2}
    trained = [p for parameters in units.values() for p in parameters]
    groups = parameter_groups(policy.parameters(), cfg, hidden if cfg.name == "muon" else None)
    if cfg.name == "muon" and any(isinstance(p, DTensor) and _shards(p) > 1 for p in trained):
        raise ModelError("optim.name=muon cannot gather matrices that are sharded twice; set parallel.tp=1")
    rules = {"adamw": lambda: AdamWRule(seed), "sgd": MomentumRule, "muon": MuonRule}
    clip = DelayedClip(list(units), cfg.clip_norm, cfg.clip_memory, cfg.clip_guard) if cfg.delayed_clip else None
    return UnitOptimizer(
        units,
        groups,
        rules[cfg.name](),
        clip,
        in_backward=cfg.in_backward,
        fold=cfg.accumulation != "armed",
        ranks=mesh.world_size,
        whole=not sharded,
    )


def _shards(p: DTensor) -> int:
    return sum(not placement.is_replicate() for placement in p.placements)
