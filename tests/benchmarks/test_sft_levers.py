"""Rows, figures and claims of the ladder, and that its plain trainer learns what ours does."""

from __future__ import annotations

import pytest
import torch

from benchmarks.sft_levers import BASELINE, GPU_ONLY, LADDER, compare, not_offered, rows_of
from benchmarks.sft_levers_run import build, config, fill
from benchmarks.talks import TINY, as_tokens, draw

CPU_LEVERS = [name for name in LADDER if name not in (*GPU_ONLY, "8-bit")]


def row(speed, memory, losses=(2.0,)):
    return {"tokens_per_cpu_s": speed, "above_loaded_bytes": memory, "losses": list(losses)}


def test_each_lever_is_alone_once_and_then_on_top_of_those_before():
    rows = rows_of(["8-bit"], each=True)
    assert list(rows)[:2] == [BASELINE, "packing alone"] and rows[BASELINE] == []
    assert [levers for name, levers in rows.items() if name.endswith("alone")] == [[name] for name in LADDER[:-1]]
    assert rows["+ compile"] == ["packing", "compile"]
    assert rows["+ offload"] == list(LADDER[:-1])
    short = rows_of(["8-bit"], each=False)
    assert [name for name in short if name.startswith("+")] == ["+ offload"]


def test_8_bit_states_take_the_place_of_in_backward():
    rows = rows_of([], each=True)
    assert "in-backward" not in rows["+ 8-bit"] and len(rows["+ 8-bit"]) == len(LADDER) - 1


def test_what_is_left_out_has_a_reason():
    assert set(not_offered(gpu=False, torchao=True)) == {"8-bit", *GPU_ONLY}
    assert "torchao is not installed" in not_offered(gpu=True, torchao=False)["8-bit"]
    assert not_offered(gpu=True, torchao=True) == {}


def test_claims_are_relative_to_the_baseline():
    names = [BASELINE, *(f"{name} alone" for name in CPU_LEVERS), "+ in-backward"]
    rows = {name: row(10.0, 100) for name in names}
    rows["packing alone"] = row(15.0, 100)
    rows["chunked loss alone"] = row(10.0, 80)
    rows["activation checkpointing alone"] = row(10.0, 90)
    rows["+ in-backward"] = row(15.0, 50)
    assert all(claim.met for claim in compare(rows, gpu=False))
    rows["+ in-backward"] = row(14.0, 51, losses=[2.1])
    missed = [claim.name for claim in compare(rows, gpu=False) if not claim.met]
    assert len(missed) == 3 and all(word in " ".join(missed) for word in ("together: tokens", "together: mem", "loss"))


def test_levers_are_the_keys_that_a_user_sets():
    cfg = config(["activation checkpointing", "in-backward", "compile", "offload"], gpu=True, budget=64)
    assert (cfg.trainer.activation_checkpointing, cfg.trainer.compile, cfg.trainer.activation_offload) == (
        "full",
        True,
        True,
    )
    assert cfg.optim.in_backward and cfg.trainer.master_dtype == "bfloat16"
    plain = config([], gpu=False, budget=64)
    assert plain.trainer.activation_checkpointing == "none" and not plain.optim.in_backward


def test_filled_conversations_have_one_length_and_learn_nothing_more():
    talks = as_tokens(draw(4), TINY.vocab_size)
    filled = fill(talks)
    assert {len(c) for c in filled} == {max(map(len, talks))}
    for c, before in zip(filled, talks, strict=True):
        assert c.ids[: len(before)].tolist() == before.ids.tolist()
        assert c.learnt.sum() == before.learnt.sum() and not c.learnt[len(before) :].any()


@pytest.mark.parametrize("levers", [["packing"], ["chunked loss"], CPU_LEVERS], ids=" ".join)
def test_a_lever_changes_no_loss_and_no_weight(levers):
    batches = [as_tokens(draw(3, seed), TINY.vocab_size) for seed in (0, 1)]
    plain, other = (build(names, TINY, gpu=False, budget=4096) for names in ([], levers))
    for batch in batches:
        assert other.learn(batch).loss == pytest.approx(plain.learn(batch).loss, rel=1e-5)
    weights = [torch.cat([p.detach().flatten() for p in t.parameters]) for t in (plain, other)]
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < 1e-5


def test_the_baseline_pads_and_the_lever_does_not():
    talks = as_tokens(draw(3), TINY.vocab_size)
    seen = []
    for levers in ([], ["packing"]):
        trainer = build(levers, TINY, gpu=False, budget=4096)
        trainer.policy.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].input_1T.shape[1]))
        trainer.learn(talks)
    assert seen == [3 * (max(map(len, talks)) - 1), sum(map(len, talks)) - 3]
