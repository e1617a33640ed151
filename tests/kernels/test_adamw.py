from __future__ import annotations

import copy
import math

import pytest
import torch

from kernels import adamw as compiled
from kernels.adamw import BLOCK, MOMENT_BITS, Hyper, Job, adamw, adamw_reference, stochastic_round
from kernels.philox import philox_reference, rounding_bits
from tests.kernels.interpreted import interpreted

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ONE = torch.ones(1)


@pytest.fixture(scope="module")
def triton_step():
    """The kernel on whichever device the tensors are: compiled on a GPU, interpreted on the CPU."""
    slow = interpreted("kernels.adamw").adamw_triton

    def step(jobs, factor, seed=0, **more):
        on_gpu = jobs[0].weight.is_cuda
        (compiled.adamw_triton if on_gpu else slow)(jobs, factor.to(jobs[0].weight.device), seed, **more)

    return step


def make_jobs(weight="fp32", grad="fp32", sizes=(3 * BLOCK + 5, 33, 1, 64), device="cpu", seed=0) -> list[Job]:
    g = torch.Generator().manual_seed(seed)

    def normal(n, scale, dtype):
        return (scale * torch.randn(n, generator=g)).to(DTYPES[dtype]).to(device)

    return [
        Job(
            normal(n, 0.5, weight),
            normal(n, 0.1, grad),
            normal(n, 0.05, weight),
            normal(n, 0.1, weight).square(),
            step=1 + 7 * i,
            hyper=Hyper(1e-2 * (i + 1), 0.9, 0.999, 1e-8, 0.1 * i),
            tensor=i,
            first=1000 * i,
        )
        for i, n in enumerate(sizes)
    ]


def results(jobs):
    return [x.cpu() for job in jobs for x in (job.weight, job.exp_avg, job.exp_avg_sq)]


