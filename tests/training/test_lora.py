"""Adapters on one rank: their arithmetic, what is trained, and with what they work."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

from asyncrl.config.schema import LoraConfig
from asyncrl.data.tokens import Conversation
from asyncrl.training.errors import ModelError
from asyncrl.training.lora import Adapters, LoraLinear, Use, attach, is_adapter, linear_layers, merged, row_norms
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import load_policy, prepare
from asyncrl.training.packing import pack
from asyncrl.training.sft import SftTrainer
from asyncrl.weights.gather import Gatherer, Local, local_of
from kernels.dropout import kept
from tests.training.in_backward_cases import batches, different, everything, run, trainer
from tests.training.tiny import VOCAB, make_samples, tiny_folder, tiny_lm, tiny_run

KINDS = {
    "lora": {"rank": 4},
    "rslora": {"rank": 4, "rslora": True, "alpha": 3.0},
    "dora": {"rank": 4, "dora": True},
    "some": {"rank": 3, "targets": ["q_proj", "mlp.down_proj"]},
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


def on(path, dtype="float32", lora=KINDS["lora"], sections=None, **options):
    """A trainer with adapters."""
    given = {"trainer": {"steps": 9}, "report": {"noise_floor_every": 0}, "lora": lora}
    for section, values in (sections or {}).items():
        given[section] = given.get(section, {}) | values
    return trainer(path, dtype, sections=given, **options)


def layer_of(kind: dict, bias: bool, dtype=torch.float64, k=10, n=7) -> LoraLinear:
    torch.manual_seed(1)
    adapters = Adapters(LoraConfig(**kind), seed=3)
    layer = LoraLinear(nn.Linear(k, n, bias=bias, dtype=dtype).requires_grad_(False), "some.layer", adapters, dtype)
    adapters.layers["some.layer"] = layer
    adapters.start_magnitudes()
    return layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["lora", "rslora", "dora"])
def test_values_and_gradients_are_the_papers(kind, dropout, bias):
    """Closed forms in numpy. DoRA: the norm is a constant (its section 4.3), so B, A see it only as a factor."""
    layer = layer_of(KINDS[kind] | {"dropout": dropout}, bias)
    rng = np.random.default_rng(0)
    b = rng.standard_normal((7, 4))
    layer.lora_B.weight.data = torch.from_numpy(b.copy())
    x = torch.from_numpy(rng.standard_normal((1, 5, 10))).requires_grad_()
    dy = rng.standard_normal((5, 7))
    keys = torch.arange(5) * 1234567
    layer.adapters.use = Use(keys_T=keys if dropout else None)
    y = layer(x)
    y.backward(torch.from_numpy(dy)[None])

    w, a, xs = layer.weight.numpy(), layer.lora_A.weight.detach().numpy(), x.detach().numpy()[0]
    scale = {"lora": 16 / 4, "rslora": 3 / math.sqrt(4), "dora": 16 / 4}[kind]
    keep = (
        np.ones((5, 10)) if not dropout else kept(keys, layer.lora_salt, 10, layer.lora_dropout).numpy() / (1 - dropout)
    )
    plain = xs @ w.T + scale * (xs * keep) @ a.T @ b.T
    norm = np.linalg.norm(w + scale * b @ a, axis=1)
    m = np.linalg.norm(w, axis=1)  # where the magnitude starts
    g = m / norm if kind == "dora" else np.ones(7)
    offset = layer.bias.numpy() if bias else 0.0
    assert np.allclose(y.detach().numpy()[0], g * plain + offset, rtol=1e-12)
    up = dy * g
    assert np.allclose(x.grad.numpy()[0], up @ w + scale * (up @ b @ a) * keep, rtol=1e-12)
    assert np.allclose(layer.lora_A.weight.grad.numpy(), scale * (up @ b).T @ (xs * keep), rtol=1e-12)
    assert np.allclose(layer.lora_B.weight.grad.numpy(), scale * up.T @ ((xs * keep) @ a.T), rtol=1e-12)
    if kind == "dora":
        assert np.allclose(layer.lora_magnitude_vector.grad.numpy(), (dy * plain).sum(0) / norm, rtol=1e-12)
    assert layer.weight.grad is None and (layer.bias is None or layer.bias.grad is None)


def test_it_starts_as_peft_does_and_the_layer_as_its_base():
    """A uniform within 1/sqrt(in) (Kaiming with a = sqrt 5), B zero, the magnitude the length of each row."""
    layer = layer_of(KINDS["dora"] | {"rank": 64}, True, torch.float32, k=400, n=96)
    a, bound = layer.lora_A.weight.detach(), 1 / math.sqrt(400)
    assert a.abs().max() <= bound and a.abs().max() > 0.99 * bound
    assert float(a.var()) == pytest.approx(bound**2 / 3, rel=0.05) and abs(float(a.mean())) < 0.01 * bound * 5
    assert not layer.lora_B.weight.any()
    assert torch.allclose(layer.lora_magnitude_vector, layer.weight.norm(dim=1), rtol=1e-6)
    x = torch.randn(3, 400)
    assert torch.allclose(layer(x), nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-6)


def test_row_norms_are_made_of_pieces(monkeypatch):
    monkeypatch.setattr("asyncrl.training.lora._NORM_ELEMENTS", 30)  # 3 rows of 10 at a time
    w, b, a = torch.randn(8, 10), torch.randn(8, 2), torch.randn(2, 10)
    assert torch.allclose(row_norms(w, b, a, 0.5), (w + 0.5 * b @ a).norm(dim=1), rtol=1e-6)
    w[3], b[3] = 0, 0
    layer = layer_of({"rank": 2, "dora": True}, False, torch.float32, n=8)
    layer.weight.data = w.clone()
    layer.adapters.start_magnitudes()
    assert layer(torch.randn(4, 10)).isfinite().all()  # a row of zeros


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_is_the_layer(dtype):
    for kind in KINDS:
        layer = layer_of(KINDS[kind], False, torch.float32)
        layer.lora_B.weight.data.normal_()
        if kind == "dora":
            layer.lora_magnitude_vector.data.uniform_(0.5, 2)
        layer.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
        w = merged(layer.weight, layer.lora_B.weight, layer.lora_A.weight, layer.adapters.scale,
                   layer.lora_magnitude_vector)  # fmt: skip
        assert w.dtype == torch.float32 and layer.weight.dtype == dtype
        x = torch.randn(6, 10)
        rows = [merged(layer.weight[i : i + 3], layer.lora_B.weight[i : i + 3], layer.lora_A.weight,
                       layer.adapters.scale, None if kind != "dora" else layer.lora_magnitude_vector[i : i + 3])
                for i in (0, 3, 6)]  # fmt: skip
        assert torch.allclose(torch.cat(rows), w, rtol=1e-5, atol=1e-6)
        layer.weight = nn.Parameter(layer.weight.float(), requires_grad=False)
        assert torch.allclose(layer(x), x @ w.t(), rtol=1e-4, atol=1e-5)


def test_only_adapters_are_trained_and_the_base_stays(path):
    for tied in (True, False):
        t = on(path, tied=tied, lora=KINDS["dora"])
        before = {n: p.clone() for n, p in t.policy.lm.named_parameters() if not is_adapter(n)}
        assert "model.layers.0.self_attn.q_proj.weight" in before and ("lm_head.weight" in before) != tied
        run(t, 0, 2)
        moved = [n for n, p in t.policy.lm.named_parameters() if n in before and not torch.equal(p, before[n])]
        assert not moved and len(before) == len(list(tiny_lm(tied).named_parameters()))
        names = [n for n, _ in t.named_parameters_hf()]
        assert all(map(is_adapter, names)) and len(names) == 2 * 7 * 3
        assert {id(p) for g in t.optimizer.param_groups for p in g["params"]} == {id(p) for p in t.parameters}
        assert all(np.abs(x).max() > 0 for n, x in everything(t).items() if n.endswith("lora_B.weight"))


def test_disabled_it_is_the_base_bit_for_bit(path):
    batch = pack(make_samples(), 0, CPU)
    for kind, settings in KINDS.items():
        t = on(path, lora=settings | {"dropout": 0.2 if kind == "lora" else 0.0})
        base = prepare(tiny_lm(), torch.float32)
        run(t, 0, 2) if kind != "lora" else t.policy.adapters.layers[
            "model.layers.0.mlp.up_proj"
        ].lora_B.weight.data.normal_()
        with torch.no_grad():
            want, now = base(batch, 1.0)[0], t.policy(batch, 1.0)[0]
            with t.policy.adapters.disabled(), t.policy.adapters.dropping(3):
                reference = t.policy(batch, 1.0)[0]
            again = t.policy(batch, 1.0)[0]
        assert torch.equal(reference, want) and not torch.equal(now, want) and torch.equal(again, now), kind


@pytest.mark.parametrize("case", ["lora", "dora", "untied", "recomputed", "float64", "bfloat16 compute", "muon"])
def test_the_step_in_the_backward_pass_is_the_step_after_it_bit_for_bit(path, case):
    half = {"model": {"compute_dtype": "bfloat16"}, "trainer": {"master_dtype": "float32"}}
    options = {
        "dora": {"lora": KINDS["dora"]},
        "untied": {"tied": False},
        "recomputed": {"sections": {"trainer": {"activation_checkpointing": "full"}}},
        "float64": {"dtype": "float64"},
        "bfloat16 compute": {"dtype": "bfloat16", "sections": half},
        "muon": {"name": "muon"},
    }.get(case, {})
    inside, after = on(path, in_backward=True, **options), on(path, clip="delayed", **options)
    a, b = run(inside, 0, 3), run(after, 0, 3)
    assert not different(everything(inside), everything(after))
    assert [r["loss"] for r in a] == [r["loss"] for r in b] and all(r["skipped"] is None for r in a)
    assert len({r["loss"] for r in a}) == 3


@pytest.mark.parametrize("choice", ["full", "every_2", "selective"])
@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_recomputed_layers_learn_the_same(path, kind, choice):
    plain = on(path, "float64", KINDS[kind])
    again = on(path, "float64", KINDS[kind], {"trainer": {"activation_checkpointing": choice}})
    run(plain, 0, 2), run(again, 0, 2)
    close(everything(again), everything(plain), 1e-12)


def close(found, wanted, limit):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert np.linalg.norm(found[name] - wanted[name]) <= limit * np.linalg.norm(wanted[name]), name


def talks(seed=0, count=7):
    rng = np.random.default_rng(seed)
    sizes = [int(rng.integers(3, 17)) for _ in range(count)]
    return [Conversation(rng.integers(2, VOCAB, n).astype(np.int32), np.arange(n) > 1) for n in sizes]


def sft(path, lora, sections=None, **optim):
    torch.set_num_threads(1)  # as build_trainer does
    cfg = tiny_run(path, "float64", lora=lora, **(sections or {}), optim={"lr": 1e-2, "warmup_steps": 0} | optim)
    return SftTrainer(cfg, load_policy(path, torch.float64), open_mesh(0, 1))


@pytest.mark.parametrize("choice", ["none", "full"])
def test_dropout_is_of_training_alone_and_however_a_batch_is_cut(path, choice):
    settings = KINDS["lora"] | {"dropout": 0.3}
    whole, cut, without = (
        sft(path, lora, {"trainer": {"token_budget": budget, "activation_checkpointing": choice}})
        for lora, budget in ((settings, 1000), (settings, 20), (KINDS["lora"], 1000))
    )
    for step in range(2):
        for t in (whole, cut, without):
            t.learn(talks(step))
    close(everything(cut), everything(whole), 1e-9)
    assert max(np.abs(x - everything(without)[n]).max() for n, x in everything(whole).items()) > 1e-3
    held = whole.loss(talks(9))
    assert whole.loss(talks(9)) == held  # evaluation draws nothing
    for (_, p), (_, q) in zip(without.named_parameters_hf(), whole.named_parameters_hf(), strict=True):
        p.data.copy_(q)
    assert without.loss(talks(9)) == held


def test_dropout_goes_on_after_a_resume_and_changes_with_step_and_seed(path, tmp_path):
    settings = KINDS["dora"] | {"dropout": 0.3}
    whole, first, second = (sft(path, settings) for _ in range(3))
    for t in (whole, whole, whole, whole, first, first):
        t.learn(talks(0))
    torch.manual_seed(99)  # no generator's state matters
    second.load(first.save(tmp_path))
    second.learn(talks(0)), second.learn(talks(0))
    assert not different(everything(second), everything(whole))
    once = [sft(path, settings), sft(path, settings)]
    once[1].version = 1
    gradients = [t.learn(talks(0)).grad_norm for t in once]
    assert gradients[0] != gradients[1]


def test_frozen_weights_take_their_bytes_and_no_more(path):
    """bf16 base: 2 bytes a frozen weight, 4 + 4 + 8 a trained one; full fine-tuning 16 for every one."""
    half = {"model": {"compute_dtype": "bfloat16"}, "trainer": {"master_dtype": "float32"}}
    t = on(path, "bfloat16", KINDS["lora"], half)
    held = {}

    def count():
        held.update(gradients=sum(p.grad.nbytes for p in t.policy.parameters() if p.grad is not None))

    t.step(batches(0), before_update=count)
    base = [p for n, p in t.policy.named_parameters() if not is_adapter(n)]
    frozen, trained = sum(p.numel() for p in base), sum(p.numel() for p in t.parameters)
    weights = sum(p.nbytes for p in t.policy.parameters())
    state = sum(v.nbytes for s in t.optimizer.state.values() for v in s.values() if v.ndim)
    assert weights == 2 * frozen + 4 * trained
    assert held["gradients"] == 4 * trained and state == 8 * trained
    full = trainer(path)
    full.step(batches(0))
    state = sum(v.nbytes for s in full.optimizer.state.values() for v in s.values() if v.ndim)
    assert sum(2 * p.nbytes for p in full.parameters) + state == 16 * frozen


@pytest.mark.parametrize("kind", KINDS)
def test_what_engines_get_is_the_merged_model(path, kind):
    t = on(path, lora=KINDS[kind])
    run(t, 0, 3)
    plain = prepare(tiny_lm(), torch.float32)
    published = t.published()
    held = [p if isinstance(p, Local) else local_of(n, p) for n, p in published]
    gatherer = Gatherer(held, None)
    frozen_now = {n: p.clone() for n, p in t.named_parameters_hf()}
    run(t, 3, 4)  # training goes on: what was published is what was then
    for bucket in gatherer.buckets:
        stream = gatherer.gather(bucket, held)
        for i in bucket:
            spec = gatherer.manifest.specs[i]
            dict(plain.lm.named_parameters())[spec.name].data.copy_(
                spec.view(stream, gatherer.manifest.specs[bucket[0]].offset)
            )
    for n, p in t.named_parameters_hf():
        p.data.copy_(frozen_now[n])
    batch = pack(make_samples(), 0, CPU)
    with torch.no_grad():
        got, want = plain(batch, 1.0)[0], t.policy(batch, 1.0)[0]
    assert [n for n, _ in published] == [n for n, _ in plain.lm.named_parameters()]
    assert (got - want).norm() < 2e-6 * want.norm()


def test_float8_products_are_the_base_s_alone(path):
    def logp(eight):
        half = {"model": {"compute_dtype": "float8" if eight else "bfloat16"}, "trainer": {"master_dtype": "float32"}}
        t = on(path, "bfloat16", {"rank": 3}, half)
        for layer in t.policy.adapters.layers.values():
            layer.lora_B.weight.data.fill_(0.1)
        with torch.no_grad():
            found = t.policy(pack(make_samples(), 0, CPU), 1.0)[0]
        return found, run(t, 0, 1)[0]["skipped"]

    (eight, skipped), (half, _) = logp(True), logp(False)
    assert skipped is None and 0 < (eight - half).norm() < 0.2 * half.norm()


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"rank": 2, "targets": ["q_proj", "c_attn"]}, "c_attn is no linear layer .* there are down_proj, gate_proj"),
        ({"rank": 2, "targets": ["lm_head"]}, "lm_head is no linear layer"),
        ({"rank": 2, "targets": ["embed_tokens"]}, "embed_tokens is no linear layer"),
        ({"rank": 2, "targets": []}, "empty"),
        ({"rank": 17, "targets": ["k_proj"]}, "lora.rank=17 is more than model.layers.0.self_attn.k_proj"),
    ],
)
def test_what_cannot_be_adapted_is_said(settings, says):
    with pytest.raises(ModelError, match=says):
        attach(prepare(tiny_lm(), torch.float32), LoraConfig(**settings), torch.float32)


def test_targets_are_names_or_their_ends():
    def adapted(*targets):
        policy = prepare(tiny_lm(), torch.float32)
        return list(attach(policy, LoraConfig(rank=2, targets=list(targets)), torch.float32).layers)

    everyone = list(linear_layers(tiny_lm()))
    assert adapted("all-linear") == everyone and len(everyone) == 14
    assert adapted("mlp.up_proj", "q_proj") == [n for n in everyone if n.endswith((".up_proj", ".q_proj"))]
    assert adapted("model.layers.1.mlp.up_proj") == ["model.layers.1.mlp.up_proj"]
    with pytest.raises(ModelError):
        adapted("proj")


def test_values_at_the_start_depend_on_seed_and_name_alone():
    def start(seed, *targets):
        policy = prepare(tiny_lm(), torch.float32)
        adapters = attach(policy, LoraConfig(rank=2, targets=list(targets)), torch.float32, seed)
        return {n: p.detach().clone() for n, p in adapters.parameters()}

    torch.manual_seed(5)
    some, all_, other = start(0, "q_proj"), start(0, "all-linear"), start(1, "q_proj")
    assert all(torch.equal(p, all_[n]) for n, p in some.items())
    name = "model.layers.0.self_attn.q_proj.lora_A.weight"
    assert not torch.equal(some[name], other[name])
    assert not torch.equal(some[name], some[name.replace("layers.0", "layers.1")])


@pytest.mark.slow
@pytest.mark.parametrize("lora", [KINDS["lora"] | {"dropout": 0.2}, KINDS["dora"]], ids=["lora", "dora"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_layers(path, lora, backend, monkeypatch):
    """The same step, and no compilation for a new step, batch or layer beyond those of the first two steps."""
    from torch._dynamo.utils import counters

    from asyncrl.training import levers

    torch._dynamo.reset()
    monkeypatch.setattr(levers, "compiled", lambda f: torch.compile(f, dynamic=True, backend=backend))
    lengths = [11, 5, 23]
    plain, fast = (
        SftTrainer(tiny_run(path, "float32", lora=lora, trainer={"compile": c}), load_policy(path), open_mesh(0, 1))
        for c in (False, True)
    )
    graphs = []
    for step, count in enumerate(lengths):
        for t in (plain, fast):
            t.learn(talks(step, count))
        graphs.append(counters["stats"]["unique_graphs"])
    close(everything(fast), everything(plain), 1e-3)
    assert graphs[2] == graphs[1]
