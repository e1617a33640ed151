"""Schemas, the wire format and arrays in buffers."""

from __future__ import annotations

from typing import Any, Literal

import msgpack
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from asyncrl.transport.frames import (
    Ack,
    ControlFrame,
    DataFrame,
    Kind,
    ProtocolError,
    Schema,
    array_of,
    decode,
    flat_view,
    pack_body,
    pack_control,
    pack_data,
)

CALM = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])  # on a loaded machine
TYPES: list[tuple[Any, list[Any], list[Any]]] = [
    (int, [0, -5, 1 << 60], [True, 1.0, None, "1", np.int64(3)]),
    (float, [1.5, 2, float("inf")], [True, "1.0", None]),
    (str, ["", "é"], [b"", 1]),
    (bool, [True, False], [0, 1, None]),
    (bytes, [b"", b"x"], ["", bytearray(b"x")]),
    (float | None, [None, 1.0], ["", True]),
    (list[str], [[], ["a"]], ["a", ["a", 1], ("a",)]),
    (list[list[int]], [[[1], []]], [[1], [["a"]]]),
    (dict[str, int], [{}, {"a": 1}], [{1: 1}, {"a": "b"}, []]),
    (Literal["stop", "length"], ["stop"], ["other", 1]),
    (Any, [None, {"x": [1]}], []),
]


@pytest.mark.parametrize(("expected", "good", "bad"), TYPES)
def test_field_types(expected: Any, good: list[Any], bad: list[Any]) -> None:
    schema = Schema({"k": Kind({"f": expected})})
    for value in good:
        schema.check("k", {"f": value}, 0)
    for value in bad:
        with pytest.raises(ProtocolError, match=r"^k\.f is "):
            schema.check("k", {"f": value}, 0)


def test_errors_name_kind_and_field() -> None:
    schema = Schema({"batch": Kind({"version": int, "loss": float | None}, buffers=2), "free": Kind(buffers="any")})
    for header, n, said in [
        ({"version": 1}, 2, "batch misses batch.loss"),
        ({"version": 1, "loss": None, "extra": 2}, 2, "batch has unknown batch.extra"),
        ({"version": 1, "lost": None}, 2, "batch misses batch.loss and has unknown batch.lost"),
        ({"version": "1", "loss": None}, 2, "batch.version is str '1', not int"),
        ({"version": 1, "loss": "x" * 500}, 2, r"batch.loss is str 'xxx.*\.\.\., not float \| None"),
        ({"version": 1, "loss": None}, 1, "batch carries 1 buffers, not 2"),
    ]:
        with pytest.raises(ProtocolError, match=said):
            schema.check("batch", header, n)
    with pytest.raises(ProtocolError, match=r"unknown kind 'bach'; known: \['batch', 'free'\]"):
        schema.check("bach", {}, 0)
    schema.check("free", {}, 0)
    schema.check("free", {}, 9)
    with pytest.raises(ValueError, match="own events"):
        Schema({"$left": Kind()})
    with pytest.raises(TypeError, match="set"):
        Schema({"k": Kind({"f": set[int]})})


headers = st.dictionaries(
    st.text(max_size=5),
    st.none() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text() | st.lists(st.floats()),
    max_size=4,
)


@CALM
@given(st.integers(1, (1 << 63) - 1), st.text(), headers, st.none() | st.lists(st.integers(0, 1 << 62)))
def test_data_round_trip(seq: int, kind: str, header: dict[str, Any], above: list[int] | None) -> None:
    ack = None if above is None else Ack(3, above)
    frame = decode(pack_data(seq, pack_body(kind, header, [10, 0]), ack), 2)
    assert isinstance(frame, DataFrame)
    assert repr(frame) == repr(DataFrame(seq, kind, header, [10, 0], ack))  # repr: nan equals nan


