"""Packed adapters against each adapter alone: algebra in float64, bits, isolation, gradients, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels import multi_lora, multi_lora_torch
from kernels.multi_lora import Adapters, multi_lora_linear, multi_lora_linears
from kernels.multi_lora_segments import segments
from tests.kernels.interpreted import interpreted
from tests.kernels.lora_packs import Pack, alone, error, make_base, make_one, normal, pack, same

F64 = torch.float64
INVARIANT = pytest.mark.parametrize("dtype", [torch.float32, F64], ids=["fp32", "fp64"])


@pytest.fixture(autouse=True)
def one_thread():
    """Products here are tiny: handing them to threads takes longer than they do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def modules():
    """Plain torch, and the Triton kernels in the interpreter."""
    return {"torch": multi_lora_torch, "triton": interpreted("kernels.multi_lora_triton")}


@pytest.fixture(params=["torch", "triton"])
def backend(request, modules, monkeypatch):
    """Each implementation behind the public function."""
    module = modules[request.param]
    monkeypatch.setattr(multi_lora, "implementation", lambda *_: module)
    return request.param


def mixed(seed: int = 0, k: int = 48, widths=(40, 24), dropout: float = 0.3, dtype=F64, bias: bool = True) -> Pack:
    """Four adapters of ranks 3 to 24 in five slots, one without tokens, one of one layer only; and loose tokens."""
    g = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 30, (4,), generator=g).tolist()
    base = make_base(k, widths, bias, seed).to(dtype)
    ones, without = {}, {3: (1,)}
    for slot, tokens, rank in zip((0, 2, 3, 4), counts, (8, 3, 20, 24), strict=True):
        options = {"dropout": dropout * (slot % 3), "without": without.get(slot, ())}
        ones[slot] = make_one(base.to(F64), tokens, rank, 10 * seed + slot, **options).to(dtype)
    ones[1] = make_one(base.to(F64), 0, 16, 99).to(dtype)
    return pack(base, ones, 6, loose=5, seed=seed, blocks=1 + 4 * seed, chunk=16)


def check(found, wanted, bound: float) -> None:
    for a, b in zip(found.tensors(), wanted.tensors(), strict=True):
        assert a.shape == b.shape and error(a, b) < bound


@pytest.mark.parametrize("drop", [True, False], ids=["dropout", "evaluation"])
@pytest.mark.parametrize("seed", range(2))
def test_a_packed_adapter_is_the_adapter_alone(backend, seed, drop):
    """Random segments and ranks, other scale and dropout each: outputs, dx, dA and dB against modules, to 1e-10."""
    p = mixed(seed)
    found = p.run(drop=drop)
    for slot, one in p.ones.items():
        if len(one.x):
            check(found[slot], alone(p.base, one, drop), 1e-10)
    assert all(torch.isnan(g).all() for pair in p.gradients(1) for g in pair), "a slot without tokens was touched"


def test_one_layer_without_bias(backend):
    p = mixed(1, widths=(40,), bias=False)
    table = segments(p.slot_T, 6)
    y = multi_lora_linear(p.x, p.base.weights[0], None, p.adapters, table, p.keys)
    for slot in (0, 2, 3, 4):
        assert error(y[p.rows(slot)].detach(), alone(p.base, p.ones[slot]).outputs[0]) < 1e-10


def test_gradients_add_up_unless_they_are_fresh(backend):
    p = mixed()
    first = p.run()
    for slot in (0, 4):
        p.adapters.slots.fresh[slot] = False
    second = p.run()
    for slot, factor in ((0, 2), (2, 1), (3, 1), (4, 2)):
        for a, b in zip(second[slot].matrices, first[slot].matrices, strict=True):
            assert (a is None) == (b is None)
            assert a is None or all(error(x, factor * y) < 1e-14 for x, y in zip(a, b, strict=True))


def test_an_output_that_nobody_used(backend):
    """Its gradient is zero, not what was there before; without a gradient of x there is none."""
    p = mixed()
    table = segments(p.slot_T, 6)
    outputs = multi_lora_linears(p.x, p.base.weights, p.base.biases, p.adapters, table, p.keys)
    outputs[0].backward(p.grads[0])
    assert p.x.grad is None
    for slot in (0, 2, 4):
        unused = replace(p.ones[slot], grads=[p.ones[slot].grads[0], torch.zeros_like(p.ones[slot].grads[1])])
        wanted = alone(p.base, unused)
        for got, want in zip(p.gradients(slot), wanted.matrices, strict=True):
            assert all((x - y).norm() <= 1e-10 * y.norm() for x, y in zip(got, want, strict=True))


