"""The tiny model on disk, shared by the tests of the commands."""

import pytest

from tests import tiny_model


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    return tiny_model.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny(tiny_folder):
    from oscar_jax.models import load

    return load(tiny_folder)


@pytest.fixture(scope="session")
def tiny_text(tmp_path_factory):
    """A folder with `calibration.txt` and `heldout.txt`, 20 kB each."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "calibration.txt").write_text(tiny_model.text(seed=1))
    (folder / "heldout.txt").write_text(tiny_model.text(seed=2))
    return folder
