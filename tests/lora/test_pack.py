"""Each adapter of a pack against the same adapter trained alone, and what one adapter does to the others: nothing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.lora.pack import PackTrainer
from asyncrl.lora.row import passes
from asyncrl.lora.slot import Slot
from asyncrl.training.errors import ModelError
from asyncrl.training.model import load_policy
from asyncrl.training.sft import pack_conversations
from tests.lora.cases import JOBS, alone, batch, distance, job, learn, packed, same, state, steps_of
from tests.training.tiny import tiny_folder

SAME = ("loss", "grad_norm", "lr", "tokens", "samples", "micro_batches", "packing_efficiency", "padding_share")


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.mark.parametrize("head", ["policy", "logprob"])
def test_a_packed_adapter_learns_what_it_learns_alone(path, head):
    """T0 for a whole model: ranks, alphas, targets, schedules, batch sizes, accumulation, dropout and clips differ."""
    cfgs = {kind: job(path, kind, algorithm={"loss_head": head}) for kind in JOBS}
    pack, slots = packed(cfgs)
    reports = {kind: [] for kind in JOBS}
    for _ in range(3):
        for kind, report in learn(pack, slots).items():
            reports[kind].append(report)
    for kind, cfg in cfgs.items():
        solo = alone(cfg)
        wanted = steps_of(solo, kind, 3)
        assert distance(state(slots[kind]), state(solo)) < 1e-9
        for found, want in zip(reports[kind], wanted, strict=True):
            for name in SAME:
                assert getattr(found, name) == pytest.approx(getattr(want, name), rel=1e-9), (kind, name)
            assert found.skipped is want.skipped is None
    assert [r.micro_batches for r in reports["dropped"]] != [1, 1, 1]
    assert reports["dropped"][0].grad_norm > cfgs["dropped"].optim.clip_norm, "the clip acts"


def run_of(path, kinds, steps, then=lambda step, slots: None, **sections):
    """(state of each slot after ``steps`` steps, all reports); ``then`` is called before each step."""
    pack, slots = packed({kind: job(path, kind, **sections) for kind in kinds})
    reports = []
    for step in range(steps):
        then(step, slots)
        reports.append(learn(pack, slots))
    return {kind: state(slot) for kind, slot in slots.items()}, reports


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_t4_deterministic_bits_depend_on_nothing_else_in_the_pack(path, dtype):
    """Alone, first, last and in the middle of others, with a row that is cut and one that is not."""
    sections = {"packing": {"deterministic": True}, "model": {"compute_dtype": dtype}}
    sections["trainer"] = {"master_dtype": "float32"}
    packs = [("dropped", "plain", "rs"), ("rs", "dropped"), ("plain",), ("dropped",), ("rs",)]
    found = [run_of(path, kinds, 4, dtype="float32", **sections)[0] for kinds in packs]
    for kind in JOBS:
        first, *others = [states[kind] for states in found if kind in states]
        assert others and all(same(first, other) for other in others), kind


def spoil_weights(slot):
    slot.weights["model.layers.0.mlp.down_proj.lora_B.weight"][0, 0] = math.nan


def spoil_activations(slot):
    """An activation that overflows where this slot's tokens are: an A that is as large as numbers get."""
    slot.weights["model.layers.0.self_attn.q_proj.lora_A.weight"].fill_(torch.finfo(torch.float32).max)
    slot.weights["model.layers.0.self_attn.q_proj.lora_B.weight"].fill_(math.inf)


def spoil_moments(slot):
    for moments in slot.optimizer.state.values():
        moments["exp_avg"].fill_(math.inf)


