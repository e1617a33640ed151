"""The typed schema of every key a user can set.

One dataclass a Hydra group; these defaults are the only place where they are written. Types, choices and bounds are
enforced by ``asyncrl.config.typed``, relations between keys by ``asyncrl.config.check``; either names the key and the
remedy. Units are in the names (``_s`` seconds, ``_bytes`` bytes).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from asyncrl.config.typed import Range

Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]
Above0 = Annotated[float, Range(0, open=("low",))]
Seconds = Above0
NonNegative = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
PositiveShare = Annotated[float, Range(0, 1, open=("low",))]
BelowOne = Annotated[float, Range(0, 1, open=("high",))]


@dataclass
class RunConfig:
    """Where a run writes. ``dir`` empty: ``<root>/<date>_<time>_<mode>`` chosen by rank 0 and published."""

    root: str = "outputs"  # also holds ``latest``, a link to the newest run
    sweep_root: str = "multirun"  # a sweep writes <sweep_root>/<date>_<time>/<job>_<overrides>
    dir: str = ""  # must not exist or be empty
    name: str = ""  # name shown in W&B; empty: the folder's name
    dry: bool = False  # choose the folder, write what every process would read, start nothing


@dataclass
class NewModelConfig:
    """Size of the Qwen3 decoder that ``mode=sft`` makes when ``model.path`` is empty; embeddings are tied."""

    hidden_size: Positive = 256
    layers: Positive = 3
    heads: Positive = 4
    kv_heads: Positive = 2
    head_dim: Positive = 64  # vLLM on a CPU serves 32, 64, 80, 96, 112, 128, 192 and 256
    mlp_size: Positive = 512
    max_positions: Positive = 1024


@dataclass
class ModelConfig:
    """A local Hugging Face folder (weights, config, tokenizer with chat template); empty: ``new`` (mode sft only)."""

    path: str = "asyncrl/assets/qwen3-tiny"
    new: NewModelConfig = field(default_factory=NewModelConfig)
    # Of activations and products. bfloat16 halves activations and gathered weights and uses the tensor cores; log-probs
    # lose digits (mismatch/abs_mean shows how many). float8: bfloat16 with the layers' products in 8 bits, on GPUs that
    # have them; saves time, not memory, and costs more digits. float64 is for exactness tests.
    compute_dtype: Literal["float32", "bfloat16", "float8", "float64"] = "float32"
    # A PEFT folder (adapter_config.json, adapter_model.safetensors) to go on from; a checkpoint's ``adapter`` is one.
    # Rank, alpha, targets, dora and rslora are the folder's; lora.rank=0, or all of them as in the folder.
    adapter: str = ""


@dataclass
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv 2106.09685) beside frozen weights: ``y = W x + scale * B A x``, A and B learn.

    Saves gradients, optimizer state and fp32 masters of the model: its weights are held in ``model.compute_dtype`` (in
    bfloat16 2 bytes a weight where full training takes 16), and checkpoints hold adapters alone. Costs two thin
    products a target and direction; learns less than full training where much is new.
    """

    # Rows of A; 0: no adapters, everything learns. Each target gets rank * (in + out) weights of 16 bytes in training.
    rank: Count = 0
    alpha: Above0 = 16.0  # scale is alpha / rank
    # rsLoRA (arXiv 2312.03732): scale is alpha / sqrt(rank), so that a larger rank does not learn more slowly.
    rslora: bool = False
    # Share of the inputs of A that is dropped, each token by itself, in training only. A function of seed, step,
    # document and position: the same however a batch is packed, cut or resumed. Costs passes over each target's input.
    dropout: BelowOne = 0.0
    # Names of linear layers as they end (q_proj, mlp.down_proj), or all-linear: every one in the decoder layers. The
    # embedding and the head are never among them.
    targets: list[str] = field(default_factory=lambda: ["all-linear"])
    # DoRA (arXiv 2402.09353): the length of each row of W + scale * B A is learnt on its own. Often better at small
    # ranks. Costs W + scale * B A in every forward (its row norms) and one more activation a target. Engines do not
    # serve such adapters: merge them (python -m asyncrl.training.merge).
    dora: bool = False


