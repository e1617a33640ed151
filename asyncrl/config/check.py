"""Relations between keys, and between keys and this machine, checked before anything is started.

Each check yields a Problem for every violation; ``check`` reports them together. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

import ipaddress
import json
import math
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import get_args, get_type_hints

from asyncrl.config.context import Place
from asyncrl.config.data import check_data, uses_env
from asyncrl.config.dpo import check_dpo
from asyncrl.config.errors import ConfigError, Problem
from asyncrl.config.evaluation import check_best, check_evaluation
from asyncrl.config.levers import check_levers
from asyncrl.config.load import REPOSITORY
from asyncrl.config.lora import check_lora
from asyncrl.config.machine import visible_gpus
from asyncrl.config.model_folder import check_model_folder
from asyncrl.config.parallel import check_parallel
from asyncrl.config.schema import Config

PLUGIN_GROUP = "vllm.general_plugins"
BIASED = "biases the ratio of trainer to engine log-probabilities, and replay of its support is not available"


def check(config: Config, place: Place, gpus: int | None = None) -> None:
    """Raises ConfigError with every problem found. ``gpus`` overrides the number of GPUs of this machine."""
    gpus = len(visible_gpus()) if gpus is None else gpus
    problems = [problem for each in CHECKS for problem in each(config)]
    problems += check_ranks(config, place)
    problems += check_parallel(config, place)
    problems += check_levers(config, gpus)
    problems += check_devices(config, place, gpus)
    problems += check_weights(config, place, gpus)
    if problems:
        raise ConfigError(problems)


def check_mode(config: Config) -> Iterator[Problem]:
    """The mode is part of this version."""
    folder = REPOSITORY / "asyncrl" / "modes"
    modes = get_args(get_type_hints(Config)["mode"])
    if not (folder / f"{config.mode}.py").is_file():
        available = ", ".join(mode for mode in modes if (folder / f"{mode}.py").is_file())
        yield Problem("mode", f"{config.mode} is not part of this version", f"available: {available}")


def check_batch(config: Config) -> Iterator[Problem]:
    """Groups that can have an advantage, and a window that leaves enough slots for a batch."""
    if config.batch.group_size < 2:
        yield Problem(
            "batch.group_size",
            "the advantage compares the samples of a group, so a single one has none",
            "batch.group_size=2 or more",
        )
    stale, groups = config.staleness.max_steps, config.batch.groups
    widest = stale * groups + 1
    if config.staleness.window > widest:
        yield Problem(
            "staleness.window",
            f"{config.staleness.window} leaves fewer slots than a batch needs and the run would never start",
            f"at most staleness.max_steps * batch.groups + 1 = {widest}"
            + (" (max_steps=0 is the synchronous loop)" if stale == 0 else ""),
        )


def check_sampling(config: Config) -> Iterator[Problem]:
    """The engine must sample from the distribution whose log-probabilities it reports."""
    sampling = config.sampling
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    for name, value in neutral.items():
        if getattr(sampling, name) != value:
            yield Problem(f"sampling.{name}", f"{getattr(sampling, name)} {BIASED}", f"sampling.{name}={value}")


def check_lengths(config: Config) -> Iterator[Problem]:
    """prompt + completion <= max_model_len <= token_budget; ``mode=sft`` has no engines."""
    if config.mode == "sft":
        return
    context = config.generator.max_model_len
    for key, tokens in (
        ("sampling.max_tokens", config.sampling.max_tokens),
        ("eval.max_tokens", config.eval.max_tokens),
    ):
        if tokens >= context:
            yield Problem(
                key,
                f"{tokens} leaves no room for a prompt in generator.max_model_len={context}",
                f"{key} below {context}, or a larger generator.max_model_len",
            )
    if config.trainer.token_budget < context:
        yield Problem(
            "trainer.token_budget",
            f"{config.trainer.token_budget} is less than the longest sample, generator.max_model_len={context}",
            f"trainer.token_budget={context} or more",
        )


def check_precision(config: Config) -> Iterator[Problem]:
    """Masters at least as precise as the computation."""
    if config.model.compute_dtype == "float64" and config.trainer.master_dtype != "float64":
        yield Problem(
            "trainer.master_dtype",
            f"weights kept in {config.trainer.master_dtype} make a computation in float64 pointless",
            "trainer.master_dtype=float64",
        )
    if config.trainer.master_dtype == "bfloat16" and config.model.compute_dtype != "bfloat16":
        yield Problem(
            "trainer.master_dtype",
            f"bfloat16 weights would be computed with in {config.model.compute_dtype}, which gains nothing",
            "model.compute_dtype=bfloat16, or trainer.master_dtype=float32",
        )


def check_transport(config: Config) -> Iterator[Problem]:
    """Anything beyond loopback is encrypted; a peer is not called dead between two of its heartbeats."""
    transport = config.transport
    if not is_loopback(transport.host) and not transport.keys_dir:
        yield Problem(
            "transport.host",
            f"{transport.host} can be reached from other machines and no keys are given",
            "set transport.keys_dir to a folder with CURVE keys, or transport.host=127.0.0.1",
        )
    if transport.keys_dir and not Path(transport.keys_dir).is_dir():
        yield Problem(
            "transport.keys_dir", f"{transport.keys_dir} is not a folder", "give the folder with the CURVE keys"
        )
    if transport.dead_after_s < 2 * transport.heartbeat_s:
        yield Problem(
            "transport.dead_after_s",
            f"{transport.dead_after_s:g} s is less than two heartbeats ({transport.heartbeat_s:g} s each)",
            f"transport.dead_after_s={2 * transport.heartbeat_s:g} or more",
        )
    if config.weights.window_bytes < config.weights.chunk_bytes:
        yield Problem(
            "weights.window_bytes",
            f"{config.weights.window_bytes} is less than one chunk, so that none could be sent",
            f"weights.window_bytes={config.weights.chunk_bytes} or more",
        )


def is_loopback(host: str) -> bool:
    """Whether ``host`` is only reachable from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_env(config: Config) -> Iterator[Problem]:
    """Held-out items that are not training items; ``asyncrl.envs`` checks the task itself."""
    env = config.env
    if env.kind == "function" or not uses_env(config):
        return  # no seeds: the function is told the split
    overlap = env.train_seed < env.heldout_seed + env.heldout_size and env.heldout_seed < env.train_seed + env.size
    if overlap and env.heldout_size:
        yield Problem(
            "env.heldout_seed",
            f"item i comes from seed + i, so held-out items from {env.heldout_seed} on are also training items",
            f"env.heldout_seed={env.train_seed + env.size} or more",
        )