@pytest.mark.parametrize("spoil", [spoil_weights, spoil_activations, spoil_moments])
@pytest.mark.parametrize("head", ["policy", "logprob"])
def test_row_t5_what_is_not_finite_in_one_adapter_changes_no_bit_of_another(path, spoil, head):
    def then(step, slots):
        if step == 1:
            with torch.no_grad():
                spoil(slots["plain"])

    given = {"dtype": "float32", "algorithm": {"loss_head": head}}
    well, before = run_of(path, JOBS, 4, **given)
    ill, reports = run_of(path, JOBS, 4, then, **given)
    for kind in ("dropped", "rs"):
        assert same(ill[kind], well[kind]) and [r[kind] for r in reports] == [r[kind] for r in before]
    assert reports[0]["plain"] == before[0]["plain"]
    refused = [r["plain"].skipped for r in reports]
    assert refused[0] is None and (refused[1] is None) == (spoil is spoil_moments)
    assert all(reason.endswith("_not_finite") for reason in refused[2:])


def test_a_gradient_that_is_not_finite_is_refused_and_the_slot_stays(path, monkeypatch):
    pack, slots = packed({kind: job(path, kind, dtype="float32") for kind in JOBS})
    learn(pack, slots)
    before = state(slots["rs"])
    close = PackTrainer._close

    def spoiled(self, lessons):
        self.bank.part(slots["rs"].resident, self.bank.buffers.grad)[3] = math.inf
        return close(self, lessons)

    monkeypatch.setattr(PackTrainer, "_close", spoiled)
    reports = learn(pack, slots)
    assert reports["rs"].skipped == "gradient_not_finite" and reports["plain"].skipped is None
    assert same(state(slots["rs"]), before) and slots["rs"].version == 2 and slots["rs"].strikes == 1
    assert dict(slots["rs"].skipped) == {"gradient_not_finite": 1}
    monkeypatch.undo()
    assert learn(pack, slots)["rs"].skipped is None and slots["rs"].strikes == 0


def test_row_t6_who_joins_late_or_leaves_early_learns_the_same(path):
    cfgs = {kind: job(path, kind) for kind in JOBS}
    pack, slots = packed({"plain": cfgs["plain"], "rs": cfgs["rs"]})
    learn(pack, slots)
    slots["dropped"] = Slot(pack, cfgs["dropped"])
    learn(pack, slots)
    gone = slots.pop("plain")
    ended = state(gone)
    gone.close()  # the other two move up
    learn(pack, slots)
    learn(pack, {"dropped": slots["dropped"]})  # rs misses a step
    found = {"plain": ended, **{kind: state(slot) for kind, slot in slots.items()}}
    for kind, count in (("plain", 2), ("dropped", 3), ("rs", 3)):
        solo = alone(cfgs[kind])
        steps_of(solo, kind, count)
        assert distance(found[kind], state(solo)) < 1e-9


def test_a_checkpoint_goes_on_in_another_slot_and_in_a_trainer_of_its_own(path, tmp_path):
    cfgs = {kind: job(path, kind) for kind in JOBS}
    pack, slots = packed(cfgs)
    for _ in range(2):
        learn(pack, slots)
    folders = {kind: slot.save(tmp_path / kind) for kind, slot in slots.items()}
    other, moved = packed({kind: cfgs[kind] for kind in reversed(cfgs)})
    for kind in JOBS:
        single, solo = alone(cfgs[kind]), alone(cfgs[kind])
        steps_of(solo, kind, 2)
        moved[kind].load(solo.save(tmp_path / f"solo {kind}"))  # of a run alone into the pack
        single.load(folders[kind])  # and the other way round
        steps_of(single, kind, 1), steps_of(solo, kind, 1)
        assert distance(state(single), state(solo)) < 1e-9
    learn(other, moved)
    learn(pack, slots)
    for kind in JOBS:
        assert distance(state(moved[kind]), state(slots[kind])) < 1e-9
        assert moved[kind].version == 3


def test_a_row_without_adapter_is_the_base(path):
    pack, slots = packed({kind: job(path, kind, dtype="float32") for kind in JOBS})
    learn(pack, slots)
    row = pack_conversations(batch("plain", 0), torch.device("cpu"))
    base = load_policy(path)
    with torch.no_grad():
        want = base(row, 1.0)[0]
        assert torch.equal(pack.policy(row, 1.0)[0], want)
        nobody = pack.bank.reading_of(torch.full((row.input_1T.shape[1],), -1))
        with pack.bank.reads(nobody):
            assert torch.equal(pack.policy(row, 1.0)[0], want)
        assert not torch.equal(slots["plain"].policy(row, 1.0)[0], want)


