"""The policy: any transformers causal LM from a local folder, scoring packed rows.

``Policy.forward`` runs the decoder and the chunked head in one module, so that under FSDP2 the root unit that owns
embedding, final norm and head is gathered when the head needs its weight, tied or not.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch
from safetensors import safe_open
from torch import Tensor, nn

from asyncrl.config.model_folder import weight_files
from asyncrl.training.attention import ATTENTION, register
from asyncrl.training.documents import TakeRows
from asyncrl.training.errors import ModelError
from asyncrl.training.head import LogitRule
from asyncrl.training.packing import PackedBatch
from kernels.likeliest import Draw, likeliest
from kernels.logprob import VOCAB_CHUNK, selected_logprob
from kernels.policy_loss import CHUNK_BYTES, TokenLoss, policy_loss

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from asyncrl.training.generation import Cache
    from asyncrl.training.lora import Adapters

# Of activations; with float8 only the products of the layers are in 8 bits.
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8": torch.bfloat16,
    "float64": torch.float64,
}
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")


@dataclass(frozen=True)
class Objective:
    """A loss of each token's own log-prob and entropy, for the policy-loss head (:mod:`kernels.policy_loss`)."""

    token_loss: TokenLoss
    extras: tuple[Tensor, ...]  # (M, ...) each
    chunk_bytes: int = CHUNK_BYTES