def test_gradcheck(backend):
    """Finite differences in x, A and B, through the whole function with dropout on."""
    base = make_base(5, (4, 3))
    ones = {slot: make_one(base, 3, rank, slot, dropout=0.4) for slot, rank in ((0, 2), (2, 3))}
    p = pack(base, ones, 3, loose=1, chunk=16)
    table, slots = segments(p.slot_T, 3, chunk=16), p.adapters.slots

    class Whole(torch.autograd.Function):
        """The function of x and the flat weights, whose gradient it takes from where it is left."""

        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return Whole.value(x, weight)

        @staticmethod
        def value(x, weight):
            adapters = replace(p.adapters, slots=replace(slots, weight=weight.detach().requires_grad_()))
            outputs = multi_lora_linears(x, base.weights, base.biases, adapters, table, p.keys)
            return torch.cat(outputs, dim=1)

        @staticmethod
        def backward(ctx, grad):
            x, weight = ctx.saved_tensors
            slots.grad.zero_()
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                Whole.value(x, weight).backward(grad)
            return x.grad, slots.grad.clone()

    inputs = p.x.requires_grad_(), slots.weight.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(Whole.apply, inputs, fast_mode=True)


def test_tokens_without_adapter_give_exactly_the_base(backend):
    p = mixed(2, dtype=torch.float32)
    found = p.run()[-1]
    rows = p.rows(-1)
    x = p.x.clone().requires_grad_()
    outputs = [torch.nn.functional.linear(x, w, b) for w, b in zip(p.base.weights, p.base.biases, strict=True)]
    torch.autograd.backward(outputs, p.grads)
    assert len(rows) == 5
    wanted = [*(y.detach()[rows] for y in outputs)]
    assert all(torch.equal(a, b) for a, b in zip(found.outputs, wanted, strict=True))
    assert error(found.d_x, x.grad[rows]) < 1e-6


@INVARIANT
def test_the_pack_equals_alone_bit_for_bit(backend, dtype, seed=1):
    """Deterministic: each adapter with three others against by itself, in another slot, in other runs of tokens."""
    p = mixed(seed, dtype=dtype)
    found = p.run(deterministic=True)
    for i, (slot, one) in enumerate(p.ones.items()):
        if len(one.x):
            single = pack(p.base, {(slot + i) % 3: one}, 3, loose=3 * i, seed=7 + i, blocks=5, chunk=16)
            assert same(single.run(deterministic=True)[(slot + i) % 3], found[slot])


@pytest.mark.parametrize(
    ("where", "value", "deterministic"),
    [("x", torch.nan, False), ("x", torch.inf, True), ("grad", torch.nan, True), ("grad", torch.inf, False)]
    + [(where, torch.nan, False) for where in ("a", "b", "gradient")],
)
def test_what_is_not_finite_in_one_adapter_changes_no_bit_of_another(backend, where, value, deterministic):
    """The same pack with and without NaN or Inf in the data, weights or gradients of slot 2."""
    p = mixed(1, dtype=torch.float32)
    want = p.run(deterministic=deterministic)
    p = mixed(1, dtype=torch.float32)
    rows, slots = p.rows(2), p.adapters.slots
    if where == "x":
        p.x[rows[0], 3] = value
    elif where == "grad":
        p.grads[0][rows[-1], 1] = value
    elif where == "gradient":
        slots.fresh[2] = False
        p.views(slots.grad, 2)[0][1].fill_(value)
    else:
        p.views(slots.weight.detach(), 2)[0][where == "b"][-1, -1] = value
    found = p.run(deterministic=deterministic)
    assert all(same(found[slot], want[slot]) for slot in (-1, 0, 3, 4))
    assert not all(torch.isfinite(t).all() for t in found[2].tensors()), "nothing was broken"


