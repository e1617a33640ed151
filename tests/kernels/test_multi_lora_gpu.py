"""The packed adapters on a GPU: fp32 and bf16 against float64, bits and isolation at real sizes, a replayed graph."""

from __future__ import annotations

import pytest
import torch

from kernels.multi_lora import multi_lora_linears
from kernels.multi_lora_segments import segments
from tests.kernels.lora_packs import Pack, alone, error, make_base, make_one, pack, same

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]

TOKENS, RANKS = (1, 64, 300, 1500, 17), (16, 8, 24, 64, 128)


def on_gpu(dtype: torch.dtype, seed: int = 0) -> Pack:
    """Five adapters of all classes, one with several chunks, two layers, dropout, loose tokens."""
    base = make_base(896, (896, 264), seed=seed)
    rounded = base.to(dtype).to(torch.float64)  # what all implementations are given is the same
    ones = {
        slot: make_one(rounded, tokens, rank, 10 * seed + slot, dropout=0.1 * (slot % 2)).to(dtype, "cuda")
        for slot, (tokens, rank) in enumerate(zip(TOKENS, RANKS, strict=True))
    }
    return pack(base.to(dtype, "cuda"), ones, 6, loose=40, seed=seed, blocks=50)


def test_fp32():
    torch.backends.cuda.matmul.allow_tf32 = False
    p = on_gpu(torch.float32)
    found = p.run()
    for slot, one in p.ones.items():
        exact = alone(p.base.to(torch.float64, "cuda"), one.to(torch.float64, "cuda"))
        for a, b in zip(found[slot].tensors(), exact.tensors(), strict=True):
            assert error(a, b) < 1e-5


@pytest.mark.parametrize("deterministic", [False, True])
def test_bf16_is_as_exact_as_each_adapter_alone(deterministic):
    p = on_gpu(torch.bfloat16)
    found = p.run(deterministic=deterministic)
    for slot, one in p.ones.items():
        exact = alone(p.base.to(torch.float64, "cuda"), one.to(torch.float64, "cuda"))
        usual = alone(p.base, one)
        for a, theirs, b in zip(found[slot].tensors(), usual.tensors(), exact.tensors(), strict=True):
            assert error(a, b) <= 1.25 * error(theirs, b)


def test_the_pack_equals_alone_bit_for_bit():
    p = on_gpu(torch.bfloat16)
    found = p.run(deterministic=True)
    for slot, one in p.ones.items():
        single = pack(p.base, {2: one}, 3, loose=7, seed=9, blocks=11)
        assert same(single.run(deterministic=True)[2], found[slot])


def test_nan_in_one_adapter_changes_no_bit_of_another():
    want, p = on_gpu(torch.bfloat16).run(), on_gpu(torch.bfloat16)
    p.x[p.rows(2)[0], 3] = torch.nan
    found = p.run()
    assert all(same(found[slot], want[slot]) for slot in (-1, 0, 1, 3, 4))


def test_a_captured_graph_is_replayed_for_other_segments():
    p = on_gpu(torch.bfloat16)
    table = segments(p.slot_T, 6)
    x = p.x.clone()

    def step() -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return multi_lora_linears(x, p.base.weights, p.base.biases, p.adapters, table, p.keys)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    other = p.slot_T[torch.randperm(len(p.slot_T), device="cuda")]
    table.copy_(segments(other, 6))
    graph.replay()
    replayed = [y.clone() for y in outputs]
    assert all(torch.equal(a, b) for a, b in zip(replayed, step(), strict=True))
