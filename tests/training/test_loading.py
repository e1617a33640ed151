"""Loading in shards: what is held, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.training.errors import ModelError
from asyncrl.training.loading import empty_policy, read_weights
from asyncrl.training.model import load_policy
from asyncrl.training.packing import pack
from tests.training import mesh_jobs
from tests.training.tiny import make_samples, spoil_weights, tiny_folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(tiny_folder(tmp_path / "model", tied=False))


def filled(folder: Path, dtype: torch.dtype = torch.float32):
    """A policy built without weights, then read, on one rank and without FSDP2."""
    policy = empty_policy(folder, dtype)
    assert all(p.is_meta for p in policy.parameters()) and not any(b.is_meta for b in policy.buffers())
    read_weights(policy, torch.device("cpu"))
    assert policy.unread is None
    return policy


@pytest.mark.parametrize("family", sorted(mesh_jobs.FAMILIES))
def test_what_is_read_in_shards_scores_like_what_transformers_loads(tmp_path, family):
    """Buffers that are computed, not stored (rotary frequencies, Gemma's scale), must survive the meta device."""
    mesh_jobs.make_folder(tmp_path, family)
    batch = pack(make_samples(), 0, torch.device("cpu"))
    ours, theirs = (load(tmp_path / family) for load in (filled, load_policy))
    assert torch.equal(ours(batch, 1.0)[0], theirs(batch, 1.0)[0])
    assert [n for n, _ in ours.lm.named_parameters()] == [n for n, _ in theirs.lm.named_parameters()]


def test_reads_into_the_master_dtype(folder):
    weights = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    policy = filled(folder)
    assert all(torch.equal(p, weights[n].float()) for n, p in policy.lm.named_parameters())


@pytest.mark.parametrize("change", ["missing", "unexpected", "has shape"])
def test_weights_must_fit_the_config_exactly(folder, change):
    """torchtune #2237: leftover or missing keys must fail, not be initialised at random."""
    spoil_weights(folder, change)
    with pytest.raises(ModelError, match=change) as error:
        filled(folder)
    assert "layers.1.mlp" in str(error.value)


def test_a_damaged_file_is_named(folder):
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(ModelError, match=f"{folder}: cannot read the weights"):
        filled(folder)


def test_a_tied_head_that_is_stored_too_is_no_leftover(tmp_path):
    folder = Path(tiny_folder(tmp_path / "tied"))
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    policy = filled(folder)
    assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight


def test_an_untied_head_is_not_tied_to_anything(folder):
    policy = filled(folder)
    assert not torch.equal(policy.lm.lm_head.weight, policy.lm.model.embed_tokens.weight)


@pytest.mark.parametrize("load", [filled, load_policy])
def test_files_of_other_programs_beside_the_weights_are_not_read(folder, load):
    save_file({"tok_embeddings.weight": torch.zeros(2)}, folder / "consolidated.safetensors")
    assert "model.embed_tokens.weight" in dict(load(folder).lm.named_parameters())