@CALM
@given(st.binary(max_size=200), st.integers(0, 3))
def test_arbitrary_bytes_are_refused_or_understood(data: bytes, n: int) -> None:
    try:
        frame = decode(data, n)
    except ProtocolError:
        return
    assert isinstance(frame, DataFrame | ControlFrame)


json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=20,
)


@CALM
@given(st.tuples(st.sampled_from([1, 2]), st.sampled_from([0, 1, 2]), json_like, json_like, json_like) | json_like)
def test_arbitrary_msgpack_is_refused_or_understood(value: Any) -> None:
    try:
        frame = decode(msgpack.packb(value), 0)
    except ProtocolError:
        return
    assert isinstance(frame, DataFrame | ControlFrame)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not msgpack"),
        (b"\xc1", "not msgpack"),
        (b"\x91" * 3000, "not msgpack"),
        (b"\xdd\xff\xff\xff\xff", "not msgpack"),
        (b"\xc0" * (1 << 21), "an envelope of 2097152 bytes"),
        (msgpack.packb(5), "not an array"),
        (msgpack.packb([1, 0, 1, "k", {}, [], None]) + b"x", "not msgpack"),
        (msgpack.packb([2, 0, 1, "k", {}, [], None]), "speaks wire version 2, this is version 1"),
        (msgpack.packb([1, 0, 0, "k", {}, [], None]), "sequence number 0"),
        (msgpack.packb([1, 0, 1, "k", {}, [3], None]), "announces other buffers"),
        (msgpack.packb([1, 0, 1, "k", {}, [], [1, 2]]), "acknowledgement"),
        (msgpack.packb([1, 0, 1, "k", {}, [], [1, [-1]]]), "ack: -1"),
        (msgpack.packb([1, 0, 1, "k", {3: 4}, [], None]), "not msgpack"),
        (msgpack.packb([1, 0, 1, "k", msgpack.ExtType(1, b""), [], None]), "extension"),
        (msgpack.packb([1, 1, "ping", {"x": 1}]), "unknown ping.x"),
        (msgpack.packb([1, 1, "nonsense", {}]), "unknown kind 'nonsense'"),
        (msgpack.packb([1, 3, "ping", {}]), "unknown frame type 3"),
    ],
)
def test_refusals_say_why(data: bytes, said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        decode(data, 0)


def test_headers_that_cannot_travel_are_refused_at_the_sender() -> None:
    for value in ({1, 2}, 1 << 70, "x" * (1 << 20)):
        with pytest.raises(ProtocolError, match="k: "):
            pack_body("k", {"f": value}, [])
    assert decode(pack_control("ping"), 0) == ControlFrame("ping", {})


@pytest.mark.parametrize("dtype", ["<f4", "<f2", "u1", "<i8", "?", "<c8"])
@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (2, 3, 4)])
def test_arrays_cross_as_buffers(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(1).integers(0, 2, size=shape).astype(dtype)
    view = flat_view(array, 0)
    assert view.nbytes == array.nbytes and view.format == "B"
    assert np.array_equal(array_of(view, dtype, list(shape)), array)
    assert array.nbytes == 0 or np.shares_memory(array_of(view, dtype, shape), array)


def test_an_unaligned_buffer_is_copied_into_place() -> None:
    data = np.arange(9, dtype=np.uint8)
    array = array_of(memoryview(data)[1:], np.float64, (1,))
    assert array.flags.aligned and array.tobytes() == data[1:].tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "said"),
    [
        ("<f4", [3], "a buffer of 16 bytes cannot be float32"),
        ("O", [2], "cannot be sent"),
        ("nonsense", [4], "unknown dtype"),
        ("V0", [4], "cannot be sent"),
        ("<f4", [-1, -4], "shape"),
        ("<f4", [2.0, 2], "shape"),
        ("<f4", [1 << 40, 1 << 40], "cannot be"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(dtype: str, shape: list[Any], said: str) -> None:
    with pytest.raises(ProtocolError, match=said):
        array_of(bytes(16), dtype, shape)