def check_model(config: Config) -> Iterator[Problem]:
    """A model that can be trained and served; ``mode=sft`` may make its own."""
    if not config.model.path:
        if config.mode != "sft":
            yield Problem("model.path", f"is empty, and mode={config.mode} makes no model", "give a model's folder")
        return
    if config.mode == "sft":
        yield from check_model_folder(Path(config.model.path), "sft.max_length", config.sft.max_length)
    else:
        yield from check_model_folder(
            Path(config.model.path), "generator.max_model_len", config.generator.max_model_len
        )


def check_sft(config: Config) -> Iterator[Problem]:
    """Examples that fit, and a new model whose heads divide; asyncrl/config/data.py checks the sources."""
    if config.mode != "sft":
        return
    sft, new = config.sft, config.model.new
    yield from check_data(config)
    yield from check_dpo(config)
    if sft.max_length > config.trainer.token_budget:
        yield Problem(
            "sft.max_length",
            f"{sft.max_length} tokens fit in no micro-batch of trainer.token_budget={config.trainer.token_budget}",
            f"trainer.token_budget={sft.max_length}, or a smaller sft.max_length with sft.too_long=skip, cut or split",
        )
    if not config.model.path and sft.max_length > new.max_positions:
        yield Problem(
            "sft.max_length",
            f"{sft.max_length} is more than the {new.max_positions} positions of the new model",
            f"sft.max_length={new.max_positions} or less, or a larger model.new.max_positions",
        )
    if not config.model.path and new.heads % new.kv_heads:
        yield Problem(
            "model.new.kv_heads",
            f"{new.kv_heads} key/value heads do not divide {new.heads} query heads",
            f"a divisor of {new.heads}",
        )


def check_optimizer(config: Config) -> Iterator[Problem]:
    """The optimizer in the backward pass: what is exact with what."""
    optim = config.optim
    momentum = optim.name != "adamw"
    if optim.in_backward and optim.clip == "global":
        yield Problem(
            "optim.clip",
            "the norm of the whole gradient is not known while optim.in_backward already steps",
            "optim.clip=delayed (or auto)",
        )
    if optim.accumulation != "armed" and not optim.in_backward:
        yield Problem(
            "optim.accumulation",
            f"{optim.accumulation} is for optim.in_backward=true; the ordinary loop adds gradients",
            "optim.in_backward=true, or optim.accumulation=armed",
        )
    if optim.accumulation == "adama" and momentum:
        yield Problem("optim.accumulation", f"adama is AdamW's, not {optim.name}'s", "optim.accumulation=momentum")
    if optim.accumulation == "momentum" and not momentum:
        yield Problem(
            "optim.accumulation",
            "AdamW's second moment is not linear in the gradient, so momentum alone cannot hold the sum",
            "optim.name=sgd or muon, or optim.accumulation=armed, or adama (another algorithm)",
        )
    if config.trainer.master_dtype == "bfloat16" and (momentum or optim.accumulation != "armed"):
        yield Problem(
            "trainer.master_dtype",
            "bfloat16 weights are rounded stochastically by AdamW's kernel only, once a step",
            "trainer.master_dtype=float32, or optim.name=adamw with optim.accumulation=armed",
        )


def check_installation(config: Config) -> Iterator[Problem]:
    """vLLM's processes find our weight transfer through an entry point, which a bare checkout does not have."""
    if config.mode == "grpo" and not any(point.name == "asyncrl" for point in entry_points(group=PLUGIN_GROUP)):
        yield Problem(
            "installation",
            f"this checkout is not installed, so vLLM would not load its plugin (entry point {PLUGIN_GROUP})",
            "make env, then source .venv/bin/activate; in an environment of your own: pip install --no-deps -e .",
        )


