"""The benchmark of the heads runs, and its own float64 reference agrees with what it measures."""

from __future__ import annotations

from benchmarks import logprob_head
from benchmarks.head_peers import make_data


def test_errors_are_measured_and_absent_peers_are_named(capsys):
    found = logprob_head.measure(make_data(48, 300, 32, "cpu"), quick=True)
    rows = found["rows"]
    assert set(rows) >= {"dense bf16", "logprob", "logprob lean", "policy loss", "torch.compile", "liger"}
    for name in ("logprob", "logprob lean", "policy loss", "policy loss, fp32 sums"):
        for key, error in rows[name]["errors"].items():
            assert 0 < error <= 1.25 * rows["dense bf16"]["errors"][key], (name, key)
    assert all(claim.met for claim in logprob_head.accuracy_claims(300, found, full_size=True))
    logprob_head.show(300, found)
    assert "compared on a GPU only" in capsys.readouterr().out
