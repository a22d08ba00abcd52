"""The fields of another library's config.json, to a Model and back.

A field that says how something is computed must say what refpar computes; sizes of training and generation are passed over.
"""
from __future__ import annotations

from typing import Any

from refpar.config import Model
from refpar.imports.convert import family_of
from refpar.imports.families import FAMILIES


def model_of(fields: dict[str, Any]) -> Model:
    """The Model that a config.json describes; ValueError, one sentence, where refpar has none."""
    kind = fields.get("model_type")
    if kind not in FAMILIES:
        raise ValueError(f"imports: model_type {kind!r} is not known; those known are {', '.join(FAMILIES)}")
    family, fields = FAMILIES[kind], _flat(fields)
    for name, value in family.only.items():
        if fields.get(name, value) != value:
            raise ValueError(f"imports: {name}={fields[name]!r} in config.json, and refpar has {name}={value!r} in a {kind} model")
    given = {}
    for ours, theirs in family.fields.items():
        if fields.get(theirs) is not None:
            given[ours] = fields[theirs]
        elif ours in family.derived:
            given[ours] = family.derived[ours](given)
        else:
            raise ValueError(f"imports: config.json lacks {theirs}, a size of every {kind} model")
    return Model(pattern=family.pattern, **given, **family.ours)


def fields_of(config: Model) -> dict[str, Any]:
    """The config.json of a Model."""
    family = family_of(config)
    kind = next(kind for kind, known in FAMILIES.items() if known is family)
    return {"model_type": kind, **{theirs: getattr(config, ours) for ours, theirs in family.fields.items()}, **family.only}


def _flat(fields: dict[str, Any]) -> dict[str, Any]:
    """Newer files group what concerns rotary positions: lifted here to where older ones have it.  A kind other than the plain one
    is a scaling."""
    rotary = dict(fields.get("rope_parameters") or {})
    if rotary.pop("rope_type", "default") != "default":
        rotary["rope_scaling"] = fields["rope_parameters"]
    return fields | rotary