class Policy(nn.Module):
    """``lm`` is the transformers model; its parameter names are the Hugging Face names.

    ``adapters``: those beside its frozen weights (asyncrl/training/lora.py); None if the weights themselves learn.

    ``unread``: the folder whose weights are to be read once the parameters have been sharded; until then they are on
    the meta device (asyncrl/training/loading.py).
    """

    def __init__(self, lm: PreTrainedModel, logprob_chunk: int = 4096) -> None:
        super().__init__()
        self.lm = lm
        self.unread: Path | None = None
        self.adapters: Adapters | None = None
        self.rule = LogitRule.of(lm.config)
        self.logprob_chunk, self.vocab_chunk = logprob_chunk, VOCAB_CHUNK

    @overload
    def forward(self, batch: PackedBatch, temperature: float) -> tuple[Tensor, Tensor]: ...

    @overload
    def forward(
        self, batch: PackedBatch, temperature: float, objective: Objective
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def forward(self, batch: PackedBatch, temperature: float, objective: Objective | None = None) -> tuple[Tensor, ...]:
        """Log-prob of each target and entropy (no gradient) at ``temperature``: (M,), (M,).

        With an ``objective`` its loss, a scalar, comes first and is all that has a gradient.
        """
        operands, temperature = self._operands(batch), self.rule.temperature(temperature)
        rule: dict[str, Any] = {"bias_V": self._head.bias, "softcap": self.rule.softcap}
        if objective is None:
            rule |= {"token_chunk": self.logprob_chunk, "vocab_chunk": self.vocab_chunk}
            logp_M, entropy_M, _ = selected_logprob(*operands, temperature, **rule)
            return logp_M, entropy_M.detach()
        known = objective.token_loss, objective.extras
        return policy_loss(*operands, *known, temperature, chunk_bytes=objective.chunk_bytes, **rule)

    def next_tokens(self, input_T: Tensor, cache: Cache, draw: tuple[float, Tensor] | None = None) -> Tensor:
        """A token after each row of ``cache``, of which ``input_T`` are the newest tokens: (B,).

        The likeliest; what a model does to its logits after the projection keeps their order. With ``draw`` one drawn
        at that temperature by these keys (B,).
        """
        hidden_1TE = self.lm.base_model(
            input_ids=input_T[None], position_ids=cache.places()[1][None], use_cache=False, documents=cache
        ).last_hidden_state
        operands = hidden_1TE[0, cache.ends()], self._head.weight, self._head.bias
        if draw is None:
            return likeliest(*operands)
        temperature, keys_B = draw
        return likeliest(*operands, draw=Draw(keys_B, self.rule.temperature(temperature), self.rule.softcap))

    @property
    def _head(self) -> nn.Linear:
        return self.lm.get_output_embeddings()

    def _operands(self, batch: PackedBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states (M, E) that predict the targets, the head's weight (V, E) and the targets (M,)."""
        with self.adapters.reading(batch) if self.adapters else nullcontext():
            hidden_1TE = self.lm.base_model(
                input_ids=batch.input_1T, position_ids=batch.position_1T, use_cache=False, documents=batch.documents
            ).last_hidden_state
        return TakeRows.apply(hidden_1TE[0], batch.predict_M), self._head.weight, batch.target_M


def load_policy(path: str | Path, dtype: torch.dtype = torch.float32, logprob_chunk: int = 4096) -> Policy:
    """Loads a local Hugging Face folder with weights in ``dtype`` (the master dtype) on the CPU.

    Raises :class:`ModelError` if the folder, its config, weights or tokenizer are missing, if transformers does not
    know the architecture, or if the model needs something that the trainer does not reproduce.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    folder = Path(path)
    config = read_config(folder)
    disable_progress_bar()  # one a rank would tear the console apart
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=ATTENTION,
            local_files_only=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below with the other misfits
        )
    except (ValueError, OSError) as e:
        raise ModelError(f"{folder}: transformers cannot load it as a causal LM: {e}") from e
    lm, info = loaded  # with output_loading_info a pair, which transformers' types do not say
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info.get(kind):
            raise ModelError(f"{folder}: {kind.replace('_', ' ')} in the weights: {sorted(map(str, info[kind]))[:5]}")
    renamed = sorted({name for name, _ in lm.named_parameters()} - stored_names(folder))
    if renamed:
        raise ModelError(
            f"{folder}: transformers renames weights on loading (e.g. {renamed[0]}), engines would not know them"
        )
    return prepare(lm, dtype, logprob_chunk)


def read_config(folder: Path) -> Any:
    """The folder's transformers config. Raises :class:`ModelError` as :func:`load_policy` does."""
    from transformers import AutoConfig

    check_folder(folder)
    register()
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError) as e:
        raise ModelError(f"{folder}/config.json: unknown architecture or invalid config: {e}") from e
    LogitRule.of(config)
    return config


def stored_names(folder: Path) -> set[str]:
    """Names of the tensors in the folder's safetensors files, from their headers."""
    names: set[str] = set()
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as f:
            names.update(f.keys())
    return names


def prepare(lm: PreTrainedModel, dtype: torch.dtype, logprob_chunk: int = 4096) -> Policy:
    """Turns a transformers causal LM in memory into a policy: document attention, no dropout, one master dtype."""
    register()
    head = lm.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(lm).__name__} has no plain linear head, but {type(head).__name__}")
    lm.set_attn_implementation(ATTENTION)
    lm.eval()  # dropout would make the trainer's log-probs differ from the engine's
    wrong = {n: p.dtype for n, p in lm.named_parameters() if p.is_floating_point() and p.dtype != dtype}
    if wrong:
        raise ModelError(f"master weights must be {dtype}, but {len(wrong)} are not, e.g. {next(iter(wrong.items()))}")
    return Policy(lm, logprob_chunk)


def check_folder(folder: Path) -> None:
    """Raises :class:`ModelError` unless the folder holds a config, safetensors weights and a tokenizer."""
    if not folder.is_dir():
        raise ModelError(f"model.path {folder} is not a folder")
    for what, names in (("config", ("config.json",)), ("weights", WEIGHT_FILES), ("tokenizer", TOKENIZER_FILES)):
        if not any((folder / n).exists() for n in names):
            raise ModelError(f"model.path {folder} has no {what}: none of {', '.join(names)}")


def layers(lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers, the units of sharding and of activation checkpointing."""
    found = [m for m in lm.base_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    depth = getattr(lm.config.get_text_config(), "num_hidden_layers", None)
    for candidate in found:
        if len(candidate) == depth:
            return list(candidate)
    raise ModelError(f"{type(lm).__name__}: no list of {depth} decoder layers to shard")
