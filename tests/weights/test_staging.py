"""Chunks pile up in order or the version fails; manifests are checked before they are believed."""

from __future__ import annotations

import json
import threading

import numpy as np
import pytest
import torch

from asyncrl.transport.blocking import BlockingListener
from asyncrl.transport.errors import DeadlineExpired, ProtocolError
from asyncrl.weights.manifest import ALIGN, Manifest, Staged
from asyncrl.weights.messages import PUBLISHER_SCHEMA
from asyncrl.weights.staging import Receiver


def manifest() -> Manifest:
    return Manifest.of([("a", torch.bfloat16, (3, 5)), ("b", torch.float32, ()), ("c", torch.float32, (2, 2))])


def staged() -> Staged:
    layout = manifest()
    return Staged(7, layout, torch.zeros(layout.nbytes, dtype=torch.uint8))


def test_tensors_are_aligned_and_come_back():
    layout = manifest()
    assert all(spec.offset % ALIGN == 0 for spec in layout.specs)
    stage = staged()
    values = {"a": torch.randn(3, 5).bfloat16(), "b": torch.tensor(2.5), "c": torch.randn(2, 2)}
    source = torch.zeros(layout.nbytes, dtype=torch.uint8)
    for spec in layout.specs:
        spec.view(source).copy_(values[spec.name])
    data = memoryview(source.numpy())
    for begin in range(0, len(data), 13):
        stage.write(begin, data[begin : begin + 13])
    stage.complete([1, 2, 3])
    assert all(torch.equal(tensor, values[spec.name]) for spec, tensor in stage.tensors())


def test_a_view_of_a_later_bucket():
    layout = manifest()
    spec = layout.specs[2]
    bucket = torch.arange(spec.nbytes, dtype=torch.uint8)
    assert spec.view(bucket, origin=spec.offset).shape == (2, 2)


@pytest.mark.parametrize(("first", "second"), [((0, 10), (11, 4)), ((0, 10), (0, 10)), ((4, 4), None)])
def test_a_gap_or_a_repeat_is_an_error(first, second):
    stage = staged()
    with pytest.raises(ProtocolError, match=r"version 7: bytes \d+ to \d+ came where byte \d+ of 64 was due"):
        for part in (first, second):
            stage.write(part[0], memoryview(bytes(part[1])))


def test_more_than_was_announced_is_an_error():
    with pytest.raises(ProtocolError, match="bytes 0 to 65 came"):
        staged().write(0, memoryview(bytes(65)))


@pytest.mark.parametrize(("nbytes", "digests"), [(63, 3), (64, 2)])
def test_incomplete_versions_are_not_loaded(nbytes, digests):
    stage = staged()
    stage.write(0, memoryview(bytes(nbytes)))
    with pytest.raises(ProtocolError, match=rf"{nbytes} of 64 bytes and {digests} of 3 digests arrived"):
        stage.complete(list(np.zeros(digests, int)))


def test_manifest_round_trip():
    assert Manifest.from_bytes(memoryview(manifest().to_bytes())) == manifest()


@pytest.mark.parametrize(
    "rows",
    [
        "x", {}, [["a"]], [["a", "float32", [1, -1]]], [["a", "complex64", [1]]], [["a", "float32", [1.5]]],
        [[1, "float32", [1]]], [["a", "float32", [1]], ["a", "float32", [1]]], [["a", "float32", [True]]],
    ],
)  # fmt: skip
def test_what_is_no_manifest_is_refused(rows):
    with pytest.raises(ProtocolError, match="not a manifest"):
        Manifest.from_bytes(json.dumps(rows).encode())


def test_a_receiver_has_started_once_the_publisher_knows_it():
    """A push that begins before would leave the engine out, and nothing would come after it."""
    with BlockingListener("publisher", PUBLISHER_SCHEMA) as publisher:
        receiver = Receiver(publisher.endpoint, "generator/0", 0, 1)
        starting = threading.Thread(target=receiver.start, daemon=True)
        starting.start()
        while (message := publisher.recv(deadline_s=30, waiting_for="the subscription")).kind != "subscribe":
            pass
        starting.join(0.3)
        assert starting.is_alive(), "the publisher has the message but has not dealt with it"
        publisher.done(message)
        starting.join(30)
        assert not starting.is_alive()
        receiver.close()


def test_a_receiver_that_the_publisher_does_not_take_says_so():
    with BlockingListener("publisher", PUBLISHER_SCHEMA) as publisher:
        receiver = Receiver(publisher.endpoint, "generator/0", 0, 1)
        with pytest.raises(DeadlineExpired, match="for the publisher to take its subscription"):
            receiver.start(deadline_s=0.5)
        receiver.close()
