"""Counter-based dropout: a fair coin that depends on the token and on nothing around it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asyncrl.data.tokens import Conversation
from asyncrl.training.dropout import DroppedLinear, token_keys
from asyncrl.training.packing import pack
from asyncrl.training.sft import pack_conversations
from kernels.dropout import drop, kept
from tests.training.tiny import make_samples

CPU = torch.device("cpu")


def talk(seed: int, n: int) -> Conversation:
    ids = np.random.default_rng(seed).integers(2, 61, n).astype(np.int32)
    return Conversation(ids, np.ones(n, dtype=bool))


def keys(talks, seed=0, step=0):
    return token_keys(pack_conversations(talks, CPU), seed, step)


@pytest.mark.parametrize("p", [0.05, 0.5, 0.9])
def test_each_element_is_dropped_with_probability_p_and_on_its_own(p):
    """Frequencies of single elements, and of pairs across tokens, features, layers and steps, within 5 sigma."""
    talks = [talk(i, 65) for i in range(8)]  # 512 tokens
    masks = [
        kept(keys(talks, seed, step), torch.tensor(salt), 256, torch.tensor(p)).double()
        for seed, step, salt in ((0, 0, 11), (0, 0, 12), (0, 1, 11), (1, 0, 11))
    ]
    for mask in masks:
        n = mask.numel()
        assert abs(mask.mean() - (1 - p)) < 5 * math.sqrt(p * (1 - p) / n)
        centred = mask - (1 - p)
        pairs = [centred[1:] * centred[:-1], centred[:, 1:] * centred[:, :-1], centred[::2, 1:] * centred[1::2, :-1]]
        pairs += [(other - (1 - p)) * centred for other in masks if other is not mask]
        for product in pairs:
            assert abs(product.mean()) < 5 * p * (1 - p) / math.sqrt(product.numel())
        rows, columns = mask.mean(1), mask.mean(0)
        assert (rows - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / mask.shape[1])
        assert (columns - (1 - p)).abs().max() < 6 * math.sqrt(p * (1 - p) / mask.shape[0])


def test_a_token_is_dropped_alike_however_its_document_is_packed():
    one, two, three = talk(0, 17), talk(1, 9), talk(2, 9)
    packed = keys([three, one, two])
    assert torch.equal(packed[:16], keys([one]))
    assert torch.equal(torch.cat([keys([three]), keys([two])]), packed[16:])  # equal lengths keep their order
    assert len(packed.unique()) == len(packed)


def test_documents_steps_and_seeds_are_told_apart():
    one = talk(0, 17)
    other = Conversation(one.ids.copy(), one.learnt)
    other.ids[3] += 1  # one token differs: every position of the document gets another key
    found = torch.stack([keys([one]), keys([other]), keys([one], step=1), keys([one], seed=1)])
    assert len(found.unique()) == found.numel()


def test_shared_prompts_are_refused():
    batch = pack(make_samples(prompt=(9, 9), answer=(1, 2)), 0, CPU, share=True)
    assert batch.documents.branch_lengths
    with pytest.raises(ValueError, match="share"):
        token_keys(batch, 0, 0)
    assert len(token_keys(pack(make_samples(), 0, CPU, share=False), 0, 0).unique()) > 1


def test_gradients_of_the_dropped_product():
    keys_T, salt, p = keys([talk(0, 7), talk(1, 5)]), torch.tensor(5), torch.tensor(0.4, dtype=torch.float64)
    x = torch.randn(10, 6, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: DroppedLinear.apply(x, w, keys_T, salt, p), (x, w))
    mask = kept(keys_T, salt, 6, p)
    assert 0 < mask.double().mean() < 1
    wanted = (x * mask / 0.6) @ w.t()
    assert torch.allclose(DroppedLinear.apply(x, w, keys_T, salt, p), wanted, rtol=1e-14)
    assert torch.equal(drop(x, mask, p) == 0, ~mask)


def test_compiled_code_drops_the_same_elements():
    """Inductor's own vector code of the hash did not, where it has at least eight features."""
    keys_T = torch.randint(-(2**62), 2**62, (37,), generator=torch.Generator().manual_seed(0))
    salt, p = torch.tensor(123456789123456789), torch.tensor(0.2, dtype=torch.float64)
    compiled = torch.compile(lambda keys: kept(keys, salt, 64, p) & (keys != 0)[:, None])
    assert torch.equal(compiled(keys_T), kept(keys_T, salt, 64, p))
