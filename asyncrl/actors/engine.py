"""One vLLM engine: token ids in, token ids with log-probs and versions out, weights exchanged under load.

Invariants:
- every token is labelled with the version that drew it. Requests that have drawn nothing when an update lands start
  over, so that no sample has a prompt computed by older weights than its first token;
- log-probs are those of the distribution that was sampled, temperature applied, and belong to the sampled ids;
- a prompt is never cut: one that leaves no room is refused;
- vLLM has no deadlines of its own, so whatever is asked of it here has one, and a request is bounded by ``stalled``;
- random numbers depend on (seed, ordinal, index) only, never on what else runs.

Facts of vLLM that this file works around, each for a measured reason:
- on a CPU the engine's processes are forked, not spawned, and the worker lives in EngineCore: 3 s instead of 20 s;
- OpenMP threads that spin at barriers cost a factor of ten beside a trainer on the same cores: OMP_WAIT_POLICY=PASSIVE;
- even an eager engine compiles a helper of its sampler, with a C++ compiler, in its first step: 2.5 s, so
  TORCHDYNAMO_DISABLE=1 on a CPU;
- a seeded request dies on a CPU when its prompt is prefilled in chunks (a CPU generator has no offset to rewind), so
  chunked prefill is off there.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.metadata
import inspect
import itertools
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from asyncrl.actors.silence import LOOKS, Silence
from asyncrl.actors.versions import VersionSpans
from asyncrl.config.model_folder import stop_token_ids
from asyncrl.config.schema import GeneratorConfig
from asyncrl.weights.vllm_plugin import BACKEND

DRAIN_DEADLINE_S = 30.0
LINK_GRACE_S = 10.0
MIN_BATCHED_TOKENS = 4096  # of one engine step on a CPU, where prefills are not chunked


class EngineBroken(RuntimeError):
    """The engine died, hangs, or may hold a mixture of weights: the process must end."""


@dataclass(frozen=True)
class Terms:
    """How one sample is to be drawn. ``temperature`` 0 is greedy."""

    ordinal: int
    index: int
    temperature: float
    max_tokens: int


@dataclass
class Completion:
    """What the engine drew. With ``failure`` set: no tokens, and ``finish_reason`` is "failed" or "refused"."""

    token_ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    versions: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    finish_reason: str = ""
    failure: str | None = None
    cached_tokens: int = 0  # of the prompt, found in the prefix cache


@dataclass
class _Running:
    spans: VersionSpans
    start_over: bool = False


def prepare_environment(cfg: GeneratorConfig, name: str) -> None:
    """Set what torch and vLLM read when they are imported. Call before either is."""
    defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    fixed = {"ASYNCRL_GENERATOR": name}
    if is_cpu_build():
        fixed |= {"OMP_NUM_THREADS": str(cfg.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if cfg.enforce_eager:
            fixed["TORCHDYNAMO_DISABLE"] = "1"
        if cfg.tensor_parallel == 1:  # lets the worker live in EngineCore, see vllm/platforms/cpu.py
            fixed["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for key, value in defaults.items():
        os.environ.setdefault(key, value)
    os.environ.update(fixed)


def is_cpu_build() -> bool:
    """Whether the installed vLLM is built for CPUs; imports neither vLLM nor torch."""
    names = {d.name: d.version for d in importlib.metadata.distributions() if d.name in ("vllm", "vllm-cpu")}
    return "vllm-cpu" in names or "cpu" in names.get("vllm", "")


def sample_seed(seed: int, ordinal: int, index: int) -> int:
    """63-bit seed of one sample, the same on every generator and after every restart."""
    key = f"{seed}/{ordinal}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1


class Engine:
    """An AsyncLLM and the bookkeeping of versions. All methods belong to one event loop."""

    def __init__(self, cfg: GeneratorConfig, model: str, seed: int) -> None:
        """Start the engine's processes; blocks until weights are loaded. Needs a running event loop.

        Raises what vLLM raises when it cannot start.
        """
        self._limit = cfg.max_model_len
        self._seed = seed
        self._stop_ids = stop_token_ids(Path(model))
        self._llm = _start_llm(cfg, model)
        finish = inspect.signature(self._llm.finish_weight_update).parameters
        self._engine_tracks_versions = "weight_version" in finish  # 0.25.1 does not
        self._running: dict[str, _Running] = {}
        self._numbers = itertools.count()
        self._answered = 0
        self._serving = asyncio.Event()
        self.version = -1  # nothing committed: samples wait

    @property
    def dead(self) -> bool:
        return bool(self._llm.errored)

    @property
    def running(self) -> int:
        """Samples in the engine, waiting ones included."""
        return len(self._running)

    async def died(self) -> None:
        """Returns when the engine has died, idle or not."""
        handler = self._llm.output_handler  # vLLM's task that books outputs; it ends with the engine
        assert handler is not None
        await asyncio.wait([handler])

    async def stalled(self, limit_s: float) -> NoReturn:
        """Raises ``EngineBroken`` once the engine has had requests for ``limit_s`` and given a token to none of them.

        Updates do not count, they have a deadline of their own. See ``silence`` for what this finds and what it cannot.
        """
        silence = Silence()
        while True:
            if silence.look(self._progress(), owing=bool(self._running) and self._serving.is_set()):
                raise EngineBroken(
                    f"waited {limit_s:g} s for vLLM to draw a token for any of {self.running} requests "
                    "(generator.token_deadline_s, or half of deadline.batch_s)"
                )
            await asyncio.sleep(limit_s / LOOKS)

    async def link(self, *, deadline_s: float, **info: Any) -> None:
        """Have the workers dial the publisher and stage what it sends. ``info``: see ``ZmqInitInfo``.

        Raises ``EngineBroken`` if the workers cannot, or do not answer.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info={**info, "deadline_s": deadline_s})
        limit_s = 2 * deadline_s + LINK_GRACE_S  # a worker that lives says first which of its two waits expired
        try:
            async with asyncio.timeout(limit_s) as limit:
                await self._llm.init_weight_transfer_engine(request)
        except Exception as error:
            late = f"waited {limit_s:g} s for vLLM's workers to answer" if limit.expired() else str(error)
            raise EngineBroken(f"linking the workers to the publisher failed: {late}") from error

    async def sample(self, prompt: Sequence[int], terms: Terms) -> Completion:
        """Draw one completion. Waits while an update is under way. Raises ``EngineBroken`` if the engine dies."""
        if not 0 < len(prompt) < self._limit:
            reason = f"a prompt of {len(prompt)} tokens does not leave room in generator.max_model_len={self._limit}"
            return Completion(finish_reason="refused", failure=f"refused: {reason}")
        params = self._params(terms)
        while True:
            await self._serving.wait()
            running = _Running(VersionSpans(self.version))
            output = await self._draw(prompt, params, running)
            if not running.start_over:
                return self._completion(output, running.spans)

    async def update(self, version: int, deadline_s: float) -> float:
        """Load a version that the workers have staged, requests kept; returns the seconds that generation stood still.

        Raises ``EngineBroken``, also if vLLM is not done within ``deadline_s``; the engine then must not be used any
        more.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._serving.clear()
        began = time.monotonic()
        labelled = {"weight_version": str(version)} if self._engine_tracks_versions else {}
        doing = "pause generation"
        try:
            async with asyncio.timeout(deadline_s) as limit:
                # not AsyncLLM.pause_generation, which does this and sleeps 20 ms for outputs that ``_drain`` waits for
                await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
                doing = "start the update"
                await self._llm.start_weight_update()
                doing = "load the weights"
                await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
                doing = "finish the update"
                await self._llm.finish_weight_update(**labelled)
                doing = "hand over the outputs drawn before the update"
                await self._drain()
                await self._mark_boundaries(version)
                self.version = version
                self._serving.set()
                doing = "resume generation"
                await self._llm.resume_generation()
        except Exception as error:
            late = f"waited {deadline_s:g} s for vLLM to {doing} (weights.deadline_s)" if limit.expired() else error
            raise EngineBroken(f"the update to version {version} failed: {late}") from error
        return time.monotonic() - began

    def shutdown(self) -> None:
        """End the engine's processes."""
        self._llm.shutdown()

    # -- one sample ---------------------------------------------------------------------------------------------------

    def _params(self, terms: Terms) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        seed = sample_seed(self._seed, terms.ordinal, terms.index) if terms.temperature > 0 else None
        return SamplingParams(
            temperature=terms.temperature,
            max_tokens=terms.max_tokens,
            seed=seed,
            logprobs=0,  # of the sampled token
            flat_logprobs=True,
            stop_token_ids=self._stop_ids,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    async def _draw(self, prompt: Sequence[int], params: Any, running: _Running) -> Any:
        request_id = f"s{next(self._numbers)}"
        # the form that needs no further processing; the salt keeps other versions' keys and values away
        engine_input = {"type": "token", "prompt_token_ids": list(prompt), "cache_salt": str(self.version)}
        self._running[request_id] = running
        try:
            return [output async for output in self._llm.generate(engine_input, params, request_id)][-1]
        except Exception as error:
            raise EngineBroken(f"the engine failed a request: {error}") from error
        finally:
            del self._running[request_id]
            self._answered += 1

    def _completion(self, output: Any, spans: VersionSpans) -> Completion:
        drawn = output.outputs[0]
        ids, logprobs = list(drawn.token_ids), drawn.logprobs
        reason, cached = str(drawn.finish_reason), output.num_cached_tokens or 0
        if reason not in ("stop", "length"):
            return Completion(finish_reason="failed", failure=f"the engine ended the request with {reason}")
        if list(logprobs.token_ids) != ids:
            raise EngineBroken(f"log-probs of tokens {logprobs.token_ids} came with tokens {ids}")
        if getattr(drawn, "weight_versions", None) is not None:
            spans.check(len(ids), [(s.version, s.start, s.end) for s in drawn.weight_versions])
        bad = [i for i, value in enumerate(logprobs.logprobs) if not math.isfinite(value)]
        if bad:
            value = logprobs.logprobs[bad[0]]
            return Completion(finish_reason="failed", failure=f"token {bad[0]} has log-prob {value}")
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.array(logprobs.logprobs, np.float32),
            versions=spans.per_token(len(ids)),
            finish_reason=reason,
            cached_tokens=cached,
        )

    # -- an update ----------------------------------------------------------------------------------------------------

    async def _drain(self) -> None:
        """Until every output that the paused engine has sent is booked.

        They lie in the client's queue, in order, before the answer to the pause. The handler takes the empty output
        that we add only after it has booked them all.
        """
        from vllm.v1.engine import EngineCoreOutputs

        outputs = self._llm.engine_core.outputs_queue
        outputs.put_nowait(EngineCoreOutputs())
        deadline = time.monotonic() + DRAIN_DEADLINE_S
        while not outputs.empty():
            if time.monotonic() > deadline or self.dead:
                raise TimeoutError(f"the engine's outputs were not booked within {DRAIN_DEADLINE_S:g} s")
            await asyncio.sleep(0)

    async def _mark_boundaries(self, version: int) -> None:
        restart = []
        for request_id, running in self._running.items():
            drawn = self._drawn(request_id)
            if drawn == 0:
                running.start_over = True
                restart.append(request_id)
            elif drawn is not None:
                running.spans.boundary(version, at=drawn)
        if restart:
            await self._llm.abort(restart)

    def _progress(self) -> tuple[int, int]:
        """Differs from what it was if any request was answered or got a token since."""
        return self._answered, sum(self._drawn(request_id) or 0 for request_id in self._running)

    def _drawn(self, request_id: str) -> int | None:
        """Tokens drawn so far; None if the request has ended and only its task has not noticed."""
        processor = self._llm.output_processor
        internal = processor.external_req_ids.get(request_id)
        return processor.request_states[internal[0]].detokenizer.num_output_tokens() if internal else None


