"""Levers of memory and speed: the same gradients, less memory."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from asyncrl.training import float8, levers
from asyncrl.training.attention import stay_uncompiled
from asyncrl.training.errors import ModelError
from asyncrl.training.model import layers, prepare
from asyncrl.training.opening import build_trainer
from asyncrl.training.packing import pack
from asyncrl.training.sharding import local
from tests.training.memory import Memory
from tests.training.tiny import make_samples, tiny_folder, tiny_lm, tiny_run

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def gradient(policy, samples=None) -> torch.Tensor:
    policy(pack(samples or make_samples(), 0, CPU), 1.0)[0].square().sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters()])


def flat_gradient(trainer) -> torch.Tensor:
    return torch.cat([local(p.grad).flatten() for p in trainer.parameters])


def policy_with(change=lambda policy: None, **sizes):
    policy = prepare(tiny_lm(**sizes), torch.float32)
    change(policy)
    return policy


@pytest.mark.parametrize("choice", ["full", "every_2", "selective"])
def test_recomputing_changes_no_gradient(path, choice):
    seen = []
    for activation_checkpointing in ("none", choice):
        cfg = tiny_run(path, trainer={"activation_checkpointing": activation_checkpointing})
        trainer = build_trainer(cfg, 0, 1)
        trainer.step([make_samples()], lambda: seen.append(flat_gradient(trainer)))  # noqa: B023
    assert relative(seen[1], seen[0]) < 1e-13


def kept_bytes(choice: str) -> int:
    """Bytes that a forward leaves alive for backward."""
    cfg = tiny_run("", "float32", trainer={"activation_checkpointing": choice})
    policy = prepare(tiny_lm(num_hidden_layers=4), torch.float32)
    levers.pull(policy.lm, cfg.trainer, torch.float32, CPU)
    batch = pack(make_samples(groups=8, size=8), 0, CPU)
    with Memory() as memory:
        out = policy(batch, 1.0)
        held = memory.live
    assert out[0].requires_grad
    return held


def test_each_choice_keeps_less_for_backward_than_the_one_before():
    kept = [kept_bytes(choice) for choice in ("none", "selective", "every_2", "full")]
    assert kept[0] > kept[1] > kept[3] and kept[0] > kept[2] > kept[3]
    assert kept[3] < 0.35 * kept[0]


@pytest.mark.parametrize("recompute", [False, True])
def test_row_17_offloaded_activations_come_back_and_weights_stay(recompute, monkeypatch):
    """torchtune #1867 and #2683: NaN and wrong losses from offloaded activations."""
    moved, stayed = [], []
    pack_one = levers.Offloaded._pack

    def watched(self, weights, x):
        packed = pack_one(self, weights, x)
        (moved if isinstance(packed, levers.Waiting) else stayed).append(x.untyped_storage().data_ptr())
        return packed

    def offload(policy):
        for layer in layers(policy.lm):
            if recompute:
                layer.forward = levers.recomputed(layer.forward, torch.float32, selective=False)
            layer.forward = levers.Offloaded(layer, layer.forward, CPU)

    monkeypatch.setattr(levers.Offloaded, "_pack", watched)
    monkeypatch.setattr(levers, "SMALLEST_BYTES", 1)
    policy = policy_with(offload)
    assert torch.equal(gradient(policy), gradient(policy_with()))
    weights = {p.data_ptr() for p in policy.parameters()}
    assert moved and not weights & set(moved)
    assert recompute or weights & set(stayed)


def test_an_offloaded_activation_keeps_its_layout():
    """A GPU kernel for masked attention refuses a mask that comes back without the padding of its rows."""
    g = torch.Generator().manual_seed(0)
    padded = torch.randn(3, 1, 5, 16, generator=g)[..., 2:11].expand(3, 4, 5, 9)  # rows of 9 in rows of 16
    columns = torch.randn(5, 3, 8, generator=g)[:, 1]  # a third of what it is a part of
    for x, held in ((padded, 3 * 5 * 16), (columns, 5 * 8), (torch.randn(5, 7, generator=g).t(), 35)):
        packed = levers.Waiting(x)
        back = packed.back(CPU)
        assert torch.equal(back, x) and packed._kept.numel() <= held
        assert back.stride() == (x.stride() if x is not columns else (8, 1))


