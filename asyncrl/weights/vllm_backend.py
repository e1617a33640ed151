"""vLLM's weight-transfer backend "zmq": loads what ``staging.Receiver`` has staged, and proves what it loaded.

Its control goes over ZeroMQ; ``plane`` says which way the bytes take. It stands beside vLLM's own "nccl" and "ipc" and
is no subclass of them: they receive while generation is paused, without a deadline or a digest, and ipc wants pickled
handles, so that a subclass would have to replace all that they do.

The generator drives it through AsyncLLM: init_weight_transfer_engine, then for every version (generation paused)
start_weight_update, update_weights({"version": v}), finish_weight_update. Bytes are already here by then.

Invariants:
- a digest is taken of exactly the tensor handed to ``load_weights``, on its device, and compared with the publisher's;
- every tensor sent matches something in the engine, and everything that the engine loaded from its checkpoint was
  sent: a tied head is sent once, an untied one twice;
- buffers, which are computed and never sent (rotary frequencies), are after a load what they were before it;
- a failed update leaves the engine unusable and says so: it never resumes on a mixture.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from asyncrl.transport.keys import Keys
from asyncrl.weights.digest import U64, combined, tensor_digest, tensor_digests
from asyncrl.weights.errors import WeightMismatch
from asyncrl.weights.manifest import Staged
from asyncrl.weights.planes import receiving_plane
from asyncrl.weights.staging import Receiver

log = logging.getLogger(__name__)


@dataclass
class ZmqInitInfo(WeightTransferInitInfo):
    """Where the publisher is and which generator this engine belongs to. ``link`` goes to ``BlockingDialer``."""

    publisher: str
    generator: str
    keys_file: str = ""
    deadline_s: float = 60.0
    plane: str = "zmq"  # weights.backend
    link: dict[str, Any] = field(default_factory=dict)


@dataclass
class ZmqUpdateInfo(WeightTransferUpdateInfo):
    """Load this version from staging."""

    version: int


class ZmqWeightTransferEngine(WeightTransferEngine[ZmqInitInfo, ZmqUpdateInfo]):
    """Works with vLLM 0.25.1 and 0.32."""

    init_info_cls = ZmqInitInfo
    update_info_cls = ZmqUpdateInfo

    _receiver: Receiver | None = None
    _expected: set[str] | None = None
    _wanted: set[str]
    _route: Route | None = None
    _followers: list[Any]
    _buffers: dict[str, int] | None = None  # as they were before the first update
    _figures: dict[str, Any] | None = None
    _began = 0.0

    def init_transfer_engine(self, init_info: ZmqInitInfo) -> None:
        """Start the receiving thread. May be called again, to follow a publisher to another address."""
        parallel = self.parallel_config
        if parallel.pipeline_parallel_size != 1:
            raise ValueError("weights are pushed to whole models: pipeline parallel engines are not supported")
        if parallel.data_parallel_size != 1 or parallel.data_parallel_index != 0:
            raise ValueError("vLLM was given data parallel ranks: use more engines instead (generator.replicas)")
        self.shutdown()
        self._route = None
        self._expected = checkpoint_names(Path(self.model_config.model))
        keys = Keys.load(init_info.keys_file) if init_info.keys_file else None
        rank, workers = parallel.rank, parallel.world_size
        receiver = Receiver(
            init_info.publisher, init_info.generator, rank, workers,
            plane=receiving_plane(init_info.plane, self.device, rank, workers, init_info.deadline_s),
            keys=keys, **init_info.link,
        )  # fmt: skip
        receiver.start(init_info.deadline_s)
        self._receiver = receiver

    def start_weight_update(self) -> None:
        self._began = time.monotonic()
        # a quantised engine has parameters of its own making, which no checkpoint holds; a tied one is named once
        quantised = self.model_config.quantization is not None
        self._wanted = set() if quantised else {name for name, _ in self.model.named_parameters()}
        self._followers = tied_followers(self.model)
        if self._buffers is None:
            self._buffers = buffer_digests(self.model)
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: ZmqUpdateInfo) -> None:
        """Load a staged version. Raises ``WeightMismatch``; the publisher is told as well."""
        receiver = self._require_receiver()
        staged = receiver.take(update_info.version)
        try:
            self._figures = self._load(staged)
        except WeightMismatch as error:
            self._report_mismatch(error)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        for module in self._followers:
            module.quant_method.process_weights_after_loading(module)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        figures, self._figures = self._figures, None
        if figures is not None:
            self._check_buffers(figures["version"])
            self._require_receiver().report("loaded", load_s=time.monotonic() - self._began, **figures)

    def shutdown(self) -> None:
        """Leave the publisher; the engine keeps its weights."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: dict[str, Any] | Any) -> None:
        """Abstract in vLLM 0.25.1. Our trainers send through ``asyncrl.weights.publisher``."""
        raise TypeError("the zmq backend is fed by asyncrl.weights.publisher.WeightPublisher")

    def _require_receiver(self) -> Receiver:
        if self._receiver is None:
            raise RuntimeError("call init_weight_transfer_engine before the first weight update")
        return self._receiver

    def _report_mismatch(self, error: WeightMismatch) -> None:
        self._require_receiver().report("mismatch", version=error.version, reason=str(error))

    def _check_buffers(self, version: int) -> None:
        before, found = self._buffers or {}, buffer_digests(self.model)
        wrong = sorted(n for n in before.keys() | found.keys() if before.get(n) != found.get(n))
        if wrong and self.model_config.quantization is None:  # a quantised engine computes scales from the weights
            error = WeightMismatch(version, buffers=wrong)
            self._report_mismatch(error)
            raise error

    def _load(self, staged: Staged) -> dict[str, Any]:
        """Hand every tensor to the model and compare digests; returns what ``loaded`` will say."""
        assert staged.digests is not None
        names = staged.manifest.names
        passage = _Passage(staged, self.device)
        if self._route is None or self._route.names != names:
            route = Route(names, {name: self._hand_over(name, tensor) for name, tensor in passage})
            loaded = route.reached
        else:
            route = self._route
            loaded = set(self._load_weights(passage))
        values = [value % U64 for value in torch.stack(passage.digests).tolist()]
        changed = [n for n, v, d in zip(names, values, staged.digests, strict=False) if v != d]
        missing = sorted((self._expected or set()) - set(names)) or sorted((self._wanted | route.reached) - loaded)
        unwanted = [name for name, parameters in route.parameters.items() if not parameters]
        unwanted += names[len(passage.digests) :]  # never asked for
        if changed or missing or unwanted:
            raise WeightMismatch(staged.version, changed, missing, unwanted)
        self._route = route
        return {"version": staged.version, "digest": combined(values), "digest_s": passage.digest_s}

    @property
    def _load_weights(self) -> Callable[[Iterable[tuple[str, torch.Tensor]]], set[str]]:
        return self.model.load_weights  # type: ignore[return-value]

    def _hand_over(self, name: str, tensor: torch.Tensor) -> set[str]:
        """Load one tensor; returns the engine's parameters that it went into, none if the engine has no use for it."""
        try:
            return set(self._load_weights([(name, tensor)]))
        except (KeyError, ValueError) as error:  # what model classes raise for a name they do not know
            log.warning("the engine refuses %s: %.300s", name, error)
            return set()


