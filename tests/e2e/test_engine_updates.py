"""New weights under load: requests survive, every token carries its version, nothing stale is used."""

from __future__ import annotations

import numpy as np

from tests.e2e.rig import prompt_of, reference_logprobs


def error_under(model, prompt, samples) -> float:
    """Largest difference to the log-probs of ``model`` at temperature 1."""
    return max(np.abs(s.logprobs - reference_logprobs(model, prompt, s.token_ids, 1.0)).max() for s in samples)


def test_an_update_changes_what_is_sampled_and_matches_transformers(rig):
    prompt = prompt_of(30)
    before = rig.generate(10, 8, prompt)
    rig.change()
    report = rig.push()
    after = rig.generate(10, 8, prompt)
    assert report.engines == ["generator/0"] and not report.dropped
    assert error_under(rig.model, prompt, before) > 0.1
    assert error_under(rig.model, prompt, after) < 1e-4
    assert {v for s in after for v in s.versions.tolist()} == {rig.version}
