"""What only a GPU has: flash attention by document, bf16 compute under FSDP2 with NCCL, the head's tensor cores."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from asyncrl.training.attention import document_attention
from asyncrl.training.documents import Documents
from asyncrl.training.mesh import open_mesh
from asyncrl.training.model import prepare
from asyncrl.training.opening import build_trainer
from asyncrl.training.packing import pack
from asyncrl.training.step import Trainer
from kernels.logprob import selected_logprob
from tests.training.ranks import run_ranks
from tests.training.tiny import make_samples, tiny_folder, tiny_lm, tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")]
GPU = torch.device("cuda", 0)


def relative(a, b):
    return float((a.double().cpu() - b.double().cpu()).norm() / b.double().cpu().norm())


@pytest.fixture
def world_of_one(tmp_path):
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("window", [None, 5])
def test_flash_by_document_equals_the_padded_path(window):
    g = torch.Generator().manual_seed(0)
    lengths = [200, 130, 77, 33, 8, 1]
    q, k, v = (torch.randn(1, h, sum(lengths), 64, generator=g) for h in (8, 2, 2))
    weight = torch.randn(1, sum(lengths), 8, 64, generator=g)
    results = {}
    for dtype, device in ((torch.bfloat16, GPU), (torch.float32, GPU), (torch.float64, "cpu")):
        inputs = [x.to(torch.bfloat16).to(device, dtype).requires_grad_() for x in (q, k, v)]
        documents = Documents(lengths, device=device)
        out, _ = document_attention(torch.nn.Identity(), *inputs, None, sliding_window=window, documents=documents)
        assert documents.padding() == (0, 0) or dtype != torch.bfloat16  # the flash path makes no buckets
        grads = torch.autograd.grad((out * weight.to(device, dtype)).sum(), inputs)
        results[dtype] = [out.detach(), *grads]
    for half, single, double in zip(*results.values(), strict=True):
        assert relative(single, double) < 1e-5
        assert relative(half, double) < 1e-2


def test_fp32_on_the_gpu_equals_the_cpu_with_shared_prompts():
    samples = make_samples(groups=6, size=8, prompt=(10, 20))
    found = []
    for device in (GPU, torch.device("cpu")):
        policy = prepare(tiny_lm(), torch.float32).to(device)
        batch = pack(samples, 0, device)
        assert batch.documents.branch_lengths
        logp, _ = policy(batch, 0.7)
        logp.square().sum().backward()
        found.append((logp.detach(), torch.cat([p.grad.flatten() for p in policy.parameters()])))
    assert (found[0][0].cpu() - found[1][0]).abs().max() < 1e-5
    assert relative(found[0][1], found[1][1]) < 1e-5


def test_bf16_compute_keeps_fp32_masters_and_resumes(tmp_path, world_of_one):
    path = tiny_folder(tmp_path / "model")
    cfg = tiny_run(path, "float32", optim={"lr": 1e-6, "warmup_steps": 0})
    cfg.model.compute_dtype = "bfloat16"
    trainer = build_trainer(cfg, 0, 1)
    assert trainer.sharded

    def weights(t):
        return torch.cat([p.full_tensor().detach().flatten() for _, p in t.named_parameters_hf()]).clone()

    before = weights(trainer)
    assert before.dtype == torch.float32
    samples = make_samples(groups=6, size=8, prompt=(10, 20))
    report = trainer.step([samples[:20], [], samples[20:]])
    assert report.skipped is None and np.isfinite(report.loss)
    moved = (weights(trainer) - before).abs()
    assert 0.5e-6 < moved.median() < 2e-6
    folder = trainer.save(tmp_path / "checkpoints")
    trainer.step([samples])
    other = build_trainer(cfg, 0, 1)
    other.load(folder)
    other.step([samples])
    assert relative(weights(other), weights(trainer)) < 1e-9
    cpu = Trainer(tiny_run(path, "float32"), prepare(tiny_lm(), torch.float32), open_mesh(0, 1, torch.device("cpu")))
    want = cpu.step([samples])
    assert report.loss == pytest.approx(want.loss, abs=0.02)
    assert report.grad_norm == pytest.approx(want.grad_norm, rel=0.05)


def test_head_neither_rounds_nor_holds_the_logits():
    m, v, e = 4096, 100_000, 512
    g = torch.Generator(device=GPU).manual_seed(0)
    hidden = torch.randn(m, e, device=GPU, generator=g).bfloat16().requires_grad_()
    weight = (0.1 * torch.randn(v, e, device=GPU, generator=g)).bfloat16().requires_grad_()
    target = torch.randint(0, v, (m,), device=GPU, generator=g)
    exact = torch.cat([(h.double() @ weight.double().t()).log_softmax(-1) for h in hidden.detach().split(512)])
    exact = exact.gather(1, target[:, None])[:, 0]
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    logp, _, _ = selected_logprob(hidden, weight, target, token_chunk=1024)
    logp.sum().backward()
    peak = torch.cuda.max_memory_allocated() - base
    assert (logp.double() - exact).abs().max() < 1e-4
    # fp32 dW and dH, their bf16 copies, and a few buffers of 1024 x 8192 logits; all logits would take 1.6 GB.
    assert peak < 6 * (v + m) * e + 6 * 4 * 1024 * 8192


def gradient_job(rank, world, path):
    """(gradient, loss) of one step in fp32 and in bf16, on this rank's GPU."""
    out = {}
    for dtype in ("float32", "bfloat16"):
        cfg = tiny_run(path, "float32")
        cfg.model.compute_dtype = dtype
        trainer, seen = build_trainer(cfg, rank, world), []

        def look(trainer=trainer, seen=seen):
            for _, p in trainer.named_parameters_hf():
                grad = p.grad.full_tensor() if trainer.sharded else p.grad
                seen.append(grad.double().cpu().numpy().ravel())

        mine = make_samples(groups=6, size=8)[rank::world]
        report = trainer.step([mine, []] if rank else [mine[:5], mine[5:]], look)
        out[dtype] = np.concatenate(seen), report.loss
    return out


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_two_gpus_give_the_gradient_of_one(tmp_path):
    path = tiny_folder(tmp_path / "model")
    backend = "cpu:gloo,cuda:nccl"
    (one,) = run_ranks(1, gradient_job, path, backend=backend)
    for two in run_ranks(2, gradient_job, path, backend=backend):
        for dtype, limit in (("float32", 1e-5), ("bfloat16", 2e-2)):
            gradient, loss = two[dtype]
            want, want_loss = one[dtype]
            error = np.linalg.norm(gradient - want) / np.linalg.norm(want)
            print(f"{dtype}: gradient on two GPUs against one: {error:.2e}")
            assert error < limit
            assert loss == pytest.approx(want_loss, abs=0.01)