@dataclass
class PackingConfig:
    """How ``mode=multi_lora`` shares one base among adapters; the same for all jobs of a sweep."""

    # Adapters trained at once; the next job starts when one ends. 0: all. Each takes 16 bytes a weight of its own.
    slots: Count = 0
    # Tokens in one pass over the base, of all adapters together; what does not fit goes in the next pass of the step.
    # Activations grow with it. One adapter's micro-batch (trainer.token_budget) may be larger and then goes alone.
    token_cap: Positive = 16384
    # Each adapter's tokens are a pass of their own, so that its bits do not depend on the others. Nothing is gained by
    # packing then: it is for finding out what made two runs differ.
    deterministic: bool = False
    # An adapter whose loss or gradient was not finite for so many steps in a row goes back to its last checkpoint, or
    # ends if it has none since it last did.
    strikes: Positive = 3


@dataclass
class EnvConfig:
    """One task: where items come from and how a completion is scored."""

    kind: Literal["reasoning_gym", "function"] = "reasoning_gym"
    task: str = ""  # reasoning-gym's name of the task
    task_config: dict[str, Any] = field(default_factory=dict)
    function: str = ""  # "package.module:function" or "path/file.py:function"
    size: Positive = 100_000  # training items; an epoch
    train_seed: Count = 1
    heldout_seed: Count = 1_000_000_000  # item i is drawn from seed + i: at least train_seed + size
    heldout_size: Count = 256


@dataclass
class AlgorithmConfig:
    """GRPO's choices; ``loss_head`` is for sft.loss=likelihood too.

    Ratio is trainer log-prob over the engine's (behaviour).
    """

    advantage: Literal["group_norm", "group_mean"] = "group_norm"  # (R - mean)/(std + eps) | R - mean
    advantage_eps: NonNegative = 1e-6
    clip_low: Share = 0.2
    clip_high: NonNegative = 0.28
    aggregation: Literal["token_mean", "sequence_mean"] = "token_mean"
    # policy: gradients are made in forward, while a chunk's logits are there. Saves one of the head's four products;
    # costs trainer.loss_chunk_bytes, and the head's gradient lives from forward on. logprob: all four, no such buffer.
    loss_head: Literal["policy", "logprob"] = "policy"
    filter_equal_rewards: bool = True  # a group without reward variance has no gradient: filter and refill
    max_filtered_groups: Positive = 2000  # stop, with the diagnosis, after so many filtered in a row


@dataclass
class BatchConfig:
    """One optimizer step trains ``groups`` groups of ``group_size`` samples."""

    groups: Positive = 32
    group_size: Positive = 16

    @property
    def samples(self) -> int:
        return self.groups * self.group_size


@dataclass
class DataConfig:
    """One source of examples; see docs/sft.md for the columns of each form."""

    path: str = ""  # .jsonl, .json, .csv, .tsv, .parquet, or a folder of the datasets library's save_to_disk
    # What a record is. auto: found from the columns of the first record, and said when the run starts.
    form: Literal["auto", "messages", "sharegpt", "alpaca", "text", "preference"] = "auto"
    weight: Above0 = 1.0  # share of the examples learnt, over the sum of all weights; each source repeats when it ends
    columns: dict[str, str] = field(default_factory=dict)  # the form's name of a column -> the file's
    # "package.module:function" or "path/file.py:function": a record (dict) in, a dict with messages (and rejected,
    # tools) or text out; instead of form and columns.
    convert: str = ""
    split: str = ""  # of a datasets folder with several


