"""The mesh of trainer ranks, and whether a model can be laid over it. Answered without torch or transformers."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.context import Place
from asyncrl.config.errors import Problem
from asyncrl.config.lora import held_dtype
from asyncrl.config.schema import Config, ParallelConfig

STYLES = {
    "colwise",
    "rowwise",
    "rowwise_split_input",
    "colwise_gather_output",
    "replicated_with_grad_allreduce",
    "embedding_rowwise",
}
UNSUPPORTED = {
    "packed": "projections packed into one weight",
    "moe": "a mixture of experts",
    "ep_": "expert parallelism",
    "mla": "multi-head latent attention (MLA)",
    "sequence": "sequence parallelism",
}
NOT_HERE = {"cp": "context parallelism", "pp": "pipeline parallelism", "ep": "expert parallelism"}


@dataclass(frozen=True)
class MeshSizes:
    """Ranks along each dimension of the mesh; ``replicate * shard * tp`` is the world size."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def data(self) -> int:
        """Ranks, or groups of ``tp`` ranks, that train different micro-batches."""
        return self.replicate * self.shard


def mesh_sizes(parallel: ParallelConfig, world_size: int) -> MeshSizes:
    """The mesh of ``world_size`` ranks. Raises ``ValueError`` if the sizes do not multiply to it."""
    fixed = parallel.dp_replicate * parallel.tp
    shard = parallel.dp_shard if parallel.dp_shard > 0 else world_size // fixed
    if shard * fixed != world_size:
        chosen = f"{parallel.dp_replicate} x {parallel.dp_shard if parallel.dp_shard > 0 else '?'} x {parallel.tp}"
        raise ValueError(f"dp_replicate x dp_shard x tp = {chosen} does not make the {world_size} ranks of this launch")
    return MeshSizes(parallel.dp_replicate, shard, parallel.tp)


def check_parallel(config: Config, place: Place) -> Iterator[Problem]:
    """A mesh that fits the launch and the machine, and a model that can be split over its ``tp``."""
    parallel = config.parallel
    for name, meaning in NOT_HERE.items():
        if getattr(parallel, name) != 1:
            yield Problem(f"parallel.{name}", f"{meaning} is not part of this version", f"parallel.{name}=1")
    try:
        mesh_sizes(parallel, place.world_size)
    except ValueError as error:
        key = "dp_shard" if parallel.dp_shard > 0 else "tp" if parallel.tp > 1 else "dp_replicate"
        ranks = parallel.dp_replicate * parallel.tp * max(1, parallel.dp_shard)
        remedy = f"torchrun --nproc-per-node {ranks}, or sizes whose product is {place.world_size}"
        if parallel.dp_shard > 0:
            remedy += "; parallel.dp_shard=0 takes what is left"
        yield Problem(f"parallel.{key}", str(error), remedy)
    if not config.trainer.shard and (parallel.dp_replicate, max(parallel.dp_shard, 0), parallel.tp) != (1, 0, 1):
        yield Problem(
            "trainer.shard",
            "false keeps everything on every rank, and parallel asks for a mesh",
            "trainer.shard=true (parallel.dp_replicate alone is also a copy on every rank), or leave parallel out",
        )
    if place.world_size > 1 and not config.trainer.shard:
        yield from _check_whole(config)
    if place.local_world_size % parallel.tp and place.world_size % parallel.tp == 0:
        yield Problem(
            "parallel.tp",
            f"{parallel.tp} ranks that split one layer would lie on two machines ({place.local_world_size} on each)",
            f"a divisor of {place.local_world_size}",
        )
    if parallel.tp > 1:
        yield from _check_split(config, parallel.tp)
        if config.optim.name == "muon":
            yield Problem(
                "optim.name",
                "muon gathers whole matrices, which has not been built for layers that are split over ranks",
                "optim.name=adamw, or parallel.tp=1",
            )


def _check_whole(config: Config) -> Iterator[Problem]:
    """Ranks that each hold everything compute in the dtype of their masters."""
    try:
        held = held_dtype(config)
    except ValueError:
        return  # the check of the adapter says so
    if config.model.compute_dtype != held:
        yield Problem(
            "trainer.shard",
            f"it is FSDP2 that computes in {config.model.compute_dtype} beside {held} masters, and it shards",
            f"trainer.shard=true, or model.compute_dtype={held}",
        )


def _check_split(config: Config, tp: int) -> Iterator[Problem]:
    """Whether transformers has a plan for the model that we know, and the sizes divide."""
    if config.model.path:
        try:
            settings: dict[str, Any] = json.loads((Path(config.model.path) / "config.json").read_text())
            settings = settings.get("text_config") or settings
            kind = str(settings.get("model_type", ""))
        except (OSError, ValueError, AttributeError):
            return  # the check of the model folder says so
        heads = settings.get("num_attention_heads")
        sizes = {
            "num_attention_heads": heads,
            "num_key_value_heads": settings.get("num_key_value_heads", heads),
            "intermediate_size": settings.get("intermediate_size"),
        }
        where = "the model's "
    else:
        new, kind, where = config.model.new, "qwen3", "model.new."
        sizes = {"heads": new.heads, "kv_heads": new.kv_heads, "mlp_size": new.mlp_size}
    for name, size in sizes.items():
        if isinstance(size, int) and size % tp:
            yield Problem("parallel.tp", f"{tp} does not divide {where}{name}={size}", f"a divisor of {size}")
    plan = tp_plan(kind)
    if plan is None:
        yield Problem(
            "parallel.tp", f"transformers has no plan for splitting {kind or 'this model'} over ranks", "parallel.tp=1"
        )
    else:
        yield from check_styles(kind, plan)


def check_styles(kind: str, plan: Mapping[str, str]) -> Iterator[Problem]:
    """A problem for each style of transformers' plan for a model of type ``kind`` that the trainer cannot do."""
    for style in sorted(set(plan.values()) - STYLES):
        meaning = next((m for start, m in UNSUPPORTED.items() if style.startswith(start)), "a style not known here")
        yield Problem(
            "parallel.tp",
            f"{kind} is split by {style!r}: {meaning}, which is not part of this version",
            "parallel.tp=1",
        )


@cache
def tp_plan(kind: str) -> Mapping[str, str] | None:
    """``base_model_tp_plan`` of the installed transformers for ``model_type`` ``kind``; None if it has none.

    Read from the source text: importing it would import torch.
    """
    spec = find_spec("transformers")
    if spec is None or spec.origin is None or not kind:
        return None
    models = Path(spec.origin).parent / "models"
    near = kind.replace("-", "_")
    while near and not (models / near).is_dir():  # gemma3_text lies in gemma3
        near = near.rpartition("_")[0]
    files = sorted((models / near).glob("configuration_*.py")) if near else []
    for path in files:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                values = _class_values(node)
                if values.get("model_type") == kind:
                    plan = values.get("base_model_tp_plan")
                    return plan or None
    return None


def _class_values(node: ast.ClassDef) -> dict[str, Any]:
    """The attributes of a class that are written as plain values."""
    found: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name, value = statement.targets[0].id, statement.value
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value:
            name, value = statement.target.id, statement.value
        else:
            continue
        if name in ("model_type", "base_model_tp_plan"):
            try:
                found[name] = ast.literal_eval(value)
            except ValueError:
                continue
    return found
