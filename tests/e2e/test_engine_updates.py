"""New weights under load: requests survive, every token carries its version, nothing stale is used."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time

import numpy as np
import torch

from asyncrl.weights.digest import combined, tensor_digests
from asyncrl.weights.subscribers import Subscribers
from tests.e2e.rig import prompt_of, reference_logprobs


def error_under(model, prompt, samples) -> float:
    """Largest difference to the log-probs of ``model`` at temperature 1."""
    return max(np.abs(s.logprobs - reference_logprobs(model, prompt, s.token_ids, 1.0)).max() for s in samples)


def test_an_update_changes_what_is_sampled_and_matches_transformers(rig):
    """TRL #5312, #5313; OpenRLHF #660: what is served after a sync is shown by log-probs, not only by digests."""
    prompt = prompt_of(30)
    before = rig.generate(10, 8, prompt)
    rig.change()
    report = rig.push()
    after = rig.generate(10, 8, prompt)
    assert report.engines == ["generator/0"] and not report.dropped
    trainers = combined(tensor_digests(p.detach() for p in rig.model.parameters()))
    assert rig.served[-1] == ("generator/0", rig.version, trainers)
    assert error_under(rig.model, prompt, before) > 0.1
    assert error_under(rig.model, prompt, after) < 1e-4
    assert {v for s in after for v in s.versions.tolist()} == {rig.version}


@torch.no_grad()
def mixed_logprobs(models: dict, prompt: list[int], tokens: np.ndarray, versions: list[int]) -> np.ndarray:
    """(T,) log-probs of a completion each of whose tokens was drawn by ``models[version]``.

    The last token that a version drew is fed to the next one; keys and values before it stay those of the version that
    computed them.
    """
    ids = torch.tensor([[*prompt, *tokens.tolist()]])
    # token t is drawn from the input before it, position P + t - 1; the prompt belongs to the first version
    readers = [versions[0]] * (len(prompt) - 1) + versions
    logits, cache, begin = [], None, 0
    while begin < len(readers):
        end = begin + readers[begin:].count(readers[begin])
        result = models[readers[begin]](ids[:, begin:end], past_key_values=cache, use_cache=True)
        cache, begin = result.past_key_values, end
        logits.append(result.logits[0])
    drawn_from = torch.cat(logits)[len(prompt) - 1 :]
    return torch.log_softmax(drawn_from, -1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


def test_requests_survive_an_update_and_each_token_has_its_version(rig):
    """AReaL #1569: tokens labelled with the wrong version."""
    prompt = prompt_of(30)
    models = {rig.version: copy.deepcopy(rig.model)}
    rig.ask(20, 32, prompt, max_tokens=300)
    for seed in range(3):
        rig.change(seed=seed)
        report = rig.push()
        assert report.engines == ["generator/0"]
        models[rig.version] = copy.deepcopy(rig.model)
    samples = rig.take(20, 32)
    lived_through = [len(set(s.versions.tolist())) - 1 for s in samples]
    assert max(lived_through) > 0, "no sample lived through an update"
    for sample in samples:
        assert sample.failure is None and sample.finish_reason in ("stop", "length")
        versions = sample.versions.tolist()
        assert versions == sorted(versions)
        expected = mixed_logprobs(models, prompt, sample.token_ids, versions)
        assert np.abs(sample.logprobs - expected).max() < 1e-4


@contextlib.contextmanager
def transfer_held_open(monkeypatch):
    """Inside, a push gets no further than its first bytes; yields an event that is set once these are staged."""
    staged, release = threading.Event(), threading.Event()
    move, one_at_a_time = Subscribers.move, asyncio.Lock()

    async def held(self, version, offset, data, engines):
        async with one_at_a_time:  # bytes must arrive in the order of the calls
            if offset:
                await asyncio.to_thread(release.wait)
            kept = await move(self, version, offset, data, engines)
        staged.set()
        return kept

    monkeypatch.setattr(Subscribers, "move", held)
    try:
        yield staged
    finally:
        release.set()


def test_samples_arrive_while_bytes_are_staged(rig, monkeypatch):
    """The engine stands still to load a version, not while its bytes are on the way."""
    prompt, old = prompt_of(30), copy.deepcopy(rig.model)
    rig.change(seed=5)
    with transfer_held_open(monkeypatch) as staged:
        rig.version += 1
        rig.publisher.publish(rig.version)
        assert staged.wait(30)
        began = time.monotonic()
        samples = rig.generate(25, 32, prompt, max_tokens=40)
        held_s = time.monotonic() - began
    report = rig.publisher.wait_committed(60)
    assert report.engines == ["generator/0"] and report.version == rig.version
    assert {v for s in samples for v in s.versions.tolist()} == {rig.version - 1}
    assert error_under(old, prompt, samples) < 1e-4
    assert report.transfer_s > held_s > report.pause_s


def test_what_had_not_begun_starts_over_under_the_new_weights(rig):
    """More requests than the engine runs at once, with a prompt that fills a block of the prefix cache."""
    prompt = prompt_of(200)
    rig.generate(30, 1, prompt, max_tokens=1)  # the block is cached under the present version
    rig.ask(31, 256, prompt, max_tokens=60)
    rig.change(seed=7)
    rig.push()
    samples = rig.take(31, 256)
    fresh = [s for s in samples if set(s.versions.tolist()) == {rig.version}]  # all were asked for before the push
    assert fresh, "max_num_seqs is 64: of 256 requests some cannot have begun before the update"
    assert error_under(rig.model, prompt, fresh) < 1e-4


def test_a_repeated_prompt_is_prefilled_again_after_an_update(rig):
    """NeMo #4018, vLLM #42695, lmdeploy #4917: keys and values of older weights served again."""
    prompt = prompt_of(200, seed=3)

    def cached() -> int:
        rig.generate(40, 1, prompt, max_tokens=1)
        return rig.messages["sample"][-1].header["cached_tokens"]

    assert [cached(), cached()] == [0, 128]
    rig.push()
    assert [cached(), cached()] == [0, 128]


def test_a_version_that_every_engine_has_is_not_sent_again(rig):
    rig.publisher.publish(rig.version)
    report = rig.publisher.wait_committed(30)
    assert report.version == rig.version and report.engines == [] and report.bytes == 0


def test_the_report_has_every_figure(rig):
    report = rig.push()
    assert report.bytes >= 4 * sum(p.numel() for p in rig.model.parameters())
    for figure in ("ready_s", "gather_s", "transfer_s", "commit_s", "load_s", "digest_s", "pause_s"):
        assert 0 < getattr(report, figure) <= report.total_s, figure
    assert report.load_s <= report.pause_s <= report.commit_s
    rig.wait(lambda: [m for m in rig.messages["committed"] if m.header["version"] == rig.version])
    header = rig.messages["committed"][-1].header
    assert header["bytes"] == report.bytes and header["pause_s"] == report.pause_s <= header["seconds"]