@dataclass
class SftConfig:
    """What ``mode=sft`` learns. Steps, schedule, evaluation and checkpoints are those of trainer, optim, eval, ..."""

    # likelihood: of the answers | dpo: which of two answers is preferred (group dpo); every example is then a pair.
    loss: Literal["likelihood", "dpo"] = "likelihood"
    # Empty: the training items of env with their reference answers, and its held-out items. With loss=dpo each item's
    # reference answer is preferred to a wrong one made of it (asyncrl/data/preferences.py).
    data: list[DataConfig] = field(default_factory=list)
    heldout: list[DataConfig] = field(default_factory=list)  # never learnt; all of it is evaluated (eval.every)
    # A record that cannot be learnt. stop: the run ends and names it. skip: it is counted (data/skipped/<reason>) and
    # the next of its source takes its place.
    on_error: Literal["stop", "skip"] = "stop"
    batch_size: Positive = 128  # conversations, or pairs, an optimizer step, all ranks together
    # Which tokens are targets. assistant: the assistant's messages, but those with "weight": 0 | last: its last message
    # | all: every token, the user's too. Of plain text every token is.
    train_on: Literal["assistant", "last", "all"] = "assistant"
    max_length: Annotated[int, Range(2)] = 1024  # tokens of an example, of each side of a preference
    # A longer one is an error | skip: left out | cut: its first max_length tokens | split: pieces of that length, each
    # without what came before; no preference can be split. Nothing is added at a cut. Counted as sample/skipped, ...
    too_long: Literal["error", "skip", "cut", "split"] = "error"
    # Folder that gets a copy of the Hugging Face files (of adapters the PEFT files) of the last checkpoint; of the best
    # one if checkpoint.keep_best is set.
    export: str = ""


@dataclass
class DpoConfig:
    """Direct preference optimization, ``sft.loss=dpo``. See docs/dpo.md.

    Of a pair, h = log(pi/ref)(chosen) - log(pi/ref)(rejected), sums over the learnt tokens of each side. The reference
    is what the run starts from: the model without its adapters where new ones are trained, else its log-probs, computed
    once before the first step (<run>/reference). No second model is held in either case.
    """

    # sigmoid: -log sigmoid(beta h), DPO (arXiv 2305.18290) | ipo: (h - 1/(2 beta))^2, stops at a finite h (arXiv
    # 2310.12036) | hinge: max(0, 1 - beta h), no gradient from pairs that are told apart (arXiv 2309.06657).
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    beta: Above0 = 0.1  # how strongly the policy is held to the reference; smaller lets it go further
    # Share of pairs whose two sides were exchanged by mistake: conservative DPO. Of sigmoid only.
    label_smoothing: Annotated[float, Range(0, 0.5, open=("high",))] = 0.0
    # Each side's log-ratio over its number of learnt tokens: length earns nothing. Needs a larger beta (5 in Tulu 3,
    # arXiv 2411.15124).
    length_normalised: bool = False
    # Adds this times the mean negative log-likelihood of a token of the chosen answer (arXiv 2404.19733): its
    # probability, which DPO alone may lower along with the rejected one's, stays up.
    sft_weight: NonNegative = 0.0


@dataclass
class StalenessConfig:
    """No trained token is older than ``max_steps`` optimizer steps; see asyncrl/rollouts/slots.py for the proof."""

    max_steps: Count = 1
    window: Positive = 1


@dataclass
class SamplingConfig:
    """Settings that bias the importance ratio (top_p < 1, top_k, min_p, penalties) are refused by the check."""

    temperature: Annotated[float, Range(0.01, 2)] = 1.0  # vLLM lifts smaller ones to 0.01 and refuses larger ones
    max_tokens: Positive = 16
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass
class GeneratorConfig:
    """vLLM engines. One process a replica, on GPUs of its own while there are enough (config/machine.py)."""

    replicas: Positive = 1
    tensor_parallel: Positive = 1  # GPUs of one engine; 1 without GPUs
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    max_model_len: Positive = 128
    max_num_seqs: Positive = 256
    memory_share: PositiveShare = 0.1  # of device memory (of host memory on a CPU) for vLLM
    threads: Positive = 2  # CPU only: OpenMP threads of one engine
    enforce_eager: bool = True
    start_deadline_s: Seconds = 300.0
    # With requests and without a token for any of them, or inside one call that holds the generator's event loop; then
    # the engine is replaced. Never more than half of deadline.batch_s, or the run would be over first.
    token_deadline_s: Seconds = 120.0
    max_restarts: Count = 5  # of one replica; then the run ends with the reason


