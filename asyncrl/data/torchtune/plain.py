"""Keys of torchtune that are one key here, or of no meaning: precision, levers of memory, meshes, logging."""

from __future__ import annotations

from asyncrl.data.torchtune.leaves import Reading, component


def read_precision(reading: Reading, adapters: bool) -> None:
    """``dtype`` and float8: with bf16 torchtune holds weights, gradients and optimizer state in 2 bytes each."""
    dtype = str(reading.get("dtype", "bf16"))
    keys = {"bf16": {"model.compute_dtype": "bfloat16"}, "fp32": {"model.compute_dtype": "float32"}}.get(dtype)
    why = ""
    if keys is None:
        keys = {"model.compute_dtype": "bfloat16"}
        reading.without("dtype", f"model.compute_dtype knows bfloat16 and float32, not {dtype}; bfloat16 is written")
    float8 = reading.get("enable_fp8_training", False)
    if float8:
        keys = {"model.compute_dtype": "float8"}
        reading.translate("enable_fp8_training", keys, "weights are kept in float32")
        reading.without("fp8_recipe_name", "scales are by tensor, made anew for each product")
    elif dtype == "bf16" and not adapters and reading.keys.get("optim.name") == "adamw":
        keys |= {"trainer.master_dtype": "bfloat16"}
        why = "weights, gradients and state of 2 bytes, rounded stochastically; trainer.master_dtype=float32 is exact"
    elif dtype == "bf16" and adapters:
        why = "adapters and their state are in float32"
    reading.keys |= keys
    if "dtype" not in reading.told:
        reading.translate("dtype", keys, why)
    for leaf in ("enable_fp8_training", "fp8_recipe_name"):
        if not float8:
            reading.meaningless(leaf, "off: no float8")


def read_memory(reading: Reading) -> None:
    """Activation checkpointing, offload, the optimizer in the backward pass, compilation."""
    mode, option = reading.get("ac_mode"), reading.get("ac_option")
    whole = reading.get("enable_activation_checkpointing", False)
    choice = "full" if whole or mode == "full" else "none"
    if mode == "selective" and not whole:
        choice = f"every_{option}" if isinstance(option, int) else "selective"
    reading.translate("enable_activation_checkpointing", {"trainer.activation_checkpointing": choice})
    for leaf in ("ac_mode", "ac_option"):
        reading.also(leaf, f"trainer.activation_checkpointing={choice}")
    for leaf, key in (
        ("enable_activation_offloading", "trainer.activation_offload"),
        ("fsdp_cpu_offload", "trainer.cpu_offload"),
        ("fsdp.cpu_offload", "trainer.cpu_offload"),
        ("optimizer_in_bwd", "optim.in_backward"),
    ):
        value = bool(reading.get(leaf, False))
        if leaf in reading.leaves and (value or key not in reading.keys):
            reading.translate(leaf, {key: value})
    _compilation(reading)
    reading.meaningless("activation_offloading_use_streams", "copies always go on a stream of their own")


def _compilation(reading: Reading) -> None:
    parts = reading.below("compile")
    chosen = reading.get("compile", False)
    layers = chosen.get("model", False) if isinstance(chosen, dict) else chosen
    for leaf in parts:
        if leaf in ("compile", "compile.model"):
            reading.translate(leaf, {"trainer.compile": bool(layers)}, "each layer but its attention")
        else:
            reading.meaningless(leaf, "kernels of loss and optimizer are written by hand or fused by torch")


