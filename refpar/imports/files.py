"""Reading checkpoints of other libraries from the disk.  The package `safetensors` is an extra: `pip install refpar[compare]`."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from refpar.config import Model
from refpar.imports.convert import to_refpar
from refpar.imports.settings import model_of

DTYPES = {"F16": np.float16, "F32": np.float32, "F64": np.float64}


def load_safetensors(path: str | Path) -> dict[str, np.ndarray]:
    """A file, or every *.safetensors of a folder -> arrays by name.  bfloat16 becomes float32, which holds it exactly."""
    try:
        from safetensors import SafetensorError, deserialize
    except ImportError:
        raise ValueError("imports: reading safetensors needs the package safetensors: pip install refpar[compare]") from None
    path = Path(path)
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"imports: the folder {path} has no *.safetensors")
    state = {}
    for file in files:
        try:
            content = deserialize(file.read_bytes())
        except OSError as error:
            raise ValueError(f"imports: the file {file} cannot be read ({error.strerror})") from None
        except SafetensorError as error:
            raise ValueError(f"imports: the file {file} is cut short or no safetensors ({error})") from None
        state |= {name: _array(name, **tensor) for name, tensor in content}
    return state


def _array(name: str, dtype: str, shape: list[int], data: bytes) -> np.ndarray:
    if dtype == "BF16":                                             # the upper half of a float32
        wide = np.frombuffer(data, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    if dtype not in DTYPES:
        raise ValueError(f"imports: {name} is {dtype}, and weights must be BF16 or {', '.join(DTYPES)}")
    return np.frombuffer(data, DTYPES[dtype]).reshape(shape)


def load_folder(path: str | Path) -> tuple[Model, dict]:
    """A folder with config.json and safetensors, as Hugging Face's `save_pretrained` writes it -> the model and its parameters."""
    settings = Path(path) / "config.json"
    try:
        fields = json.loads(settings.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"imports: the file {settings} cannot be read ({error})") from None
    model = model_of(fields)
    return model, to_refpar(load_safetensors(path), model)