@dataclass
class TrainerConfig:
    steps: Positive = 60
    token_budget: Positive = 16384  # tokens in one micro-batch of one rank
    threads: Positive = 2  # CPU only: intra-op threads of one trainer rank
    shard: bool = True  # FSDP2 over the ranks of parallel.dp_shard; false: every rank holds everything
    # Layers that keep only their input and compute the rest again in backward. none | full: every layer; saves most,
    # costs one more forward of them | every_K: one layer in K, as much of both | selective: every layer keeps its
    # matrix products and attention and recomputes what is cheap; saves less, costs little.
    activation_checkpointing: str = "none"
    # Activations wait for backward in pinned host memory. Saves nearly all of them on the GPU; costs their way there
    # and back, during which the GPU waits. With activation_checkpointing=full only each layer's input goes.
    activation_offload: bool = False
    # torch.compile of each layer but its attention. Saves time on GPUs and the memory of what is fused; costs
    # compilation at the start; numbers differ by rounding from those of the layers as they are.
    compile: bool = False
    # Master weights, gradients and optimizer state in host memory (FSDP2). Saves 16 bytes a parameter of a shard on the
    # GPU; costs the transfers of each layer, and optimizer steps at the speed of the CPU.
    cpu_offload: bool = False
    logprob_chunk: Positive = 4096  # tokens a chunk of the head; logits of one chunk live at a time
    vocab_chunk: Positive = 8192  # vocabulary rows of such a chunk; 2048 saves memory (on a GPU most of it), costs time
    loss_chunk_bytes: Positive = 832 * 2**20  # of logits in the policy-loss head; fewer: more, smaller products
    # bfloat16: weights, gradients and optimizer state of 2 bytes each, 8 a parameter where float32 takes 16. The
    # weights are rounded stochastically (kernels/adamw.py), so that an update of 1e-6 survives on average. Costs: noise
    # of about a bf16 step a weight, and gradients that are added in bf16 over micro-batches and ranks. Only with
    # compute_dtype=bfloat16.
    master_dtype: Literal["float32", "bfloat16", "float64"] = "float32"


@dataclass
class ParallelConfig:
    """The trainer ranks as a mesh, ``dp_replicate * dp_shard * tp`` of them; the default shards everything over all.

    Ranks are numbered with ``tp`` innermost: the ranks that split one layer are neighbours, on one machine.
    """

    # Copies of the sharded model (HSDP). Saves gathers of weights between copies, put on different machines: only
    # gradients cross. Costs memory: each copy holds all weights and optimizer state.
    dp_replicate: Positive = 1
    # Ranks that share one copy of weights, gradients and optimizer state (FSDP2); 0 or -1: all that are left. Saves
    # memory in proportion. Costs a gather of each layer in forward and in backward.
    dp_shard: Annotated[int, Range(-1)] = 0
    # Ranks that split the heads and the MLP of each layer (tensor parallelism). Saves activations, and the weights that
    # a layer needs at once; fewer data ranks, so smaller batches. Costs two sums of activations a layer and direction.
    tp: Positive = 1
    # Not part of this version; here so that they are refused by name.
    cp: Positive = 1  # context parallelism
    pp: Positive = 1  # pipeline parallelism
    ep: Positive = 1  # expert parallelism


