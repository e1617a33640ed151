"""When an engine counts as hung, and when it only has much to do."""

from __future__ import annotations

from asyncrl.actors.silence import LOOKS, Silence


def looks(progress: list[object], owing: bool = True) -> int | None:
    """Which look, counted from 1, found the engine hung; None if none did."""
    silence = Silence()
    return next((n for n, now in enumerate(progress, 1) if silence.look(now, owing)), None)


def test_silence_with_requests_is_found():
    assert looks([(3, 50)] * 100) == LOOKS + 2  # from the second look on it is known to be silent
    assert looks([(3, 50), (3, 51)] + [(3, 51)] * 100) == LOOKS + 3, "the last token counts"


def test_requests_queued_behind_others_are_waited_for_as_long_as_tokens_come():
    """Nothing else is known of the request that waits: it has drawn nothing in 1000 looks."""
    tokens = [(0, n // LOOKS) for n in range(1000)]  # one token, of whatever request, in the time allowed
    assert looks(tokens) is None


def test_an_answer_is_progress_even_if_it_takes_its_tokens_with_it():
    """The engine's count of running requests' tokens falls when one of them ends: 60 of one, then 60 of the next."""
    assert looks([(answered, 60) for answered in range(10 * LOOKS)]) is None


def test_an_engine_that_owes_nothing_may_be_silent():
    assert looks([(3, 50)] * 1000, owing=False) is None


def test_the_time_without_requests_is_not_held_against_the_first_one():
    silence = Silence()
    for _ in range(100):
        silence.look((3, 50), owing=False)
    assert not any(silence.look((3, 50), owing=True) for _ in range(LOOKS))
