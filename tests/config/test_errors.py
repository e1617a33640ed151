"""One rank speaks for all of a node."""

from __future__ import annotations

import signal

import pytest

from asyncrl.config import errors
from asyncrl.config.errors import ConfigError, Problem, exit_on_config_error


@pytest.fixture
def naps(monkeypatch):
    """What was slept, in seconds; no time passes. Signals are as before afterwards."""
    slept: list[float] = []
    monkeypatch.setattr(errors.time, "sleep", slept.append)
    before = signal.getsignal(signal.SIGTERM)
    yield slept
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("rank", "waits"), [("0", []), ("1", [errors.SPEAK_S])])
def test_no_rank_ends_before_rank_0_has_spoken(naps, monkeypatch, capsys, rank, waits):
    """torchrun ends all ranks as soon as one has ended."""
    monkeypatch.setenv("LOCAL_RANK", rank)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    with pytest.raises(SystemExit) as end, exit_on_config_error():
        raise ConfigError([Problem("a.key", "is wrong", "set it right")])
    assert end.value.code == errors.USER_ERROR_STATUS and naps == waits
    assert "a.key: is wrong" in capsys.readouterr().err
    if waits:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, "torchrun ends it without a word"