def check_run(config: Config) -> Iterator[Problem]:
    """A run to resume exists and is told apart from a new one."""
    if not config.resume:
        return
    folder = Path(config.resume)
    if config.run.dir:
        yield Problem("run.dir", "a resumed run goes on in its own folder", "leave run.dir out, or leave resume out")
    if not folder.is_dir():
        yield Problem("resume", f"{folder} is not a folder", "give the folder of a run, for example outputs/latest")
        return
    try:
        values = json.loads((folder / "config.json").read_text())
        reason = "" if isinstance(values, dict) and "mode" in values else "its config.json is not that of a run"
    except (OSError, ValueError) as error:
        reason = f"its config.json cannot be read: {error}"
    if reason:
        yield Problem("resume", f"{folder} is not the folder of a run: {reason}", "give the folder of a run")


def check_ranks(config: Config, place: Place) -> Iterator[Problem]:
    """Trainer ranks of other machines reach the controller, which is beside rank 0."""
    remote = place.world_size > place.local_world_size
    if config.mode == "grpo" and remote and is_loopback(config.transport.host):
        yield Problem(
            "transport.host",
            f"trainer ranks of other machines cannot reach {config.transport.host} of this one",
            "an address of the first machine, with transport.keys_dir (python -m asyncrl.transport.keys FOLDER)",
        )


def check_devices(config: Config, place: Place, gpus: int) -> Iterator[Problem]:
    """Engines and trainer ranks fit on this machine's GPUs."""
    generator = config.generator
    if gpus == 0:
        share, replicas = generator.memory_share, generator.replicas
        if generator.tensor_parallel > 1:
            yield Problem(
                "generator.tensor_parallel",
                f"{generator.tensor_parallel} splits an engine over GPUs and none is here",
                "generator.tensor_parallel=1; generator.threads gives an engine more cores",
            )
        if replicas * share > 0.95:
            yield Problem(
                "generator.memory_share",
                f"{replicas} engines at {share:g} each would take {replicas * share:g} of the host's memory",
                fitting(replicas, "a smaller generator.replicas"),
            )
        return
    if place.local_world_size > gpus:
        yield Problem(
            "--nproc-per-node",
            f"{place.local_world_size} trainer ranks on {gpus} GPUs",
            f"torchrun --nproc-per-node {gpus} or less",
        )
    if generator.tensor_parallel > gpus:
        yield Problem(
            "generator.tensor_parallel",
            f"one engine wants {generator.tensor_parallel} GPUs and this machine has {gpus}",
            f"generator.tensor_parallel={gpus} or less",
        )
        return
    wanted = generator.replicas * generator.tensor_parallel
    usable = 1 if config.weights.backend == "ipc" else gpus
    sharing = math.ceil(wanted / usable)
    if sharing > 1 and sharing * generator.memory_share > 0.95:
        yield Problem(
            "generator.replicas",
            f"{wanted} GPUs are wanted and {usable} can be used; {sharing} engines at generator.memory_share="
            f"{generator.memory_share:g} do not fit on one",
            fitting(sharing, "fewer replicas"),
        )


def fitting(engines: int, fewer: str) -> str:
    """The remedy where ``engines`` share what has not enough memory for them."""
    share = math.floor(90 / engines) / 100
    return f"{fewer}, or generator.memory_share={share:g} or less" if share else fewer


def check_weights(config: Config, place: Place, gpus: int) -> Iterator[Problem]:
    """Trainer and engines are where the way of moving weights needs them."""
    backend, generator = config.weights.backend, config.generator
    if config.mode != "grpo" or backend == "zmq":
        return
    if gpus == 0:
        yield Problem("weights.backend", f"{backend} moves weights from GPU to GPU and none is here", "set it to zmq")
    elif backend == "ipc" and generator.tensor_parallel > 1:
        yield Problem(
            "weights.backend",
            f"ipc needs every engine on the one GPU of trainer rank 0, and an engine takes {generator.tensor_parallel}",
            "generator.tensor_parallel=1, or set it to zmq",
        )
    elif backend == "nccl":
        engines = generator.replicas * generator.tensor_parallel
        if place.local_world_size + engines > gpus:
            yield Problem(
                "weights.backend",
                f"nccl needs trainers and engines on different GPUs: {place.local_world_size} trainer ranks and "
                f"{engines} GPUs of engines are more than the {gpus} here",
                "fewer ranks or replicas, or set it to zmq" + (", or ipc" if generator.tensor_parallel == 1 else ""),
            )


CHECKS: list[Callable[[Config], Iterator[Problem]]] = [
    check_mode,
    check_batch,
    check_sampling,
    check_lengths,
    check_precision,
    check_transport,
    check_env,
    check_model,
    check_sft,
    check_evaluation,
    check_best,
    check_optimizer,
    check_lora,
    check_installation,
    check_run,
]
