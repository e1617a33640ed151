"""Figures and claims of the comparison with TRL, on made-up legs; and what both sides are given."""

from __future__ import annotations

import json

import pytest
from transformers import AutoTokenizer

from asyncrl.config.schema import SftConfig
from asyncrl.data.chat import encode
from asyncrl.data.example import Example
from benchmarks.jobs import clean, pinned, run_job
from benchmarks.meter import Meter, digest, resident_bytes
from benchmarks.sft_vs_trl import (
    THREADS,
    compare,
    cpu_plan,
    expected_ratio,
    gpu_plan,
    in_order,
    our_config,
    rates,
    trl_job,
    with_tokens,
    worst_difference,
)
from benchmarks.talks import TINY, Shape, as_tokens, draw, write_jsonl, write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    write_model(folder, TINY)
    return folder


def leg(speed, memory=100, above=50, losses=(2.0, 1.0)):
    return {
        "tokens_per_s": speed,
        "tokens_per_cpu_s": speed / 2,
        "peak_bytes": memory,
        "above_loaded_bytes": above,
        "losses": list(losses),
    }


def verdicts(ours, trl, plan=None, same=None):
    same = {"padded": True} if same is None else same
    return {claim.name: (claim.value, claim.met) for claim in compare(plan or cpu_plan(True), ours, trl, same)}


def test_tokens_of_warm_steps_are_neither_counted_nor_timed():
    steps = [{"time_s": 10.0, "cpu_s": 20.0}, {"time_s": 12.0, "cpu_s": 21.0}, {"time_s": 14.0, "cpu_s": 22.0}]
    told = with_tokens(steps, [5, 5, 7, 7, 1, 1], batch=2)
    assert [step["all_tokens"] for step in told] == [10, 24, 26]
    assert rates(told, warm=1) == {"tokens_per_s": 16 / 4, "tokens_per_cpu_s": 16 / 2}
    with pytest.raises(SystemExit, match="only 3 steps"):
        rates(told, warm=3)


def test_the_best_of_ours_is_compared_with_the_best_of_trl():
    ours = {"a": leg(130, memory=90, above=40), "b": leg(120, memory=1)}
    found = verdicts(ours, {"padded": leg(50, memory=10), "packed": leg(100)})
    assert found["tokens per second, over TRL"] == (pytest.approx(1.3), True)
    assert found["tokens per second of the processor, over TRL"] == (pytest.approx(1.3), True)
    assert found["peak memory, over TRL"] == (pytest.approx(0.9), True)
    assert found["peak memory above loading, over TRL"] == (pytest.approx(0.8), True)
    found = verdicts({"a": leg(129, memory=101)}, {"padded": leg(100)})
    assert not found["tokens per second, over TRL"][1] and not found["peak memory, over TRL"][1]


def test_losses_are_compared_where_batches_are_the_same():
    ours, other = {"a": leg(130)}, leg(100, losses=(9.0, 9.0))
    name = "worst relative difference of a step's loss"
    assert verdicts(ours, {"padded": leg(50), "packed": other})[name] == (0.0, True)
    assert verdicts(ours, {"padded": other})[name][1] is False
    assert worst_difference([2.0, 1.1], [2.0, 1.0]) == pytest.approx(0.1)


def test_one_setting_that_learns_other_tokens_fails():
    found = verdicts({"a": leg(130)}, {"padded": leg(100)}, same={"padded": True, "one by one": False})
    assert found["share of TRL's settings that learn the same tokens"] == (0.5, False)


def test_on_a_gpu_the_wall_counts_and_process_memory_does_not():
    found = verdicts({"a": leg(130)}, {"padded": leg(100)}, plan=gpu_plan(True))
    assert "tokens per second of the processor, over TRL" not in found
    assert "peak memory above loading, over TRL" not in found


def test_expected_ratio_is_that_of_the_products():
    even = Shape(
        vocab_size=6 * 64, hidden_size=64, num_hidden_layers=1, intermediate_size=64 + 64, num_attention_heads=1
    )
    layers, head = even.weights()
    assert head == 6 * 64 * 64 and layers == 2 * 64 * 64 * 3 + 3 * 64 * 128
    assert expected_ratio(Shape(), learnt=0.0) == 1.0
    layers, head = Shape().weights()
    assert layers == head  # as the docstring says: half of the weights are in the head
    assert expected_ratio(Shape(), learnt=1.0) == pytest.approx(7 / 6)


