"""A model in words, as a command takes it and a report prints it: a preset's name and what differs from it, or a file."""
from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from refpar.config import PRESETS, Model


def _field(name: str, text):
    """One `field=value` of a model, turned into the type that the field has."""
    known = {field.name: field.default for field in dataclasses.fields(Model)}
    if name not in known:
        raise ValueError(f"model: there is no field {name!r}; the fields are {', '.join(known)}")
    kind = type(known[name])
    try:
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[str(text).lower()]
        if kind is tuple:
            return tuple(text.replace("+", " ").split()) if isinstance(text, str) else tuple(text)
        if kind is int and float(text) != int(text):
            raise ValueError
        return kind(text)
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"model: {name}={text} must be of the type {kind.__name__}, such as {known[name]}") from None


def parse_model(text: str) -> Model:
    """`NAME[,field=value...]` or `FILE.json` (its fields, with an optional "base" preset) -> Model."""
    name, *changes = text.split(",")
    if name.endswith(".json"):
        if Path(name).exists() and not Path(name).is_file():
            raise ValueError(f"model: {name} must be a regular file")
        try:
            fields = json.loads(Path(name).read_text())
        except OSError:
            raise ValueError(f"model: the file {name} cannot be read") from None
        except RecursionError:
            raise ValueError(f"model: the file {name} is nested too deep, and must hold one JSON object of fields") from None
        except ValueError as error:
            raise ValueError(f"model: the file {name} is not JSON ({error})") from None
        if not isinstance(fields, dict):
            raise ValueError(f"model: the file {name} must hold one JSON object of fields")
        name = fields.pop("base", None)
    else:
        fields = {}
    if name is not None and name not in PRESETS:
        raise ValueError(f"model: there is no preset {name!r}; the presets are {', '.join(PRESETS)}")
    given = {}
    for change in changes:
        field, equals, value = change.partition("=")
        if not equals:
            raise ValueError(f"model: {change!r} must be written field=value")
        if field in given:
            raise ValueError(f"model: {field} stands twice in {text!r}")
        given[field] = value
    base = PRESETS[name] if name else Model()
    return dataclasses.replace(base, **{field: _field(field, value) for field, value in (fields | given).items()})


def describe_model(model: Model) -> str:
    """The shortest `NAME,field=value...` that parses to this model."""
    def changes(base: Model) -> list[str]:
        told = {name: getattr(model, name) for name in vars(model) if getattr(model, name) != getattr(base, name)}
        return [f"{name}={'+'.join(value) if isinstance(value, tuple) else value}" for name, value in told.items()]
    return min((",".join([name, *changes(base)]) for name, base in PRESETS.items()), key=len)
