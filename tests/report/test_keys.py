import re
from pathlib import Path

import pytest

from asyncrl.report import keys


def test_the_documented_table_is_the_registry():
    documented = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    assert documented == keys.table(), "run: python -m asyncrl.report.keys > docs/metrics.md"
    assert set(re.findall(r"^\| `([^`]+)` \|", documented, re.M)) == set(keys.REGISTRY)


def test_no_key_is_declared_twice():
    assert len(keys.REGISTRY) == sum(len(section) for section in keys.SECTIONS.values())


def test_an_undeclared_key_is_refused_with_the_nearest_one():
    with pytest.raises(keys.UndeclaredMetric, match=r"reward/mena.*did you mean 'reward/mean'"):
        keys.declared("reward/mena")


@pytest.mark.parametrize("key", ["groups/skipped/nonfinite_loss", "groups/failed/deadline", "reward/failed/raised"])
def test_a_family_covers_its_members(key):
    assert keys.declared(key).unit == "count"


@pytest.mark.parametrize("key", ["groups/skipped/*", "nothing/x", "groups/skipped/a/b", ""])
def test_a_family_covers_nothing_else(key):
    with pytest.raises(keys.UndeclaredMetric):
        keys.declared(key)


def test_an_unknown_unit_is_refused():
    with pytest.raises(ValueError, match="furlong"):
        keys.Metric("a", "furlong", "")
