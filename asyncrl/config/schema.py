"""The typed schema of every key a user can set.

One dataclass a Hydra group. ``asyncrl.config.check`` holds the cross-checks between keys and turns a violation
into an error that names the key and the remedy. Units are in the names (``_s`` seconds, ``_bytes`` bytes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunConfig:
    """Where a run writes. ``dir`` empty: ``<root>/<date>_<time>_<mode>`` chosen by rank 0 and published."""

    root: str = "outputs"
    dir: str = ""
    resume: str = ""  # a run folder; continues from its last checkpoint and its ledger
    name: str = ""  # name shown in W&B; empty: the folder's name


@dataclass
class ModelConfig:
    """A local Hugging Face folder (weights, config, tokenizer with chat template)."""

    path: str = "asyncrl/assets/qwen3-tiny"
    compute_dtype: str = "float32"  # float32 | bfloat16 | float64 (float64 only for exactness tests)


@dataclass
class EnvConfig:
    """One task: where items come from and how a completion is scored."""

    kind: str = "reasoning_gym"  # reasoning_gym | function
    task: str = ""  # reasoning-gym's name of the task
    task_config: dict[str, Any] = field(default_factory=dict)
    function: str = ""  # "package.module:function" or "path/file.py:function"
    size: int = 100_000  # training items; an epoch
    train_seed: int = 1
    heldout_seed: int = 2
    heldout_size: int = 256


@dataclass
class AlgorithmConfig:
    """GRPO's choices. Ratio is trainer log-prob over the engine's (behaviour) log-prob."""

    advantage: str = "group_norm"  # group_norm: (R - mean)/(std + eps) | group_mean: R - mean
    advantage_eps: float = 1e-6
    clip_low: float = 0.2
    clip_high: float = 0.28
    aggregation: str = "token_mean"  # token_mean | sequence_mean
    filter_equal_rewards: bool = True  # a group without reward variance has no gradient: filter and refill
    max_filtered_groups: int = 2000  # stop, with the diagnosis, after so many filtered in a row


@dataclass
class BatchConfig:
    """One optimizer step trains ``groups`` groups of ``group_size`` samples."""

    groups: int = 32
    group_size: int = 16

    @property
    def samples(self) -> int:
        return self.groups * self.group_size


@dataclass
class StalenessConfig:
    """No trained token is older than ``max_steps`` optimizer steps; see asyncrl/rollouts/slots.py for the proof."""

    max_steps: int = 1
    window: int = 1


@dataclass
class SamplingConfig:
    """Settings that bias the importance ratio (top_p < 1, top_k, min_p, penalties) are refused by the check."""

    temperature: float = 1.0
    max_tokens: int = 16
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass
class GeneratorConfig:
    """vLLM engines. One process a replica."""

    replicas: int = 1
    tensor_parallel: int = 1
    dtype: str = "float32"
    max_model_len: int = 128
    max_num_seqs: int = 256
    memory_share: float = 0.1  # share of device memory (of host memory on a CPU) for vLLM
    threads: int = 2  # CPU only: OpenMP threads of one engine
    enforce_eager: bool = True
    start_deadline_s: float = 300.0
    max_restarts: int = 5  # of one replica; then the run ends with the reason


@dataclass
class TrainerConfig:
    steps: int = 60
    token_budget: int = 16384  # tokens in one micro-batch of one rank
    threads: int = 2  # CPU only: intra-op threads of one trainer rank
    shard: bool = True  # FSDP2 over all ranks
    activation_checkpointing: bool = False
    logprob_chunk: int = 4096  # tokens a chunk of the head; logits of one chunk live at a time
    master_dtype: str = "float32"


@dataclass
class OptimConfig:
    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    warmup_steps: int = 3
    schedule: str = "constant"  # constant | linear | cosine, over trainer.steps
    final_lr_share: float = 0.1
    clip_norm: float = 1.0


@dataclass
class WeightsConfig:
    """The push of new weights from trainers to engines."""

    backend: str = "zmq"  # zmq | nccl | ipc (the last two need GPUs)
    dtype: str = ""  # wire dtype; empty: generator.dtype
    chunk_bytes: int = 16 * 2**20
    window_bytes: int = 64 * 2**20  # most bytes in flight to one engine
    deadline_s: float = 120.0


@dataclass
class RewardConfig:
    workers: int = 1
    deadline_s: float = 10.0
    max_failures_share: float = 0.5  # of the last batch's samples; above it the run stops with the reason


@dataclass
class EvalConfig:
    """Greedy held-out accuracy by the engines: at the start, at the end and every ``every`` steps (0: never)."""

    every: int = 0
    max_tokens: int = 0  # 0: sampling.max_tokens


@dataclass
class CheckpointConfig:
    every: int = 20  # optimizer steps; 0: only at the end
    keep: int = 2


@dataclass
class WandbConfig:
    enabled: bool = True  # offline when no key is configured
    project: str = "asyncrl"
    entity: str = ""
    mode: str = "auto"  # auto | online | offline | disabled
    rollouts_every: int = 10
    rollouts_rows: int = 16


@dataclass
class ReportConfig:
    console: str = "auto"  # auto | live | plain | none
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class TransportConfig:
    """``host`` other than loopback needs CURVE keys in ``keys_dir``."""

    host: str = "127.0.0.1"
    keys_dir: str = ""
    heartbeat_s: float = 2.0
    dead_after_s: float = 20.0


@dataclass
class DeadlineConfig:
    """How long each wait may last, in seconds."""

    start_s: float = 600.0  # until the first generator serves
    batch_s: float = 600.0  # until the next batch is full
    report_s: float = 600.0  # until the trainers report a step
    shutdown_s: float = 10.0


@dataclass
class Config:
    """The root. ``mode`` chooses asyncrl/modes/<mode>.py."""

    mode: str = "grpo"
    seed: int = 0
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    deadline: DeadlineConfig = field(default_factory=DeadlineConfig)
