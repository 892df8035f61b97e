"""Recipes as files."""

from __future__ import annotations

import dataclasses

import pytest

from calib import recipes
from calib.recipes import Recipe, SideRecipe


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "mine.toml").write_text(text)
        return str(tmp_path / "mine.toml")

    return write


def test_a_file_says_what_differs_from_its_base(write):
    path = write('name = "mine"\nsummary = "s"\nbase = "default"\n[value]\nstep = 1\ndamping = 0.02\n')
    default = recipes.get("default")
    value = dataclasses.replace(default.value, step=1, damping=0.02)
    assert recipes.get(path) == dataclasses.replace(default, name="mine", summary="s", value=value)
    assert "mine" not in recipes.names()


def test_a_file_can_stand_alone(write):
    path = write('name = "mine"\nsummary = "s"\n[key]\nframe = "hadamard"\nclip = "rank"\nclip_ratio = 0.9\n'
                 '[value]\nframe = "rotation"\ntarget = "value"\n')  # fmt: skip
    key, value = SideRecipe("hadamard", clip="rank", clip_ratio=0.9), SideRecipe("rotation", target="value")
    assert recipes.get(path) == Recipe("mine", "s", key, value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "not a TOML file"),
        ('name = "x"\nbase = "defualt"', r"mine\.toml': base='defualt' is unknown; expected one of naive, "),
        ('name = "x"\nbase = 3', r"mine\.toml': base=3: expected a recipe's name or a \.toml file"),
        ('name = "x"\nbase = ["default"]', r"mine\.toml': base=\['default'\]: expected a recipe's name"),
        ('base = "default"', r"name=None: expected lower-case letters"),
        ('name = "../x"\nbase = "default"', r"name='../x'"),
        ('name = "default"\nbase = "naive"', "name='default' is another recipe's"),
        ('name = "x"\nbase = "default"\nspeed = 3', "'speed' is unknown; expected one of name, summary"),
        ('name = "x"\nbase = "default"\npositions = "everywhere"', "expected one of 'absolute', 'bucket', 'averaged'"),
        ('name = "x"\nbase = "default"\nkey = 3', r"expected a table \[key\]"),
        ('name = "x"\nbase = "default"\n[key]\nsteps = 3', r"\[key\]: 'steps' is unknown"),
        ('name = "x"\nbase = "default"\n[key]\nstep = true', r"\[key\]: step=True: expected a number"),
        ('name = "x"\nbase = "default"\n[key]\nsearch_bits = 1', "search_bits=1: expected true or false"),
        ('name = "x"\nbase = "default"\n[key]\nclip = "rank"', r"\[key\]: clip='rank' with kind='levels'"),
        ('name = "x"\nsummary = "s"\n[key]\nframe = "hadamard"', r"\[value\]: frame missing"),
        ('name = "x"\nbase = "default"\n[value]\nstep = -1.1', r"\[value\]: step=-1.1: expected a number above 0"),
        ('name = "x"\nbase = "default"\n[value]\ngain = 0', r"\[value\]: gain=0: expected a number above 0"),
        ('name = "x"\nbase = "default"\n[key]\nridge = -1', r"\[key\]: ridge=-1: expected a number of at least 0"),
        ('name = "x"\nbase = "default"\n[key]\nridge = nan', r"\[key\]: ridge=nan: expected a number of at least 0"),
        ('name = "x"\nbase = "default"\n[key]\ndamping = -1', r"\[key\]: damping=-1: expected a number of at"),
    ],
)
def test_a_file_that_is_no_recipe_is_one_sentence(write, text, message):
    with pytest.raises(ValueError, match=message):
        recipes.get(write(text))


@pytest.mark.parametrize("through", ["mine.toml", "./mine.toml", "other.toml"])
def test_bases_that_lead_back_are_one_sentence(write, tmp_path, monkeypatch, through):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.toml").write_text('name = "other"\nbase = "mine.toml"\n')
    write(f'name = "mine"\nbase = "{through}"\n')
    with pytest.raises(
        ValueError, match=r"^recipe '(mine|other)\.toml': base='(\./)?mine\.toml' would be its own base"
    ):
        recipes.get("mine.toml")
    write('name = "mine"\nbase = "default"\n')
    assert recipes.get("other.toml").key == recipes.get("default").key


def test_a_missing_base_is_told_with_the_file_that_names_it(write):
    with pytest.raises(FileNotFoundError, match=r"mine\.toml': base='no\.toml': no such file"):
        recipes.get(write('name = "mine"\nbase = "no.toml"\n'))


def test_a_missing_file_is_named():
    with pytest.raises(FileNotFoundError, match=r"recipe 'no\.toml': no such file"):
        recipes.get("no.toml")
