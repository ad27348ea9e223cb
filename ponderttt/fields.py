"""Dataclasses from plain values: each field may carry a check, and all errors are collected."""

import dataclasses
import re
import types
from collections.abc import Callable
from dataclasses import field
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

Check = Callable[[Any], str | None]


def at_least(low: float) -> Any:
    """A field whose value may not be below `low`."""
    return field(
        metadata={"check": lambda v: None if v == "auto" or v >= low else f"must be at least {low}"}
    )


def between(low: float, high: float) -> Any:
    """A field whose value lies strictly between `low` and `high`."""
    return field(
        metadata={
            "check": lambda v: None if low < v < high else f"must be between {low} and {high}"
        }
    )


def share() -> Any:
    """A field whose value lies in [0, 1]."""
    return field(metadata={"check": lambda v: None if 0 <= v <= 1 else "must be from 0 to 1"})


def gpu_share() -> Any:
    """A field whose value Ray can give: a part of one GPU, or whole ones."""

    def check(value: float) -> str | None:
        fits = 0 <= value < 1 or value == int(value) > 0
        return None if fits else "must be from 0 to 1, or a whole number"

    return field(metadata={"check": check})


def filled(low: int | None = None) -> Any:
    """A list or table that may not be empty, repeat itself or hold a number below `low`."""

    def check(value: Any) -> str | None:
        if not value:
            return "must not be empty"
        if low is not None and min(value) < low:
            return f"must hold no number below {low}"
        return None if len(set(value)) == len(value) else "must not repeat an entry"

    return field(metadata={"check": check})


def named(what: str) -> Any:
    """A text that may not be empty, and what it must name."""
    return field(metadata={"check": lambda v: None if v else f"must name {what}"})


def host_and_port() -> Any:
    """A field that is empty or names a port of a host."""

    def check(value: str) -> str | None:
        fits = not value or re.fullmatch(r"[^/\s]+:\d+", value)
        return None if fits else "must be HOST:PORT, as `ray start --head` prints it, or empty"

    return field(metadata={"check": check})


def sound_values(kind: Any, raw: Any, key: str, errors: list[str]) -> dict[str, Any]:
    """The fields of a dataclass that nothing is wrong with."""
    if not isinstance(raw, dict):
        _wrong(key or "the file", "a table", raw, errors)
        return {}
    fields, hints = {f.name: f for f in dataclasses.fields(kind)}, get_type_hints(kind)
    for name in raw.keys() - fields.keys():
        errors.append(f"{_join(key, name)}: unknown key; allowed: {', '.join(fields)}")
    values = {}
    for name, spec in fields.items():
        before = len(errors)
        if name in raw:
            value = _build_field(hints[name], spec, raw[name], _join(key, name), errors)
            if len(errors) == before:
                values[name] = value
        elif spec.default is dataclasses.MISSING:
            errors.append(f"{_join(key, name)}: missing")
    return values


def _build(kind: Any, raw: Any, key: str, errors: list[str]) -> Any:
    """`raw` as `kind`; what does not fit is added to `errors` under its dotted key."""
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, raw, key, errors)
    origin, args = get_origin(kind), get_args(kind)
    if origin is tuple:
        if not isinstance(raw, list):
            return _wrong(key, "a list", raw, errors)
        return tuple(_build(args[0], item, f"{key}[{i}]", errors) for i, item in enumerate(raw))
    if origin is dict:
        if not isinstance(raw, dict):
            return _wrong(key, "a table", raw, errors)
        return {str(k): _build(args[1], v, f"{key}.{k}", errors) for k, v in raw.items()}
    if origin is Literal:
        if raw in args and type(raw) in {type(a) for a in args}:
            return raw
        return _wrong(key, "one of " + ", ".join(map(str, args)), raw, errors)
    if origin in (Union, types.UnionType):
        return _build_union(args, raw, key, errors)
    if kind is float and type(raw) in (int, float):
        return float(raw)
    return raw if type(raw) is kind else _wrong(key, f"of type {kind.__name__}", raw, errors)


def _build_union(options: tuple[Any, ...], raw: Any, key: str, errors: list[str]) -> Any:
    tries: list[list[str]] = []
    for option in options:
        tries.append([])
        value = _build(option, raw, key, tries[-1])
        if not tries[-1]:
            return value
    errors.append(" or ".join(found[0] for found in tries))
    return None


def _build_dataclass(kind: Any, raw: Any, key: str, errors: list[str]) -> Any:
    before = len(errors)
    values = sound_values(kind, raw, key, errors)
    return kind(**values) if len(errors) == before else None


def _build_field(hint: Any, spec: Any, raw: Any, key: str, errors: list[str]) -> Any:
    before = len(errors)
    value = _build(hint, raw, key, errors)
    check: Check | None = spec.metadata.get("check")
    problem = check(value) if check and len(errors) == before else None
    if problem:
        errors.append(f"{key}: {problem}, is {raw!r}")
    return value


def _join(key: str, name: Any) -> str:
    return f"{key}.{name}" if key else str(name)


def _wrong(key: str, wanted: str, raw: Any, errors: list[str]) -> None:
    errors.append(f"{key}: must be {wanted}, is {raw!r}")
