"""One real engine for all tests of a session that only need one: starting it takes 10 s and more."""

from __future__ import annotations

import pytest

from tests.e2e.rig import Rig


@pytest.fixture(scope="session")
def rig(tmp_path_factory):
    """A generator with a tied model, its first version committed."""
    with Rig(tmp_path_factory.mktemp("tied")) as rig:
        rig.push()
        yield rig