def _start_llm(cfg: GeneratorConfig, model: str) -> Any:
    from vllm.v1.engine.async_llm import AsyncLLM

    vllm_config = engine_config(cfg, model)
    if is_cpu_build():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # the line above has just set it to spawn
    return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True)


def engine_config(cfg: GeneratorConfig, model: str) -> Any:
    """vLLM's whole configuration (``VllmConfig``) of an engine that serves the folder ``model``."""
    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    return AsyncEngineArgs(
        model=model,
        dtype=cfg.dtype,
        max_model_len=cfg.max_model_len,
        max_num_seqs=cfg.max_num_seqs,
        tensor_parallel_size=cfg.tensor_parallel,
        gpu_memory_utilization=cfg.memory_share,
        enforce_eager=cfg.enforce_eager,
        enable_prefix_caching=True,
        skip_tokenizer_init=True,
        generation_config="vllm",  # sampling defaults of a checkpoint would bias the log-probs
        logprobs_mode="processed_logprobs",
        # Logits of 16 to 32 that are rounded to bf16 are off by 0.03 on average, and the trainer compares its own
        # log-probs, whose logits are fp32, with the engine's. vLLM 0.25.1 says that it cannot, and rounds.
        hf_overrides={"head_dtype": "float32"},
        disable_log_stats=True,
        weight_transfer_config=WeightTransferConfig(backend=BACKEND),
        **(_cpu_arguments(cfg) if is_cpu_build() else {}),
    ).create_engine_config()


def _cpu_arguments(cfg: GeneratorConfig) -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(cfg.max_model_len, MIN_BATCHED_TOKENS),
        "kv_cache_memory_bytes": int(min(cfg.memory_share * memory.total, memory.available / 2)),
        **({"distributed_executor_backend": "uni"} if cfg.tensor_parallel == 1 else {}),
    }
