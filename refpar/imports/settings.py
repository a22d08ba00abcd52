"""The fields of another library's config.json, to a Model and back.

A field that says how something is computed must say what refpar computes; sizes of training and generation are passed over.
"""
from __future__ import annotations

import math
from typing import Any

from refpar.config import Model
from refpar.imports.convert import family_of
from refpar.imports.families import FAMILIES, Family

ROTARY = ("rope_theta", "rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LIMITS = ("time_step_least", "time_step_most")
INFINITY = {"__float__": "Infinity"}                # JSON has none; ours is written 0


def model_of(fields: dict[str, Any]) -> Model:
    """The Model that a config.json describes; ValueError, one sentence, where refpar has none."""
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"imports: model_type {kind!r} is not known; those known are {', '.join(FAMILIES)}")
    family, fields = FAMILIES[kind], _flat(fields)
    _check(fields, family.only, kind)
    given = {}
    for ours, theirs in family.fields.items():
        if fields.get(theirs) not in (None, "auto"):
            given[ours] = _word(family, ours, theirs, fields[theirs])
        elif ours not in family.derived:
            raise ValueError(f"imports: config.json lacks {theirs}, a size of every {kind} model")
    for ours, value in family.derived.items():
        if ours not in given:
            given[ours] = value(given, fields)
    model = Model(pattern=family.pattern, **given, **family.ours)
    _check(fields, {theirs: value(model) for theirs, value in family.computed.items()}, kind)
    return model


def fields_of(config: Model) -> dict[str, Any]:
    """The config.json of a Model."""
    family = family_of(config)
    kind = next(kind for kind, known in FAMILIES.items() if known is family)
    fields = {theirs: _their_word(family, ours, getattr(config, ours)) for ours, theirs in family.fields.items()}
    computed = {theirs: value(config) for theirs, value in family.computed.items()}
    for theirs, value in computed.items():
        if value != int(value):
            raise ValueError(f"imports: {theirs} must be a whole number in the config.json of a {kind} model, and is {value:.3f}")
    return _grouped({"model_type": kind} | fields | {theirs: int(value) for theirs, value in computed.items()} | family.only)


def _check(fields: dict[str, Any], values: dict[str, Any], kind: str):
    for name, value in values.items():
        if fields.get(name, value) != value:
            raise ValueError(f"imports: {name}={fields[name]!r} in config.json, and in refpar's {kind} model it is {value!r}")


def _word(family: Family, ours: str, theirs: str, value):
    """Their word in ours; a value without words is the same."""
    words = family.words.get(ours)
    if words is None:
        return value
    if value not in words:
        raise ValueError(f"imports: {theirs}={value!r} in config.json, and refpar knows {', '.join(map(repr, words))}")
    return words[value]


def _their_word(family: Family, ours: str, value):
    for theirs, mine in family.words.get(ours, {value: value}).items():
        if mine == value:
            return theirs
    raise ValueError(f"imports: no class of checkpoints has {ours}={value}")


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """What newer files group (rotary positions) or pair (limits of the time step), each under its own name."""
    rotary = (fields.get("rope_scaling") or {}) | (fields.get("rope_parameters") or {})
    if "type" in rotary:                                            # the oldest name
        rotary = {"rope_type": rotary["type"]} | rotary
    limits = [0.0 if limit in (INFINITY, math.inf) else limit for limit in fields.get("time_step_limit") or ()]
    return fields | rotary | dict(zip(LIMITS, limits))


def _grouped(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse, as newer files have it."""
    if fields.get(LIMITS[1]) == 0:
        fields = fields | {LIMITS[1]: math.inf}
    parts = {"rope_parameters": {name: fields.pop(name) for name in ROTARY if name in fields},
             "time_step_limit": [fields.pop(name) for name in LIMITS if name in fields]}
    return fields | {name: part for name, part in parts.items() if part}