def test_row_23_compiled_layers_are_not_compiled_anew_for_every_batch():
    """torchtune #1663, #2945: recompilation. Attention follows the documents, the rest only their number of tokens."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    policy, counts = policy_with(), []
    stay_uncompiled(policy.lm)
    for layer in layers(policy.lm):
        layer.forward = levers.compiled(layer.forward, counter)
    for seed in range(4):
        samples = make_samples(groups=3 + seed, size=2 + seed % 3, seed=seed)
        policy.zero_grad()
        plain = gradient(policy_with(), samples)
        assert relative(gradient(policy, samples), plain) < 1e-6
        counts.append(counter.frame_count)
    assert 0 < counts[-1] == counts[1], counts
    assert counts[-1] <= 8, counts


@pytest.mark.slow
def test_compiled_bf16_layers_are_as_near_to_fp32_as_plain_ones(path, tmp_path):
    """Under FSDP2's mixed precision, several ragged micro-batches. Fused operations round less often, not otherwise.

    The clip of the ratio is off: the gradient jumps at it, and rounding of any kind takes single tokens across.
    """
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    seen, samples = [], make_samples(groups=5, size=4)
    try:
        for dtype, on in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            cfg = tiny_run(path, "float32", model={"compute_dtype": dtype}, trainer={"compile": on})
            cfg.algorithm.clip_low, cfg.algorithm.clip_high = 1.0, 1e6
            trainer = build_trainer(cfg, 0, 1)
            assert trainer.sharded == (dtype == "bfloat16")
            trainer.step([samples[:9], samples[9:]], lambda: seen.append(flat_gradient(trainer)))  # noqa: B023
    finally:
        dist.destroy_process_group()
    exact, plain, compiled = seen
    assert relative(compiled, exact) < 1.25 * relative(plain, exact) < 0.05
    assert not torch.equal(compiled, plain)


@pytest.mark.parametrize("lever", [pytest.param("compile", marks=pytest.mark.slow), "activation_offload"])
def test_a_lever_of_the_config_acts_on_every_layer_and_changes_no_gradient(path, lever, monkeypatch):
    """Counted where it works: graphs that were compiled, activations that went away and came back."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter, back, compiled, real = CompileCounterWithBackend("aot_eager"), [], levers.compiled, levers.Waiting.back
    torch._dynamo.reset()
    monkeypatch.setattr(levers, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(levers, "compiled", lambda forward: compiled(forward, counter))
    monkeypatch.setattr(levers.Waiting, "back", lambda self, device: back.append(self) or real(self, device))
    seen, acted = [], []
    for on in (False, True):
        trainer = build_trainer(tiny_run(path, "float32", trainer={lever: on}), 0, 1)
        trainer.step([make_samples()], lambda: seen.append(flat_gradient(trainer)))  # noqa: B023
        acted.append((counter.frame_count, len(back)))
    graphs, activations = acted[1]
    assert acted[0] == (0, 0)
    assert graphs >= 1 if lever == "compile" else activations >= 2 * len(layers(trainer.policy.lm))
    assert relative(seen[1], seen[0]) < 1e-6


def test_float8_products_are_as_good_as_their_mantissa():
    torch.manual_seed(0)
    x, w, bias = torch.randn(2, 40, 64, requires_grad=True), torch.randn(48, 64, requires_grad=True), torch.randn(48)
    out = float8.linear(x, w, bias)
    weight = torch.randn_like(out)
    found = torch.autograd.grad((out * weight).sum(), (x, w))
    want = torch.autograd.grad((torch.nn.functional.linear(x, w, bias) * weight).sum(), (x, w))
    assert 1e-3 < relative(out, torch.nn.functional.linear(x, w, bias)) < 0.05
    assert 1e-3 < relative(found[0], want[0]) < 0.1
    assert torch.equal(found[1], want[1])  # not in fp8


def test_float8_products_have_no_overflow_and_no_zero_scale():
    huge, nothing = torch.full((16, 16), 1e30), torch.zeros(16, 16)
    for x in (huge, -huge, nothing):
        for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
            values, scale = float8.to_float8(x, dtype)
            assert torch.allclose(values.float() * scale, x)


def test_a_model_in_float8_trains_near_its_fp32_gradient():
    def convert(policy):
        for layer in layers(policy.lm):
            float8.convert(layer)

    assert 1e-3 < relative(gradient(policy_with(convert)), gradient(policy_with())) < 0.3


def test_odd_sizes_have_no_float8():
    with pytest.raises(ModelError, match=r"mlp\.gate_proj is 40 x 32 on a rank.*multiples of 16"):
        float8.check_sizes(layers(tiny_lm(intermediate_size=40))[0])
