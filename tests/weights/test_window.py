"""A place is not taken again before the transfer out of it has ended."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest
import torch

from asyncrl.weights.window import Window


def lent(window: Window, nbytes: int) -> tuple[torch.Tensor, Future]:
    place, transfer = window.take(nbytes), Future()
    window.lend(transfer)
    return place, transfer


def blocks(call) -> threading.Thread:
    """Start ``call`` in a thread; it must not return within 0.2 s."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    return thread


def test_places_do_not_overlap_and_come_round():
    window = Window(1024, torch.zeros(1024, dtype=torch.uint8))
    places = []
    for _ in range(3):
        place, transfer = lent(window, 300)
        places.append((place.storage_offset(), place.numel()))
        transfer.set_result(None)
    assert places == [(0, 300), (512, 300), (0, 300)]


@pytest.mark.parametrize("memory", [None, torch.zeros(1024, dtype=torch.uint8)])
def test_a_place_in_use_is_waited_for(memory):
    window = Window(1024, memory)
    _, first = lent(window, 512)
    _, second = lent(window, 512)
    thread = blocks(lambda: window.take(100))
    second.set_result(None)
    thread.join(0.2)
    assert thread.is_alive(), "the oldest is still on its way"
    first.set_result(None)
    thread.join(10)
    assert not thread.is_alive()


def test_the_end_of_the_ring_is_skipped_when_it_is_too_short():
    window = Window(1024, torch.zeros(1024, dtype=torch.uint8))
    _, first = lent(window, 768)
    thread = blocks(lambda: window.take(512))
    first.set_result(None)
    thread.join(10)
    assert window.take(512).storage_offset() == 512


def test_a_bucket_that_is_larger_than_wanted_still_fits():
    size = Window.size(256, largest=1000)
    assert Window(size, torch.zeros(size, dtype=torch.uint8)).take(1000).numel() == 1000


def test_drain_waits_for_everything_and_raises_what_a_transfer_raised():
    window = Window(1024)
    _, first = lent(window, 100)
    thread = blocks(window.drain)
    first.set_result(None)
    thread.join(10)
    assert not thread.is_alive()
    _, second = lent(window, 100)
    second.set_exception(ValueError("gone"))
    with pytest.raises(ValueError, match="gone"):
        window.drain()