def test_philox_gives_the_published_vectors():
    """Known answers of Random123 (kat_vectors) for 7 and 10 rounds."""
    zero, ones = (torch.tensor([x]) for x in (0, 0xFFFFFFFF))
    assert [int(w) for w in philox_reference((zero,) * 4, (0, 0), 7)] == [
        0x5F6FB709,
        0x0D893F64,
        0x4F121F81,
        0x4F730A48,
    ]
    assert [int(w) for w in philox_reference((zero,) * 4, (0, 0), 10)] == [
        0x6627E8D5,
        0xE169C58D,
        0xBC57AC4C,
        0x9B00DBD8,
    ]
    assert [int(w) for w in philox_reference((ones,) * 4, (0xFFFFFFFF, 0xFFFFFFFF), 10)] == [
        0x408F276D,
        0x41C83B0E,
        0xA20BC7C6,
        0x6D5451FD,
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weight", "grad"), [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("bf16", "fp32")])
def test_the_kernel_equals_its_reference_bit_for_bit(weight, grad, device, triton_step):
    """Several blocks, tails, unaligned sizes, own step, learning rate and decay of each tensor, a seed above 2^32."""
    ours = make_jobs(weight, grad, device=device)
    want = copy.deepcopy(ours)
    for seed in (0, (3 << 40) + 12345, None):
        if seed is None and weight == "bf16" and device == "cpu":
            continue  # the interpreter truncates fp32 to bf16 where a GPU rounds to nearest
        triton_step(ours, torch.tensor([0.3]), seed)
        adamw_reference(want, torch.tensor([0.3]), seed)
        for a, b in zip(results(ours), results(want), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("device", DEVICES)
def test_aligned_and_unaligned_tensors_give_the_same(device, triton_step):
    aligned = make_jobs("bf16", "bf16", sizes=(2048, 64), device=device)
    shifted = copy.deepcopy(aligned)
    for job in shifted:  # the same values one element further on
        for name in ("weight", "grad", "exp_avg", "exp_avg_sq"):
            value = getattr(job, name)
            setattr(job, name, torch.cat([value[:1], value])[1:])
    triton_step(aligned, ONE)
    triton_step(shifted, ONE)
    assert all(torch.equal(a, b) for a, b in zip(results(aligned), results(shifted), strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_the_result_does_not_depend_on_the_size_of_a_block(device, triton_step):
    results_of = []
    for block in (256, 1024, 4096):
        jobs = make_jobs("bf16", "bf16", device=device)
        triton_step(jobs, ONE, 7, block=block)
        results_of.append(results(jobs))
    assert all(torch.equal(a, b) for other in results_of[1:] for a, b in zip(results_of[0], other, strict=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("grad", ["fp32", "bf16"])
def test_fp32_weights_follow_torch_adamw(grad, device, triton_step):
    """Ten steps of kernel and reference stay within fp32 rounding of torch.optim.AdamW in float64."""
    (job,) = make_jobs(sizes=(700,), device=device)
    job.hyper = Hyper(1e-2, 0.9, 0.95, 1e-8, 0.1)
    job.exp_avg.zero_(), job.exp_avg_sq.zero_()
    other = copy.deepcopy(job)
    p = torch.nn.Parameter(job.weight.double())
    optimizer = torch.optim.AdamW([p], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 11):
        gradient = torch.randn(700, generator=torch.Generator().manual_seed(step)).to(DTYPES[grad]).to(device)
        p.grad = gradient.double()
        optimizer.step()
        for each, run in ((job, triton_step), (other, adamw_reference)):
            each.grad, each.step = gradient, step
            run([each], ONE)
            assert float((each.weight.double() - p.detach()).norm() / p.detach().norm()) < 2e-7


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("factor", [-1.0, math.nan])
def test_a_dropped_step_changes_nothing(factor, device, triton_step):
    for weight in DTYPES:
        jobs = make_jobs(weight, device=device)
        for job in jobs:
            job.grad.fill_(math.nan)
        before = [x.clone() for x in results(jobs)]
        triton_step(jobs, torch.tensor([factor]))
        adamw_reference(jobs, torch.tensor([factor]))
        assert all(torch.equal(a, b) for a, b in zip(results(jobs), before, strict=True))


def test_rounding_is_exactly_unbiased_over_all_bits():
    """Closed form: over the 65,536 equally likely values of the bits the mean of the results is x itself."""
    bits = torch.arange(65536, dtype=torch.int32)
    for x in (1.0, 1.0 + 2**-20, -0.02 + 1e-6, 3.14159274, 1e-30, -65504.0):
        value = torch.full((65536,), x)
        rounded = stochastic_round(value, bits)
        assert rounded.double().mean().item() == value[0].double().item()
        assert len(rounded.unique()) <= 2
    for a, b in MOMENT_BITS:  # one to one, so the moments' rounding is as exact
        assert len(((bits * a + b) & 0xFFFF).unique()) == 65536


def test_rounding_keeps_what_is_not_finite():
    x = torch.tensor([math.inf, -math.inf, math.nan])
    x[2] = torch.tensor([0x7F800001], dtype=torch.int32).view(torch.float32)  # a NaN whose bf16 part says infinity
    for bits in (0, 65535):
        assert str(stochastic_round(x, torch.full((3,), bits, dtype=torch.int32)).tolist()) == "[inf, -inf, nan]"


def test_rounding_of_many_elements_has_no_bias():
    """Rounding up with probability f, n independent times: the count is binomial; |z| < 5 fails one run in a million.

    The bits must also not depend on each other: neighbours, steps and tensors are uncorrelated to 5 sigma.
    """
    n, f = 1 << 18, 0.3
    low, step = 1.0, 2.0**-7
    x = torch.full((n,), low + f * step)
    exact = (float(x[0]) - low) / step
    draws = [
        rounding_bits(n, seed, t, tensor, 0, CPU) for seed, t, tensor in ((0, 1, 0), (0, 2, 0), (0, 1, 1), (1, 1, 0))
    ]
    ups = [(stochastic_round(x, bits) > low).double() for bits in draws]
    for up in ups:
        assert abs(up.sum().item() - n * exact) / math.sqrt(n * exact * (1 - exact)) < 5
    pairs = [(ups[0], other) for other in ups[1:]] + [(ups[0][:-k], ups[0][k:]) for k in (1, 2, 8)]
    for a, b in pairs:
        correlation = ((a - exact) * (b - exact)).mean().item() / (exact * (1 - exact))
        assert abs(correlation) * math.sqrt(len(a)) < 5


def test_updates_of_one_millionth_survive_in_bf16():
    """bf16(0.02) - 1e-6 == bf16(0.02): to nearest nothing would move. The mean of 16,384 weights moves by 16 x 1e-6.

    A weight is off by less than one bf16 step, 2^-13 at 0.02, variance at most (2^-13)^2 / 4 a rounding: five standard
    deviations of the mean after 16 roundings are 5 * 4 * 2^-14 / 128 = 9.5e-6, so 1e-5 is allowed.
    """
    n = 16384
    job = Job(
        *(torch.full((n,), v).to(torch.bfloat16) for v in (0.02, 1.0, 0.0, 0.0)), 1, Hyper(1e-6, 0.0, 0.0, 0.0, 0.0)
    )
    start = job.weight.double().mean().item()
    assert job.weight[0] - 1e-6 == job.weight[0]
    for job.step in range(1, 17):
        adamw([job], ONE)
    moved = start - job.weight.double().mean().item()
    assert abs(moved - 16e-6) < 1e-5 and len(job.weight.unique()) > 1


def test_the_second_moment_shrinks_in_bf16():
    """beta2 = 0.999 on a gradient of zero: to nearest v would stay for ever; its mean must follow 0.999^t."""
    n, steps = 4096, 200
    job = Job(
        *(torch.full((n,), v).to(torch.bfloat16) for v in (0.0, 0.0, 0.0, 1.5)), 1, Hyper(0.0, 0.9, 0.999, 1e-8, 0.0)
    )
    for job.step in range(1, steps + 1):
        adamw([job], ONE)
    want = 1.5 * 0.999**steps
    # A rounding's variance is at most (2^-7)^2 / 4; 200 of them over 4096 elements, five standard deviations.
    assert abs(job.exp_avg_sq.double().mean().item() - want) < 5 * math.sqrt(steps) * 2**-8 / math.sqrt(n)


def test_the_bits_depend_on_the_place_in_the_whole_tensor():
    """A shard that begins at a multiple of eight continues the stream of the one before."""
    whole = rounding_bits(64, 5, 3, 2, 0, CPU)
    assert torch.equal(whole[24:], rounding_bits(40, 5, 3, 2, 24, CPU))
    assert not torch.equal(whole, rounding_bits(64, 5, 4, 2, 0, CPU))


def test_shards_that_are_not_contiguous_are_refused(triton_step):
    (job,) = make_jobs(sizes=(64,))
    job.grad = torch.randn(128)[::2]
    with pytest.raises(ValueError, match="contiguous"):
        triton_step([job], ONE)


def test_autograd_notices_a_weight_that_changes_under_it(triton_step):
    (job,) = make_jobs(sizes=(64,))
    weight = job.weight.requires_grad_()
    loss = (weight * weight).sum()
    triton_step([job], ONE)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_the_kernel_compiles_to_wide_accesses_without_fused_multiply_add():
    """For an H100 or H200, without one: 16-byte loads and stores, no FMA (the reference has none), no shared memory."""
    import triton.language as tl
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = {
        "WEIGHT": tl.bfloat16,
        "GRAD": tl.bfloat16,
        "ROUND": True,
        "ROUNDS": 7,
        "ALIGNED": True,
        "BLOCK": BLOCK,
    }
    types = ["*i64", "*i32", "*fp32", *["fp32"] * 4, *["constexpr"] * 6]
    signature = dict(zip(compiled._kernel.arg_names, types, strict=True))
    options = {"num_warps": 4, "enable_fp_fusion": False}
    built = compile(
        ASTSource(compiled._kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options
    )
    ptx = built.asm["ptx"]
    assert ptx.count("ld.global.v4") == 4 and ptx.count("st.global.v4") == 3 and "fma.rn" not in ptx
    assert built.metadata.shared == 0