@INVARIANT
def test_the_reference_equals_the_layer_of_one_adapter_bit_for_bit(dtype):
    """:class:`asyncrl.training.lora.LoraLinear` on each adapter's tokens, deterministic, dropout on; under autograd."""
    from asyncrl.config.schema import LoraConfig
    from asyncrl.training.lora import Adapters as OneAdapter
    from asyncrl.training.lora import LoraLinear, Use

    p = mixed(2, widths=(40,), dtype=dtype)
    found = p.run(deterministic=True, backend="torch")
    for slot, one in p.ones.items():
        if not len(one.x):
            continue
        holder = OneAdapter(LoraConfig(rank=one.rank, alpha=one.scale * one.rank, dropout=one.dropout), 0)
        holder.scale, holder.use = one.scale, Use(keys_T=one.keys if one.dropout else None)
        linear = torch.nn.Linear(48, 40).to(dtype)
        linear.weight.data, linear.bias.data = p.base.weights[0], p.base.biases[0]
        layer = LoraLinear(linear.requires_grad_(False), "layer", holder, dtype)
        layer.lora_salt.fill_(one.salts[0])
        layer.lora_A.weight.data, layer.lora_B.weight.data = one.matrices[0]
        x = one.x.clone().requires_grad_()
        y = layer(x)
        y.backward(one.grads[0])
        assert torch.equal(found[slot].outputs[0], y.detach())
        assert torch.equal(found[slot].d_x, x.grad)
        a, b = found[slot].matrices[0]
        assert torch.equal(a, layer.lora_A.weight.grad) and torch.equal(b, layer.lora_B.weight.grad)


def test_only_x_and_the_shrunk_products_are_saved(backend):
    p = mixed()
    given = [p.x, p.adapters.slots.weight, *p.base.weights, p.keys]
    known = {t.untyped_storage().data_ptr() for t in given}
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        table = segments(p.slot_T, 6)
        multi_lora_linears(p.x.requires_grad_(), p.base.weights, p.base.biases, p.adapters, table, p.keys)
    more = sum(t.numel() for t in saved if t.untyped_storage().data_ptr() not in known)
    assert more <= 2 * len(p.x) * 32


def test_autograd_notices_weights_that_change_before_backward(backend):
    p = mixed()
    y = multi_lora_linears(p.x, p.base.weights, p.base.biases, p.adapters, segments(p.slot_T, 6))[0]
    with torch.no_grad():
        p.adapters.slots.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def fp32_gradients(p: Pack) -> Adapters:
    return replace(p.adapters, slots=replace(p.adapters.slots, grad=p.adapters.slots.grad.float()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: {"x_TK": p.x[:-1]}, "the segments are of"),
        (lambda p: {"x_TK": p.x.float()}, "needs one dtype"),
        (lambda p: {"weights": [w[:, 1:] for w in p.base.weights]}, "does not fit x"),
        (lambda p: {"weights": p.base.weights * 2, "biases": p.base.biases * 2}, "takes 1 to 3"),
        (lambda p: {"weights": [w.requires_grad_() for w in p.base.weights]}, "frozen"),
        (lambda p: {"biases": [None, p.base.biases[0]]}, "does not fit weight"),
        (lambda p: {"keys_T": p.keys.int()}, "int64"),
        (lambda p: {"segments": segments(p.slot_T, 5)}, "adapters.a must be"),
        (lambda p: {"adapters": replace(p.adapters, salt=p.adapters.salt[:1])}, "adapters.salt must be"),
        (lambda p: {"adapters": fp32_gradients(p)}, "slots.grad torch.float64"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(change, message):
    p = mixed()
    given = {
        "x_TK": p.x, "weights": p.base.weights, "biases": p.base.biases, "adapters": p.adapters,
        "segments": segments(p.slot_T, 6), "keys_T": p.keys,
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        multi_lora_linears(**(given | change(p)))


def test_an_unknown_backend_and_ranks_without_a_class_are_refused():
    with pytest.raises(ValueError, match="auto, torch or triton"):
        multi_lora.implementation("cuda", normal(torch.Generator(), 1, 1))
    assert [multi_lora.rank_class(r) for r in (1, 16, 17, 64, 128)] == [16, 16, 32, 64, 128]
    for rank in (0, 129):
        with pytest.raises(ValueError, match=f"from 1 to 128, is {rank}"):
            multi_lora.rank_class(rank)