@dataclass
class OptimConfig:
    lr: NonNegative = 1e-3
    beta1: BelowOne = 0.9
    beta2: BelowOne = 0.95
    eps: NonNegative = 1e-8
    weight_decay: NonNegative = 0.0
    warmup_steps: Count = 3
    schedule: Literal["constant", "linear", "cosine"] = "constant"  # over trainer.steps
    final_lr_share: Share = 0.1
    clip_norm: Annotated[float, Range(0, open=("low",), endless=True)] = 1.0  # .inf: no clipping
    # adamw; or one moment, half of AdamW's state, for which accumulation=momentum is exact. sgd: heavy ball. muon:
    # hidden matrices by Newton-Schulz, the rest by sign (Scion, arXiv 2502.07529); its steps have AdamW's size, so that
    # AdamW's learning rates fit. It costs about 15 products of each matrix a step and, under FSDP2, a gather of it.
    name: Literal["adamw", "sgd", "muon"] = "adamw"
    momentum: BelowOne = 0.95  # of sgd and muon
    # Step each layer in the backward pass, as soon as its gradient is complete, and free that gradient. Saves the
    # gradients of the model (2 bytes a parameter in bf16, 4 in fp32, over the ranks) when the peak is at the end of the
    # backward pass and the step has one micro-batch or accumulation is not `armed`. Costs: clipping is delayed (see
    # clip), one small all-reduce a layer, and the last backward pass waits until all ranks have accepted the loss.
    in_backward: bool = False
    # What several micro-batches do with in_backward. armed: gradients stay between them, the last one steps; the
    # weights of the ordinary loop, no memory saved but the overlap. momentum (sgd and muon): added to the momentum at
    # once; exact, no gradient buffer. adama (adamw): squares of each micro-batch's gradient are added instead of the
    # square of their sum (arXiv 2305.19982); no gradient buffer, another algorithm than AdamW with other step sizes.
    accumulation: Literal["armed", "momentum", "adama"] = "armed"
    # global: by the norm of this step's whole gradient, which must be complete. delayed: the loss is multiplied by
    # min(1, clip_norm / average of past norms) and a layer is cut to clip_guard times its own average; costs nothing
    # and knows no future, but a spike is cut by layers only. auto: delayed with in_backward, else global.
    clip: Literal["auto", "global", "delayed"] = "auto"
    clip_memory: BelowOne = 0.5  # delayed: weight of the past in the running averages; 0: the last step's norm alone
    clip_guard: NonNegative = 4.0  # delayed: how far above its average a layer's norm may be; 0: as far as it likes
    # A step is refused before any weight changes if one of these is exceeded, or not finite, on any rank; 0: no limit.
    max_loss: NonNegative = 0.0  # of the absolute loss of the batch
    max_ratio: NonNegative = 0.0  # of any token's pi over mu (grpo)
    max_kl: NonNegative = 0.0  # of the mean k3 estimate of KL(mu || pi), nat (grpo)
    # With in_backward a gradient may turn out not to be finite when later layers have stepped: that layer keeps its
    # weights. More such steps than this, over the whole run, and the run ends.
    max_partial_steps: Count = 10

    @property
    def delayed_clip(self) -> bool:
        return self.clip == "delayed" or (self.clip == "auto" and self.in_backward)


@dataclass
class WeightsConfig:
    """The push of new weights from trainers to engines."""

    # zmq: through host memory, any machine and device. ipc: engines share the GPU of trainer rank 0, nothing leaves it.
    # nccl: from GPU to GPU, engines on other GPUs. ipc and nccl stage on the engine's GPU: the weights lie there twice.
    backend: Literal["zmq", "ipc", "nccl"] = "zmq"
    dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # wire dtype; empty: generator.dtype
    chunk_bytes: Positive = 16 * 2**20
    window_bytes: Positive = 64 * 2**20  # most bytes in flight; ipc and nccl: of GPU memory on the trainer's side
    deadline_s: Seconds = 120.0  # for one phase of a push, and for vLLM to load it; then the engine is replaced


@dataclass
class RewardConfig:
    workers: Positive = 1
    deadline_s: Seconds = 10.0  # for one score; then the worker is killed and replaced
    load_deadline_s: Seconds = 120.0  # for one worker to import the task
    max_failures_share: Share = 0.5  # of the last batch's samples; above it the run stops with the reason


