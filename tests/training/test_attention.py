from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.training.attention import document_attention
from asyncrl.training.documents import Documents
from asyncrl.training.errors import ModelError
from asyncrl.training.exact import exact
from asyncrl.training.model import prepare
from asyncrl.training.packing import pack
from tests.kernels.dense import LargestTensor
from tests.training.tiny import VOCAB, make_samples, tiny_lm

CPU = torch.device("cpu")
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=48,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=1,
    initializer_range=0.2,
)
ZOO = {
    "qwen3": dict(head_dim=8),
    "qwen2": {},
    "llama": {},
    "mistral": dict(sliding_window=4),
    "olmo2": {},
    "phi3": {},
    "gemma": dict(head_dim=8, initializer_range=0.05),
    "smollm3": {},
    "gpt_neox": {},
}


def zoo_lm(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **(SIZES | ZOO[name])))


def one_by_one(lm, samples, temperature):
    """Log-probs of the completion tokens, each sample alone through the model as transformers ships it."""
    lm.set_attn_implementation("eager")
    out = []
    for s in samples:
        ids = torch.as_tensor(np.concatenate([s.prompt_ids, s.token_ids]), dtype=torch.int64)
        logp = (lm(ids[None], use_cache=False).logits[0, :-1] / temperature).log_softmax(-1)
        out.append(logp.gather(1, ids[1:, None])[len(s.prompt_ids) - 1 :, 0])
    return torch.cat(out)


def grads(lm):
    got = torch.cat([p.grad.flatten() for p in lm.parameters()])
    lm.zero_grad()
    return got


def in_pack_order(samples, batch):
    """Indices that bring the per-token results of ``samples``, in order, into the order of ``batch``."""
    starts = np.cumsum([0] + [len(s.token_ids) for s in samples])
    where = {(tuple(s.token_ids), tuple(s.logprobs)): i for i, s in enumerate(samples)}
    assert len(where) == len(samples)
    order, position = [], 0
    for n in batch.mask.lengths().tolist():
        piece = slice(position, position + n)
        i = where[tuple(batch.target_M[piece].tolist()), tuple(batch.behaviour_M[piece].float().numpy())]
        order += range(starts[i], starts[i + 1])
        position += n
    return torch.as_tensor(order)


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("name", list(ZOO))
def test_packed_equals_unpacked(name, share):
    """Log-probs to 1e-5 and gradients to 1e-5 in fp32, both exact in float64, for models of several families."""
    for dtype, limit in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        lm = zoo_lm(name).to(dtype)
        samples = make_samples(groups=3, size=4, prompt=(1, 9), answer=(1, 9))
        policy = prepare(lm, dtype)
        with exact(dtype):
            batch = pack(samples, 0, CPU, dtype, share)
            got, _ = policy(batch, 0.7)
            got.square().sum().backward()
            got_grad = grads(lm)
            want = one_by_one(lm, samples, 0.7)
            want.square().sum().backward()
        want_grad = grads(lm)
        assert (got - want[in_pack_order(samples, batch)]).abs().max() < limit
        assert (got_grad - want_grad).norm() / want_grad.norm() < limit


def attend(documents, seed=0, heads=4, kv=2, d=8, window=None, change=None):
    g = torch.Generator().manual_seed(seed)
    total = sum(documents.stem_lengths) + sum(documents.branch_lengths)
    q, k, v = (torch.randn(1, h, total, d, generator=g, dtype=torch.float64) for h in (heads, kv, kv))
    if change is not None:
        for x in (q, k, v):
            x[:, :, change] = float("nan")
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    return document_attention(torch.nn.Identity(), q, k, v, None, sliding_window=window, documents=documents)[0], (
        q,
        k,
        v,
    )


def allowed(documents: Documents, window: int | None = None) -> torch.Tensor:
    """(T, T) bool: which key each query may see, by definition."""
    doc, pos, stem_of = [], [], []
    for i, n in enumerate(documents.stem_lengths):
        doc += [("stem", i)] * n
        pos += range(n)
        stem_of += [None] * n
    for i, n in enumerate(documents.branch_lengths):
        stem = documents.branch_stem[i]
        doc += [("branch", i)] * n
        pos += range(documents.stem_lengths[stem], documents.stem_lengths[stem] + n)
        stem_of += [("stem", stem)] * n
    t = len(doc)
    return torch.tensor(
        [
            [
                (doc[j] == doc[i] or doc[j] == stem_of[i])
                and pos[j] <= pos[i]
                and (window is None or pos[i] - pos[j] < window)
                for j in range(t)
            ]
            for i in range(t)
        ]
    )


ROWS = [
    Documents([5, 5, 5]),
    Documents([9, 4, 1]),
    Documents([6, 3], [4, 4, 2, 1], [0, 1, 0, 1]),
    Documents([3, 0], [5, 2], [1, 0]),
    Documents([0], [3, 3], [0, 0]),
]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("documents", ROWS)
def test_each_token_sees_its_own_sample_and_nothing_else(documents, window):
    out, (q, k, v) = attend(documents, window=window)
    mask = allowed(documents, window)
    k2, v2 = (x.repeat_interleave(2, dim=1) for x in (k, v))
    scores = (q @ k2.transpose(2, 3) / 8**0.5).masked_fill(~mask, float("-inf"))
    want = (scores.softmax(-1) @ v2).transpose(1, 2)
    torch.testing.assert_close(out, want, rtol=1e-12, atol=1e-12)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    for a, b in zip(
        torch.autograd.grad((out * weight).sum(), [q, k, v]),
        torch.autograd.grad((want * weight).sum(), [q, k, v]),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


def test_a_nan_stays_in_its_own_document():
    documents = Documents([6, 5, 5])
    out, inputs = attend(documents, change=slice(6, 11))
    assert torch.isfinite(out[0, :6]).all() and torch.isfinite(out[0, 11:]).all()
    others = torch.cat([out[0, :6], out[0, 11:]]).sum()
    for g in torch.autograd.grad(others, inputs):
        assert torch.isfinite(g[:, :, :6]).all() and torch.isfinite(g[:, :, 11:]).all()


def test_no_mask_of_the_whole_row_is_built():
    policy = prepare(tiny_lm(), torch.float32)
    samples = make_samples(groups=40, size=8, answer=(4, 6))
    batch = pack(samples, 0, CPU)
    t = batch.input_1T.shape[1]
    with LargestTensor() as largest:
        policy(batch, 1.0)[0].sum().backward()
    assert largest.elements < t * t / 8


def test_what_attention_cannot_reproduce_is_refused():
    x = torch.zeros(1, 2, 3, 4)
    documents = Documents([3])
    with pytest.raises(ModelError, match="softcap"):
        document_attention(torch.nn.Identity(), x, x, x, None, documents=documents, softcap=30.0)
    with pytest.raises(ModelError, match="dropout"):
        document_attention(torch.nn.Identity(), x, x, x, None, documents=documents, dropout=0.1)
    with pytest.raises(ModelError, match="keyword"):
        document_attention(torch.nn.Identity(), x, x, x, None)
