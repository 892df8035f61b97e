"""A stored artifact, shared by the tests of artifacts."""

import pytest


@pytest.fixture
def stored(tmp_path):
    from calib import artifact  # Orbax takes seconds to import, and other tests here need none
    from tests.calib.artifacts import MANIFEST, codes

    artifact.save(tmp_path / "a", codes(), MANIFEST)
    return tmp_path / "a"
