"""Checkpoints of other libraries: their names and layouts, mapped to refpar's and back.

    families.py     the tables: which array holds which parameters, laid out how, and what the fields of config.json mean
    convert.py      to_refpar(state, config) -> params, from_refpar(params, config) -> state
    settings.py     model_of(fields) -> Model, fields_of(config) -> fields
    files.py        safetensors (an optional extra) and whole folders
"""
