"""What a real vLLM engine samples: log-probs, seeds, versions, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.e2e.rig import EOS, prompt_of, reference_logprobs
from tests.e2e.scoring import check_scores


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probs_are_those_of_transformers_at_the_same_temperature(rig, temperature):
    prompt = prompt_of(30)
    samples = rig.generate(100 + int(10 * temperature), 16, prompt, temperature=temperature, max_tokens=24)
    differences = np.concatenate(
        [s.logprobs - reference_logprobs(rig.model, prompt, s.token_ids, temperature) for s in samples]
    )
    assert len({tuple(s.token_ids.tolist()) for s in samples}) > 1
    assert np.abs(differences).mean() < 1e-5
    assert np.abs(differences).max() < 1e-4


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.3])
def test_log_probs_are_those_of_the_trainer_at_the_same_temperature(rig, temperature):
    check_scores(rig, temperature)


def test_samples_depend_on_seed_ordinal_and_index_only(rig):
    prompt = prompt_of(20)
    first = rig.generate(1, 6, prompt)
    rig.ask(900, 20, prompt_of(40), max_tokens=40)  # company in the engine
    second = rig.generate(1, 6, prompt)
    other = rig.generate(2, 6, prompt)
    rig.take(900, 20)
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
    assert [s.token_ids.tolist() for s in first] != [s.token_ids.tolist() for s in other]
    assert len({tuple(s.token_ids.tolist()) for s in first}) > 1


def test_greedy_evaluation(rig):
    """A negative ordinal and temperature 0: every sample is the arg max of transformers."""
    prompt = prompt_of(25)
    (sample,) = rig.generate(-1, 1, prompt, temperature=0.0, max_tokens=12)
    ids = list(prompt)
    for token in sample.token_ids.tolist():
        with torch.no_grad():
            logits = rig.model(torch.tensor([ids])).logits[0, -1]
        assert logits[token] > logits.max() - 1e-4
        ids.append(token)


def test_finish_reasons_are_the_engines(rig):
    """SkyRL #1319, PipelineRL fd2fc3b, TRL #5330: truncation guessed from the last token."""
    samples = rig.generate(3, 64, prompt_of(12), temperature=1.3, max_tokens=48)
    stopped = [s for s in samples if s.finish_reason == "stop"]
    cut = [s for s in samples if s.finish_reason == "length"]
    assert stopped and cut and len(stopped) + len(cut) == 64
    assert all(s.token_ids[-1] == EOS and EOS not in s.token_ids[:-1] for s in stopped)
    assert all(len(s.token_ids) == 48 and EOS not in s.token_ids for s in cut)


@pytest.mark.parametrize("length", [384, 500])
def test_a_prompt_that_does_not_fit_is_refused_not_cut(rig, length):
    samples = rig.generate(length, 2, prompt_of(length))
    for sample in samples:
        assert sample.finish_reason == "refused" and len(sample.token_ids) == 0
        assert f"a prompt of {length} tokens does not leave room in generator.max_model_len=384" in sample.failure
    assert rig.generate(4, 1, prompt_of(383))[0].failure is None  # one token of room


def test_tokens_carry_the_committed_version(rig):
    (sample,) = rig.generate(5, 1, prompt_of(9))
    assert set(sample.versions.tolist()) == {rig.version}