@dataclass
class Route:
    """Which of the engine's parameters each tensor of a manifest went into when it was handed over by itself.

    That takes a call a tensor, and model classes list all their parameters in every call. Later versions of the same
    names go in one call and must reach the same parameters.
    """

    names: list[str]
    parameters: dict[str, set[str]]

    @property
    def reached(self) -> set[str]:
        return set().union(*self.parameters.values())


class _Passage:
    """Iterates over a staged version's (name, tensor on the device), taking the digest of each as it goes by."""

    def __init__(self, staged: Staged, device: torch.device) -> None:
        self._staged, self._device = staged, device
        self.digests: list[torch.Tensor] = []
        self.digest_s = 0.0

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for spec, tensor in self._staged.tensors():
            handed = tensor.to(self._device, non_blocking=True)
            began = time.monotonic()
            self.digests.append(tensor_digest(handed))
            self.digest_s += time.monotonic() - began
            yield spec.name, handed


def buffer_digests(model: torch.nn.Module) -> dict[str, int]:
    """Digest of every floating-point buffer, its dtype included, by name."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return dict(zip(buffers, tensor_digests(buffers.values()), strict=True))


def tied_followers(model: torch.nn.Module) -> list[Any]:
    """Modules that compute with another module's parameter, as a tied head does with the embedding's.

    The reload writes new values into the shared storage while it processes the owner, but does not process these
    again: on a CPU they would go on using the matrix that they packed from the old values.
    """
    owners: set[int] = set()
    followers = []
    for module in model.modules():
        mine = [id(p) for p in module.parameters(recurse=False)]
        if any(p in owners for p in mine) and hasattr(module, "quant_method"):
            followers.append(module)
        owners.update(mine)
    return followers


def checkpoint_names(folder: Path) -> set[str] | None:
    """Names of the tensors in a folder's safetensors files; None if it has none (then only the engine can tell)."""
    from safetensors import safe_open

    names: set[str] = set()
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.update(file.keys())
    return names or None