@dataclass
class EvalConfig:
    """Of held-out items, at the start, at the end and every ``every`` steps (0: never).

    Mode grpo: greedy accuracy, by the engines. Mode sft: the loss, and what the model answers (docs/sft.md).
    """

    every: Count = 0
    max_tokens: Count = 0  # of an answer; 0: sampling.max_tokens
    # Mode sft: so many held-out prompts are answered by the model as it is (<run>/generations.jsonl). Answers
    # to items of env are scored: eval/accuracy. Costs a forward a token, for all prompts together.
    generations: Count = 0
    temperature: NonNegative = 0.0  # mode sft: of these answers; 0: greedy. The same ones whenever the step is the same
    # Mode sft: the run ends, well, once so many evaluations in a row were no better by checkpoint.best_by than the best
    # before them; 0: never.
    patience: Count = 0


@dataclass
class CheckpointConfig:
    """Written while training goes on; it waits for a copy of each rank's state to host memory only."""

    every: Count = 20  # optimizer steps; 0: only at the end
    keep: Positive = 2  # the newest; each costs disk space for weights and optimizer state
    keep_best: Count = 0  # so many more, the best of those evaluated (eval.every); root/best is a link to the first
    # Also of eval.patience. Empty: accuracy, in mode sft the held-out loss.
    best_by: Literal["", "eval/accuracy", "eval/loss"] = ""
    # Copies of the state (weights and optimizer state over the number of ranks) in host memory, which is kept from one
    # to the next. 2: training does not wait while one is still written; it takes a second copy only then. 1: it waits.
    copies: Positive = 2
    hf_dtype: Literal["", "float32", "bfloat16", "float16"] = ""  # of the exported weights; empty: that of model.path


@dataclass
class WandbConfig:
    enabled: bool = True  # offline when no key is configured
    project: str = "asyncrl"
    entity: str = ""
    group: str = (
        ""  # of runs that belong together; empty: none, of packed adapters (mode=multi_lora) the sweep's folder
    )
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    rollouts_every: Count = 10  # steps; 0: never
    rollouts_rows: Positive = 16


@dataclass
class ReportConfig:
    console: Literal["auto", "live", "plain", "none"] = "auto"
    noise_floor_every: Count = 20  # steps between measurements, each one more forward of one micro-batch; 0: never
    wandb: WandbConfig = field(default_factory=WandbConfig)


@dataclass
class TransportConfig:
    """``host`` other than loopback needs CURVE keys in ``keys_dir``."""

    host: str = "127.0.0.1"
    keys_dir: str = ""
    heartbeat_s: Seconds = 2.0
    dead_after_s: Seconds = 20.0


@dataclass
class DeadlineConfig:
    """How long each wait may last, in seconds. The controller keeps the first two (asyncrl/actors/patience.py)."""

    start_s: Seconds = 600.0  # until a generator serves, at the start or after the loss of the last one that did
    # Without progress while generators serve: no sample, no score, no step, no checkpoint. Longer than the longest
    # sample and the longest step take.
    batch_s: Seconds = 600.0
    checkpoint_s: Seconds = 1800.0  # until a checkpoint is written, and of each wait of one rank for the others
    shutdown_s: Seconds = 10.0


@dataclass
class Config:
    """The root. ``mode`` chooses asyncrl/modes/<mode>.py."""

    mode: Literal["grpo", "sft", "multi_lora", "zo"] = "grpo"
    seed: Count = 0
    resume: str = ""  # a run folder (outputs/latest); continues in it from its last checkpoint and its ledger
    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    batch: BatchConfig = field(default_factory=BatchConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    dpo: DpoConfig = field(default_factory=DpoConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    generator: GeneratorConfig = field(default_factory=GeneratorConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    report: ReportConfig = field(default_factory=ReportConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    deadline: DeadlineConfig = field(default_factory=DeadlineConfig)