def test_weights_are_those_that_transformers_makes(model):
    from transformers import AutoModelForCausalLM

    lm = AutoModelForCausalLM.from_pretrained(model)
    assert sum(p.numel() for p in lm.parameters() if p.ndim == 2) == sum(TINY.weights())


def test_both_sides_get_the_same_conversations_in_the_order_of_our_run(model, tmp_path):
    plan = cpu_plan(quick=True)
    data = tmp_path / "talks.jsonl"
    write_jsonl(draw(plan.steps * plan.batch), data)
    cfg = our_config(plan, model, data, {"trainer": {"token_budget": 77}})
    assert cfg.trainer.token_budget == 77 and cfg.trainer.steps == plan.steps
    examples, conversations = in_order(cfg, tmp_path / "order")
    assert len(examples) == len(conversations) == plan.steps * plan.batch
    told = sorted(json.dumps(example.messages) for example in examples)
    assert told == sorted(json.dumps(json.loads(line)["messages"]) for line in data.read_text().splitlines())
    tokenizer = AutoTokenizer.from_pretrained(model)
    for example, conversation in zip(examples, conversations, strict=True):
        learnt = tokenizer.decode(conversation.ids[conversation.learnt])
        answers = [m["content"] + "<|end|>" for m in example.messages if m["role"] == "assistant"]
        assert learnt == "".join(answers)
    job = trl_job(plan, cfg, data, plan.trl[-1], tmp_path)
    assert (job["lr"], job["beta2"], job["threads"]) == (cfg.optim.lr, cfg.optim.beta2, THREADS)


def test_every_setting_of_trl_learns_the_same_number_of_conversations_a_step():
    for plan in (cpu_plan(False), gpu_plan(False)):
        for setting in plan.trl:
            rows = setting.settings["per_device_train_batch_size"] * setting.settings["gradient_accumulation_steps"]
            assert rows == (2 if setting.settings.get("packing") else plan.batch)


def test_a_digest_knows_order_tokens_and_masks():
    one, other = ([1, 2, 3], [False, True, False]), ([4, 5], [False, True])
    assert digest([one, other]) == digest(iter([one, other]))
    changed = ([one, other], [other, one], [([1, 2, 9], one[1]), other], [(one[0], [False, True, True]), other])
    assert len({digest(rows) for rows in changed}) == 4


def test_a_template_of_another_family_learns_answers_and_their_end(model):
    from benchmarks.talks import template

    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = template("<|end|>", ("[", "]\n"), "\n")
    talk = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "me"}]
    [found] = encode(tokenizer, Example(place="here", messages=talk), SftConfig()).samples
    assert tokenizer.decode(found.ids) == "[user]\nwho<|end|>\n[assistant]\nme<|end|>\n"
    assert tokenizer.decode(found.ids[found.learnt]) == "me<|end|>"


def test_conversations_are_the_same_for_a_seed_and_bounded():
    assert draw(20) == draw(20) != draw(20, seed=1)
    long = draw(20, stretch=4.0)
    sizes = [sum(len(m["content"]) for m in talk) for talk in long]
    assert max(sizes) <= 3600 and sum(sizes) > 2 * sum(sum(len(m["content"]) for m in talk) for talk in draw(20))
    [tokens] = as_tokens([[{"role": "user", "content": "abc"}, {"role": "assistant", "content": "de"}]], 50)
    assert tokens.learnt.tolist() == [False, False, False, True, True] and tokens.ids.min() >= 2


def test_a_meter_sees_the_peak_after_loading_and_not_before():
    before = bytearray(64 << 20)
    del before
    meter = Meter(gpu=False)
    meter.start()
    kept = resident_bytes("VmRSS")
    during = bytearray(32 << 20)
    del during
    meter.step(loss=1.0)
    meter.add(all_tokens=7.0)
    found = meter.result()
    assert 30 << 20 <= found["peak_bytes"] - found["loaded_bytes"] < 60 << 20
    assert abs(found["loaded_bytes"] - kept) < 4 << 20
    assert found["steps"][0]["loss"] == 1.0 and found["steps"][0]["all_tokens"] == 7.0


def test_a_process_that_fails_says_why(tmp_path):
    import sys

    found = run_job(sys.executable, "sft_run", {}, tmp_path, "none")
    assert "exit status 1" in found["error"] and "KeyError" in found["error"]


def test_another_python_gets_none_of_these_packages(monkeypatch):
    import sys

    monkeypatch.setenv("PYTHONPATH", "/here")
    assert clean(sys.executable)["PYTHONPATH"] == "/here"
    assert "PYTHONPATH" not in clean("/other/python")
    assert pinned("trl") == "1.16.0"
