"""Completions by the policy that is being trained, as it lies on the ranks: sharded, split, with adapters.

    prompts, packed as documents -> next token of each -> one token a row, keys and values of the others kept -> ...

The layers are called as in training; only what attention does with queries, keys and values differs: :class:`Cache`
stands where a packed row's documents do. A completion ends after the first of the stop tokens, which is part of it, or
after ``max_tokens``, as an engine ends it.

Under FSDP2 every forward is a collective, so ranks step together until the last of them has ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from asyncrl.rollouts.packing import plan
from asyncrl.training.attention import attend_documents
from asyncrl.training.documents import Documents
from asyncrl.training.exact import exact
from asyncrl.training.step import Trainer
from kernels.dropout import ODD, mix

# What a rank without a prompt continues, so that it takes part in the collectives.
_DUMMY = np.zeros(1, dtype=np.int32)


class Cache:
    """Keys and values of each attention layer for B rows, which grow by one token a forward.

    The first forward has all prompts in one packed row, longest first; each later one a token of every row.
    ``lengths_B``: tokens of a row before this forward; ``longest`` of them.

    No dataclass: FSDP2 copies those, with all that they hold, into each layer when it casts the layer's inputs.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int, device: torch.device) -> None:
        """For prompts of ``lengths`` tokens, longest first."""
        self.prompts = Documents(list(lengths), device=device)
        self.room = max(lengths) + max_tokens  # most tokens of a row
        self.lengths_B = torch.zeros(len(lengths), dtype=torch.int64, device=device)
        self.longest = 0
        self.kept: dict[nn.Module, tuple[Tensor, Tensor]] = {}  # (B, room, Hk, D) each

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """(T, H, D), (T, Hk, D) twice -> (T, H, D), with what the rows hold already."""
        rows, at = self.places()
        if module not in self.kept:
            empty = [x.new_zeros(len(self.lengths_B), self.room, *x.shape[1:]) for x in (k, v)]
            self.kept[module] = empty[0], empty[1]
        keys, values = self.kept[module]
        keys[rows, at], values[rows, at] = k, v
        if not self.longest:
            return attend_documents(q, k, v, self.prompts, scale, window)
        seen = self.longest + 1
        j = torch.arange(seen, device=q.device)
        mask_BK = j <= at[:, None]
        if window is not None:
            mask_BK &= at[:, None] - j < window
        # Query heads that share a key head become query rows of it.
        q_BHRD = q.unflatten(1, (k.shape[1], -1))
        k_BHKD, v_BHKD = keys[:, :seen].transpose(1, 2), values[:, :seen].transpose(1, 2)
        out = F.scaled_dot_product_attention(q_BHRD, k_BHKD, v_BHKD, attn_mask=mask_BK[:, None, None], scale=scale)
        return out.flatten(1, 2)

    def places(self) -> tuple[Tensor, Tensor]:
        """(row, position in it) of each token of this forward."""
        device = self.lengths_B.device
        if self.longest:
            return torch.arange(len(self.lengths_B), device=device), self.lengths_B
        lengths = self.prompts.stem_lengths
        rows = np.repeat(np.arange(len(lengths)), lengths)
        at = np.concatenate([np.arange(n) for n in lengths])
        return torch.from_numpy(rows).to(device), torch.from_numpy(at).to(device)

    def ends(self) -> Tensor:
        """Where in this forward's tokens the last one of each row is: (B,)."""
        if self.longest:
            return torch.arange(len(self.lengths_B), device=self.lengths_B.device)
        return torch.from_numpy(np.cumsum(self.prompts.stem_lengths) - 1).to(self.lengths_B.device)

    def grow(self) -> None:
        """After a forward: its tokens are in the rows."""
        if self.longest:
            self.lengths_B, self.longest = self.lengths_B + 1, self.longest + 1
        else:
            self.lengths_B = torch.tensor(self.prompts.stem_lengths, device=self.lengths_B.device)
            self.longest = self.prompts.stem_lengths[0]


@dataclass(frozen=True)
class Sampling:
    """Tokens drawn at ``temperature`` from the whole distribution.

    What is drawn is a function of ``seed``, ``step``, the prompt's number and the token's, and of the logits: the same
    however many ranks share the prompts.
    """

    temperature: float
    seed: int
    step: int

    def keys(self, prompts_B: Tensor, token: int) -> Tensor:
        """(B,) int64 of token number ``token`` of the completions of the prompts with these numbers."""
        call = mix(mix(torch.tensor(self.seed, device=prompts_B.device) + ODD) + self.step)
        return mix(mix(prompts_B ^ call) ^ token)


def complete(
    trainer: Trainer,
    prompts: Sequence[NDArray[np.int32]],
    max_tokens: int,
    stop: Collection[int],
    sampling: Sampling | None = None,
) -> list[NDArray[np.int32]]:
    """Collective. The completion of each of ``prompts``, which are the same on every rank, as all results are.

    Greedy without ``sampling``; of tokens with equal logits the first is taken. Data ranks share the prompts. So many
    are completed at a time as ``trainer.token_budget`` holds with their completions.
    """
    if not prompts:
        return []
    mesh, lengths = trainer.mesh, [len(prompt) + max_tokens for prompt in prompts]
    packing = plan(lengths, mesh.data_ranks, max([trainer.cfg.trainer.token_budget, *lengths]))
    drawn = torch.full((len(prompts), max_tokens), -1, dtype=torch.int64)
    with exact(trainer.compute):
        for micro in packing.rank[mesh.data_rank].micro:
            numbered = {i: prompts[i] for i in micro} or {0: _DUMMY}
            found = _together(trainer, numbered, max_tokens, stop, sampling)
            if micro:
                drawn[micro] = found
    whole = mesh.data_rows(drawn.flatten()).amax(0).view_as(drawn)
    return [row[row >= 0].numpy().astype(np.int32) for row in whole]


@torch.no_grad()
def _together(
    trainer: Trainer,
    numbered: Mapping[int, NDArray[np.int32]],
    max_tokens: int,
    stop: Collection[int],
    sampling: Sampling | None,
) -> Tensor:
    """The completions (B, max_tokens) of prompts that fit in memory together, -1 after their ends; on the CPU."""
    mesh, numbers, prompts = trainer.mesh, list(numbered), list(numbered.values())
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    cache = Cache([len(prompts[i]) for i in order], max_tokens, mesh.device)
    stops = torch.tensor(sorted(stop), device=mesh.device)
    next_T = torch.from_numpy(np.concatenate([prompts[i] for i in order])).to(mesh.device, torch.int64)
    numbers_B = torch.tensor([numbers[i] for i in order], device=mesh.device)
    running_B = torch.ones(len(prompts), dtype=torch.bool, device=mesh.device)
    drawn: list[Tensor] = []
    for token in range(max_tokens):
        draw = (sampling.temperature, sampling.keys(numbers_B, token)) if sampling else None
        next_T = trainer.policy.next_tokens(next_T, cache, draw)
        cache.grow()
        drawn.append(torch.where(running_B, next_T, -1))
        running_B = running_B & ~torch.isin(next_T, stops)
        if not mesh.gather_rows(running_B.any()[None].to(torch.int64)).any():
            break
    found = torch.full((len(prompts), max_tokens), -1, dtype=torch.int64)
    found[order, : len(drawn)] = torch.stack(drawn, 1).to("cpu")
    return found
