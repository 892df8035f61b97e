"""Recipes of one's own, as TOML files: what differs from a named recipe, or all of it.

    name = "default-coarse"
    summary = "larger steps for values"
    base = "default"

    [value]
    step = 1.1

Tables `[key]` and `[value]` hold fields of `SideRecipe`; top-level fields are those of `Recipe`. With `base` the fields
not given are that recipe's; without it `name`, `summary`, and `frame` of both sides are needed.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from calib.recipes import Recipe, SideRecipe, get

SUFFIX = ".toml"


def read(path: str | Path) -> Recipe:
    """The recipe of a file.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not TOML, an unknown field, a value of the wrong kind, a missing field, or fields that contradict
            each other; the file and the field are named.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"recipe {str(path)!r}: no such file; expected a {SUFFIX} file, or a recipe's name.")
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"recipe {str(path)!r}: not a TOML file: {error}.") from None
    where = f"recipe {str(path)!r}"
    base = get(given.pop("base")) if "base" in given else None
    sides = {}
    for side in ("key", "value"):
        table = given.pop(side, {})
        if not isinstance(table, dict):
            raise ValueError(f"{where}: {side}={table!r}: expected a table [{side}].")
        sides[side] = _make(SideRecipe, None if base is None else getattr(base, side), table, f"{where}, [{side}]")
    name = given.get("name")
    if not isinstance(name, str) or not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", name):
        # Artifacts are stored in folders of this name.
        raise ValueError(f"{where}: name={name!r}: expected lower-case letters, digits, dots and dashes.")
    return _make(Recipe, base, given | sides, where)


def _make(kind: Any, base: Any, given: Mapping[str, Any], where: str) -> Any:
    hints = typing.get_type_hints(kind)
    for field, value in given.items():
        if field not in hints:
            raise ValueError(f"{where}: {field!r} is unknown; expected one of {', '.join(hints)}.")
        if not _fits(value, hints[field]):
            raise ValueError(f"{where}: {field}={value!r}: expected {_described(hints[field])}.")
    required = [field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING]
    missing = [] if base is not None else [field for field in required if field not in given]
    if missing:
        raise ValueError(f'{where}: {", ".join(missing)} missing; give it, or a base such as base = "default".')
    try:
        return kind(**given) if base is None else dataclasses.replace(base, **given)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _choices(hint: Any) -> list[Any]:
    """The kinds that a hint allows, None left out: TOML has no way to write it."""
    allowed = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return [each for each in allowed if each is not type(None)]


def _fits(value: Any, hint: Any) -> bool:
    for each in _choices(hint):
        if typing.get_origin(each) is typing.Literal:
            if value in typing.get_args(each):
                return True
        elif each is float:
            if isinstance(value, int | float) and not isinstance(value, bool):
                return True
        elif isinstance(value, each):
            return True
    return False


def _described(hint: Any) -> str:
    names = {float: "a number", bool: "true or false", str: "a text"}
    return " or ".join(
        f"one of {', '.join(map(repr, typing.get_args(each)))}"
        if typing.get_origin(each) is typing.Literal
        else names.get(each, str(each))
        for each in _choices(hint)
    )
