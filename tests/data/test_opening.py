"""What the configuration names, opened by all ranks: each file read by one."""

from __future__ import annotations

import threading

import pytest
import torch.distributed as dist

from asyncrl.config.context import Place, RunContext
from asyncrl.config.schema import Config, DataConfig
from asyncrl.data import opening
from asyncrl.data.errors import SourceError
from asyncrl.data.opening import open_data
from tests.data.files import talk, write_lines


def test_each_file_is_surveyed_by_one_rank(tmp_path, monkeypatch):
    paths = [write_lines(tmp_path / f"{name}.jsonl", [{"text": name}]) for name in "abc"]
    cfg = Config(mode="sft")
    cfg.sft.data = [DataConfig(path=str(path)) for path in (*paths, paths[0])]
    surveyed, real, store = [], opening.survey, dist.HashStore()
    monkeypatch.setattr(opening, "survey", lambda path, folder: surveyed.append(path) or real(path, folder))
    found = {}

    def rank(number):
        place = Place(rank=number, local_rank=number, world_size=2, local_world_size=2)
        found[number] = open_data(cfg, RunContext(place, tmp_path / "run", _store=store))[0]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert sorted(surveyed) == paths
    assert found[0].identity() == found[1].identity()
    assert found[0].take(8, lambda e: e.place) == found[1].take(8, lambda e: e.place)


def test_pairs_are_not_mixed_with_conversations(tmp_path):
    cfg = Config(mode="sft")
    pairs = write_lines(tmp_path / "pairs.jsonl", [{"chosen": "a", "rejected": "b", "prompt": "p"}])
    talks = write_lines(tmp_path / "talks.jsonl", [{"messages": talk()}])
    cfg.sft.data = [DataConfig(path=str(talks)), DataConfig(path=str(pairs))]
    with pytest.raises(SourceError, match=r"pairs\.jsonl: holds preference pairs and .*talks\.jsonl does not"):
        open_data(cfg, RunContext(Place(), tmp_path))


def test_without_files_the_environment_is_learnt_and_evaluated(tmp_path):
    cfg = Config(mode="sft")
    cfg.env.task, cfg.env.heldout_size = "spell_backward", 4
    mixture, heldout = open_data(cfg, RunContext(Place(), tmp_path))
    assert str(mixture.corpora[0]).startswith("env (train): 100000 items") and [len(c) for c in heldout] == [4]
    cfg.sft.data = [DataConfig(path=str(write_lines(tmp_path / "a.jsonl", [{"text": "a"}])))]
    assert open_data(cfg, RunContext(Place(), tmp_path))[1] == []
