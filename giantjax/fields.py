"""What the configuration's dataclasses have in common: paths of leaves, types, bounds, reading back."""

import dataclasses
import math
import types
import typing
from typing import Any, Literal

from giantjax.errors import InputError, did_you_mean


def leaves(config: Any, prefix: str = "") -> dict[str, Any]:
    """Every leaf of a configuration by its path: `{"model.num_layers": 4, ...}`."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        value, path = getattr(config, item.name), f"{prefix}{item.name}"
        found |= leaves(value, f"{path}.") if dataclasses.is_dataclass(value) else {path: value}
    return found


def from_dict(kind: Any, values: dict[str, Any], path: str = "") -> Any:
    """The frozen dataclass `kind` out of what `dataclasses.asdict` made of it, by way of JSON or not.

    Raises:
        InputError: a field is unknown, missing or has the wrong type; the sentence names it.
    """
    hints = typing.get_type_hints(kind)
    unknown = [name for name in values if name not in hints]
    if unknown:
        raise InputError(f"there is no field {path}{unknown[0]}{did_you_mean(unknown[0], hints)}")
    missing = [
        item.name
        for item in dataclasses.fields(kind)
        if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING and item.name not in values
    ]
    if missing:
        raise InputError(f"the field {path}{missing[0]} is missing")
    arguments = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            if not isinstance(value, dict):
                raise InputError(f"{path}{name} is {value!r}, but it is a group of fields")
            value = from_dict(hints[name], value, f"{path}{name}.")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return kind(**arguments)


def check_types(section: Any, path: str) -> None:
    """Raise InputError where a field of `section` does not hold the type it is declared with."""
    for name, hint in typing.get_type_hints(type(section)).items():
        value, where = getattr(section, name), f"{path}.{name}" if path else name
        if not _has_type(value, hint):
            raise InputError(f"{where} is {value!r}; it must be {type_in_words(hint)}{_suggest(value, hint)}")
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and (not text or "\0" in text) for text in texts):
            raise InputError(f"{where} is {value!r}; it must not be empty or hold a zero byte")
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{where} is {value}; it must be a finite number")


def _has_type(value: Any, hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return any(_has_type(value, choice) for choice in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(_has_type(item, typing.get_args(hint)[0]) for item in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _suggest(value: Any, hint: Any) -> str:
    return did_you_mean(value, typing.get_args(hint)) if typing.get_origin(hint) is Literal and isinstance(value, str) else ""


def type_in_words(hint: Any) -> str:
    """A declared type as a user would say it: `a whole number or None`."""
    origin = typing.get_origin(hint)
    if origin is types.UnionType:
        return " or ".join(type_in_words(choice) for choice in typing.get_args(hint))
    if origin is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    if origin is tuple:
        return "a tuple of " + {str: "strings"}.get(typing.get_args(hint)[0], "values")
    words = {int: "a whole number", float: "a number", str: "a string", bool: "True or False", type(None): "None"}
    return words.get(hint, f"a {getattr(hint, '__name__', hint)}")


def is_number(text: str) -> bool:
    """Whether `text` reads as a number."""
    try:
        float(text)
    except ValueError:
        return False
    return True


def at_least(path: str, value: float, least: float) -> None:
    """Raise InputError unless value >= least."""
    if value < least:
        raise InputError(f"{path} is {value}; it must be at least {least}")


def above_zero(path: str, value: float) -> None:
    """Raise InputError unless value > 0."""
    if value <= 0:
        raise InputError(f"{path} is {value}; it must be above 0")