def read_mesh(reading: Reading) -> None:
    """Dimensions of the mesh of ranks."""
    for leaf, key in (
        ("tensor_parallel_dim", "parallel.tp"),
        ("data_parallel_replicate_dim", "parallel.dp_replicate"),
        ("data_parallel_shard_dim", "parallel.dp_shard"),
        ("context_parallel_dim", "parallel.cp"),
        ("expert_parallel_dim", "parallel.ep"),
    ):
        size = reading.number(leaf, 1)
        if key in ("parallel.cp", "parallel.ep") and size != 1:
            reading.without(leaf, f"{key} is not part of this version")
        elif leaf in reading.leaves:
            reading.translate(leaf, {key: size})
    for leaf in reading.below("tensor_parallel_plan"):
        reading.meaningless(leaf, "transformers' own plan for the model is used")
    for leaf in ("custom_sharded_layers", "memory_efficient_fsdp_wrap", "fsdp_sharding_strategy"):
        reading.meaningless(leaf, "every layer is sharded, embedding and head too")
    if reading.get("fsdp_reshard_after_forward", True):
        reading.meaningless("fsdp_reshard_after_forward", "layers are always sharded again after forward")
    else:
        reading.without("fsdp_reshard_after_forward", "layers are always sharded again after forward")


def read_rest(reading: Reading) -> None:
    """Where a run writes, what it reports, on what it runs."""
    if reading.get("output_dir"):
        reading.translate(
            "output_dir", {"run.root": reading.get("output_dir")}, "each run has a folder of its own in it"
        )
    why = "null: torchtune draws one" if reading.get("seed") is None else ""
    reading.translate("seed", {"seed": reading.number("seed", 0)}, why)
    if reading.get("shuffle", True):
        reading.meaningless("shuffle", "each epoch of each source is shuffled by the seed")
    else:
        reading.without("shuffle", "each epoch of each source is shuffled by the seed")
    device = reading.get("device", "cuda")
    if device == "cuda":
        reading.meaningless("device", "a GPU is used where there is one")
    elif device == "cpu":
        reading.meaningless("device", "a CPU is used without a GPU; CUDA_VISIBLE_DEVICES= before the command hides it")
    else:
        reading.without("device", "NVIDIA's GPUs and CPUs only")
    reading.meaningless("collate_fn", "nothing is padded: documents are packed")
    reading.meaningless("enable_async_checkpointing", "checkpoints are always written while training goes on")
    reading.meaningless("low_cpu_ram", "each rank reads its own part of the weights")
    reading.meaningless("cudnn_deterministic_mode", "order and sums depend on the configuration alone")
    if reading.get("resize_token_embeddings", False):
        reading.without(
            "resize_token_embeddings", "add tokens to the folder first: resize_token_embeddings of transformers"
        )
    _reports(reading)
    _profiler(reading)


def _reports(reading: Reading) -> None:
    kind = component(reading.get("metric_logger"))
    online = kind == "WandBLogger"
    if kind in ("TensorBoardLogger", "CometLogger"):
        reading.without("metric_logger._component_", "metrics.jsonl in the run's folder, and W&B")
    else:
        reading.translate(
            "metric_logger._component_", {"report.wandb.enabled": online}, "metrics.jsonl is always written"
        )
    for name, key in (("project", "report.wandb.project"), ("entity", "report.wandb.entity"), ("name", "run.name")):
        leaf = f"metric_logger.{name}"
        if online and reading.get(leaf):
            reading.translate(leaf, {key: reading.get(leaf)})
    for name in ("log_dir", "filename", "organize_logs"):
        reading.meaningless(f"metric_logger.{name}", "logs lie in the run's folder")
    reading.meaningless("log_every_n_steps", "every step is written")
    if reading.get("log_peak_memory_stats", False):
        reading.without("log_peak_memory_stats", "peak memory is no metric here")
    else:
        reading.meaningless("log_peak_memory_stats", "off, as it is here")
    reading.meaningless("log_level", "events.jsonl and logs/ in the run's folder hold everything")


def _profiler(reading: Reading) -> None:
    on = reading.get("profiler.enabled", False)
    for leaf in reading.below("profiler"):
        if on:
            reading.without(leaf, "no profiler is built in; nsys profile torchrun ... sees the run")
        else:
            reading.meaningless(leaf, "the profiler is off")