def test_every_module_of_every_adapter_learns(path):
    """One forward for several adapters trains them all, in all layers (PEFT #631, mLoRA #138)."""
    pack, slots = packed({kind: job(path, kind) for kind in JOBS})
    start = {kind: state(slot) for kind, slot in slots.items()}
    learn(pack, slots), learn(pack, slots)
    for kind, slot in slots.items():
        moved = state(slot)
        assert all(not torch.equal(moved[name], start[kind][name]) for name in slot.weights)
        assert not any(p.requires_grad for p in pack.policy.parameters())


def test_recomputed_layers_learn_the_same(path):
    plain, again = (
        run_of(path, JOBS, 2, trainer={"activation_checkpointing": choice})[0] for choice in ("none", "full")
    )
    assert max(distance(again[kind], plain[kind]) for kind in JOBS) < 1e-12


def test_a_cap_cuts_the_pack_into_passes_and_changes_nothing(path):
    whole, cut = (run_of(path, JOBS, 2, packing={"token_cap": cap})[0] for cap in (10_000, 40))
    assert max(distance(cut[kind], whole[kind]) for kind in JOBS) < 1e-10


@given(
    st.dictionaries(st.integers(0, 5), st.lists(st.integers(0, 9), max_size=6), max_size=6),
    st.integers(0, 20),
)
def test_passes_hold_each_micro_batch_once_in_its_order(sizes, cap):
    found = passes(sizes, cap)
    taken = [(key, number) for row in found for key, number in row]
    assert sorted(taken) == sorted((k, i) for k, mine in sizes.items() for i, tokens in enumerate(mine) if tokens)
    for key in sizes:
        assert [i for k, i in taken if k == key] == sorted(i for k, i in taken if k == key)
    for row in found:
        assert len({key for key, _ in row}) == len(row) > 0
        assert len(row) == 1 or sum(sizes[key][i] for key, i in row) <= cap


def test_a_step_without_a_learnt_token_is_refused(path):
    pack, slots = packed({kind: job(path, kind) for kind in ("plain", "rs")})
    before = state(slots["plain"])
    reports = pack.learn({slots["plain"]: [], slots["rs"]: batch("rs", 0)})
    assert reports[slots["plain"]].skipped == "no_tokens" and reports[slots["rs"]].skipped is None
    assert same(state(slots["plain"]), before) and slots["plain"].version == 1


def test_an_adapter_that_does_not_fit_leaves_the_pack_as_it_was(path):
    pack, slots = packed({"plain": job(path, "plain")})
    learn(pack, slots)
    before = state(slots["plain"])
    for lora, says in (({"rank": 33}, "more than"), ({"rank": 2, "targets": ["c_attn"]}, "c_attn is no linear layer")):
        with pytest.raises(ModelError, match=says):
            Slot(pack, job(path, "rs", lora=lora))
    assert len(pack.slots) == len(pack.bank.residents) == 1 and same(state(slots["plain"]), before)


def test_it_starts_from_an_adapter_in_a_folder(path, tmp_path):
    solo = alone(job(path, "plain"))
    steps_of(solo, "plain", 2)
    folder = solo.save(tmp_path) / "adapter"
    cfgs = [job(path, "plain", model={"adapter": str(folder)}, lora={"rank": 0}) for _ in range(2)]
    pack = PackTrainer(cfgs[0])
    slot, again = Slot(pack, cfgs[0]), alone(cfgs[1])
    assert distance(dict(slot.named_parameters_hf()), dict(solo.named_parameters_hf())) == 0
    pack.learn({slot: batch("plain", 0)}), again.learn(batch("plain", 0))
    assert distance(state(slot), state(again)) < 1e-9
