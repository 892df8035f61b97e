"""The recipe table."""

from __future__ import annotations

import dataclasses

import pytest

from calib import recipes
from calib.recipes import Recipe, SideRecipe


def test_the_named_recipes_exist():
    named = (
        "naive hadamard hadamard-clip oscar-reference oscar-head oscar-paper oscar-paper-head default default-feedback"
    )
    assert set(named.split()) <= set(recipes.names())
    assert all(recipes.get(name).name == name and recipes.get(name).summary for name in recipes.names())


def test_reference_clips():
    for name in ("hadamard-clip", "oscar-reference", "oscar-head", "oscar-paper", "oscar-paper-head"):
        recipe = recipes.get(name)
        assert (recipe.key.clip_ratio, recipe.value.clip_ratio) == (0.96, 0.92)
        assert recipe.key.clip == ("static" if "paper" in name else "rank")
        assert recipe.key.per_layer == recipe.value.per_layer == (name in ("oscar-reference", "oscar-paper"))


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"recipe 'oscar' is unknown; expected one of naive, hadamard, .*default"):
        recipes.get("oscar")


def test_register_refuses_a_taken_name():
    default = recipes.get("default")
    assert recipes.register(default) is default
    with pytest.raises(ValueError, match="exists already"):
        recipes.register(dataclasses.replace(default, summary="other"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(frame="rotation"), "needs a target"),
        (dict(frame="hadamard", target="query"), "others take none"),
        (dict(frame="balanced", kind="levels"), "'plain' or 'weighted'"),
        (dict(frame="hadamard", kind="levels"), "expected 'levels' with 'balanced'"),
        (dict(frame="balanced", kind="levels", statistics="plain", clip="rank"), "levels saturate"),
        (dict(frame="hadamard", clip="rank", clip_ratio=0.0), "clip_ratio"),
    ],
)
def test_sides_that_contradict_themselves(options, message):
    with pytest.raises(ValueError, match=message):
        SideRecipe(**options)


def test_recipes_that_contradict_themselves():
    default, hadamard = recipes.get("default"), SideRecipe("hadamard")
    with pytest.raises(ValueError, match="wrong side"):
        Recipe("r", "", SideRecipe("rotation", target="value"), hadamard)
    with pytest.raises(ValueError, match="metrics"):
        Recipe("r", "", default.value, default.value, "bucket")
    with pytest.raises(ValueError, match="absolute positions"):
        Recipe("r", "", dataclasses.replace(default.key, statistics="plain"), default.value, "bucket")
    with pytest.raises(ValueError, match="relative to buckets"):
        Recipe("r", "", default.key, default.value)
