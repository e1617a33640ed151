"""JSON without loss."""

from __future__ import annotations

import enum
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.envs.plain import from_plain, to_plain

keys = st.one_of(
    st.text(), st.integers(), st.tuples(st.integers(), st.text()), st.sampled_from(["__tuple__", "__set__"])
)
leaves = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text())
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.sets(st.one_of(st.integers(), st.text()), max_size=4),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=20,
)


@settings(deadline=None)
@given(values)
def test_round_trip_through_json_is_exact(value):
    back = from_plain(json.loads(json.dumps(to_plain(value))))
    assert back == value and repr(type(back)) == repr(type(value))


def test_subclasses_become_their_base():
    class Colour(enum.IntEnum):
        RED = 3

    plain = to_plain({"a": Colour.RED, np.str_("b"): np.str_("text"), "c": np.float64(0.5)})
    assert plain == {"a": 3, "b": "text", "c": 0.5}
    assert [type(value) for value in plain.values()] == [int, str, float]
    assert [type(key) for key in plain] == [str, str, str]


def test_other_types_are_refused():
    with pytest.raises(TypeError, match="ndarray"):
        to_plain([np.zeros(2)])
