"""Both heads with the vocabulary over 2 and 4 gloo ranks, torch and interpreted Triton. One launch answers all."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch

from kernels.vocab_parallel import shard_bounds
from tests.kernels.dense import dense, logits, problem, results
from tests.kernels.parallel_job import ALL, INTERPRETED, VOCABULARIES, job, large_problem
from tests.kernels.test_policy_loss import reference
from tests.training.ranks import run_ranks

CASES = [(v, "torch") for v in VOCABULARIES] + [(v, "triton") for v in INTERPRETED]


@pytest.fixture(scope="module")
def ranks():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")  # for the ranks, which import Triton after it
        return run_ranks(4, job)


def agree(got, want, limit, scalar_first=False):
    want = [x.detach().double().numpy() for x in want]
    assert len(got) == len(want)
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        size = 1.0 if scalar_first and i == 0 else np.linalg.norm(b)  # a sum of terms of order one that cancel
        assert np.linalg.norm(a - b) <= limit * size, i


@pytest.mark.parametrize(("v", "backend"), CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_row_19_logp_entropy_lse_and_gradients_equal_dense(ranks, v, size, backend):
    """#19 of the notes: pytorch #190746, ms-swift #9947, torchtitan #3822, #4683."""
    exact = problem(v=v, dtype=torch.float64 if backend == "torch" else torch.float32, **ALL).double()
    want = results(exact, dense(exact))
    for seen in ranks:
        agree(seen["logprob", size, v, backend]["results"], want, 1e-12 if backend == "torch" else 1e-6)


@pytest.mark.parametrize(("v", "backend"), CASES)
@pytest.mark.parametrize("size", [2, 4])
def test_the_policy_loss_head_equals_dense(ranks, v, size, backend):
    want = reference(problem(v=v, dtype=torch.float64 if backend == "torch" else torch.float32, **ALL))
    for seen in ranks:
        agree(seen["policy", size, v, backend]["results"], want, 1e-12 if backend == "torch" else 1e-6, True)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("v", VOCABULARIES)
def test_dtensors_say_themselves_where_they_lie(ranks, v, size):
    exact = problem(v=v, **ALL)
    for seen in ranks:
        agree(seen["dtensor", size, v], results(exact, dense(exact)), 1e-12)


def test_two_collectives_forward_and_one_backward(ranks):
    for seen in ranks:
        for (name, *_), found in ((k, v) for k, v in seen.items() if isinstance(k, tuple)):
            if name == "logprob":
                assert found["collectives"] == (["MAX", "SUM"], ["SUM"])
            elif name == "policy":  # 11 tokens in chunks of 4; hidden's gradient is complete after forward
                assert found["collectives"] == (["MAX", "SUM"] * 3 + ["SUM"], [])


def test_outputs_are_bit_equal_on_all_ranks(ranks):
    for key in (k for k in ranks[0] if isinstance(k, tuple) and k[0] in ("logprob", "policy")):
        for seen in ranks[1:]:
            for a, b in zip(ranks[0][key]["results"], seen[key]["results"], strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_a_vocabulary_of_151643_on_four_ranks(ranks, dtype, limit):
    assert [shard_bounds(151_643, 4, rank) for rank in (0, 3)] == [(0, 37_911), (113_733, 151_643)]
    exact = large_problem(dtype).double()
    want = results(exact, dense(exact))
    for seen in ranks:
        agree(seen["large", str(dtype)], want, limit)


def test_bf16_on_four_ranks_errs_at_most_like_a_dense_bf16_computation(ranks):
    """Over 151,643 tokens; dense is bf16 logits and an fp32 softmax on one rank, as trainers without a head do it."""
    p = large_problem(torch.bfloat16)
    exact, rounded = p.double(), logits(p).float()
    logp = rounded.log_softmax(-1)
    outputs = logp.gather(1, p.target[:, None])[:, 0], -(logp.exp() * logp).sum(-1), rounded.logsumexp(-1)
    every = zip(results(exact, dense(exact)), results(p, outputs), strict=True)
    for i, (truth, theirs) in enumerate(every):
        truth = truth.detach().numpy()
        usual = np.linalg.norm(theirs.detach().double().numpy() - truth)
        for seen in ranks:
            assert np.linalg.norm(seen["large", str(torch.bfloat16)][i] - truth) <= 1.25 * usual, i


def test_row_18_no_rank_holds_the_logits_of_the_whole_vocabulary(ranks):
    """#18 of the notes, torchtune #2693: a full chunk of logits on every TP rank."""
    for seen in ranks:
        for size in (2, 4):
            found = seen["memory", size]
            assert found["four"] <= 64 * 50
            assert found["three"] <= 64 * 600 // size


def test_row_22_ranks_whose_tokens_are_all_masked_take_part(ranks):
    """#22 of the notes: the loss has no gradient, FSDP hangs."""
    assert all(seen["empty", size] for seen in ranks for size in (2, 4))


def test_layouts_that_cannot_work_are_refused(ranks):
    for rank, seen in enumerate(ranks):
        no_size, whole, two, columns = seen["refused"]
        start, end = shard_bounds(23, 4, rank)
        assert "give the head's weight as a DTensor, or this rank's rows and vocab_size" in no_size
        assert f"rank {rank} of 4 has rows {start} to {end} of a vocabulary of 23, and its weight has 23 rows" in whole
        assert "give one dimension of the mesh, for example mesh['tp']" in two
        assert "sharded over the vocabulary on one mesh dimension" in columns


@pytest.mark.parametrize(("v", "n"), [(5, 4), (23, 4), (151_643, 8), (3, 8), (128_256, 8)])
def test_shards_are_those_of_torch_chunk(v, n):
    sizes = [len(c) for c in torch.arange(v).chunk(n)]
    bounds = [shard_bounds(v, n, rank) for rank in range(n)]
    assert [end - start for start, end in bounds] == sizes + [0] * (n - len(sizes))
    assert bounds[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(bounds))
