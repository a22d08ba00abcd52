"""Hugging Face's own classes, through the import tables: logits, loss, every gradient, and the weights after three AdamW steps are
what `recordings/record_hf.py` recorded.

Gradients and the weights after are mapped by the table that maps the weights.  Ours are computed in float64; where the class
computed in float32, its eps is the coarser one, and counts.  AdamW divides a gradient by its own size, so the bound of each weight
after a step is that of its gradient, carried through the step (`oracle/bound.py`).
"""
import json
from pathlib import Path

import numpy as np
import pytest

from refpar.config import Training
from refpar.corpus import Batch
from refpar.imports.convert import from_refpar, to_refpar
from refpar.imports.families import FAMILIES
from refpar.imports.settings import model_of
from refpar.nn import chain as chains
from refpar.nn.build import build
from refpar.nn.gradient import loss_and_gradients
from refpar.nn.optimizer import clipped, squared, updated
from refpar.oracle.bound import distance_within, step_bounds
from refpar.oracle.equal import bound, distance, leaves
from refpar.train import State

TRAINING = Training(rate=1e-2, decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8, clip=0.5, dtype="float64")


def part(file, begin: str) -> dict:
    """"weights" -> name -> array."""
    return {name.removeprefix(f"{begin}/"): file[name] for name in file.files if name.startswith(f"{begin}/")}


def wide(params: dict) -> dict:
    return {layer: {name: w.astype(np.float64) for name, w in group.items()} for layer, group in params.items()}


def batch_of(file) -> Batch:
    """Each row one document, as the class takes it; token t predicts label t+1."""
    tokens, labels = file["tokens"], file["labels"]
    targets = np.full_like(labels, -1)
    targets[:, :-1] = np.where(labels[:, 1:] < 0, -1, labels[:, 1:])
    length = tokens.shape[1]
    place = np.arange(tokens.size).reshape(tokens.shape)
    return Batch(tokens, targets, place % length, place // length, place)


def scales(grads: dict) -> dict[str, float]:
    """The largest magnitude of each gradient.  A key's bias moves all scores of a query alike, which softmax does not see: its
    gradient is a sum that cancels to nothing, of addends as large as those of the key's weight."""
    largest = {name: np.abs(grad).max() for name, grad in leaves(grads)}
    return {name: largest[name.removesuffix("_bias") if name.endswith(".k_bias") else name] for name in largest}


def differences(kind: str) -> dict[str, float]:
    """What was compared -> its distance, in units of its bound."""
    file = np.load(Path(__file__).with_name("recordings") / f"hf_{kind}.npz")
    model = model_of(json.loads(str(file["config"])))
    chain, batch, n = build(model), batch_of(file), file["tokens"].size * model.vocab
    params = to_refpar(part(file, "weights"), model)
    dtype, params = params["0.embedding"]["table"].dtype, wide(params)
    logits, _, _ = chains.forward(chain, batch.tokens, params, batch, chains.start(chain, params, batch))
    apart = {"logits": distance(logits, file["logits"], n)}
    m, v = ({layer: {name: np.zeros_like(w) for name, w in group.items()} for layer, group in params.items()} for _ in "mv")
    state, bounds = State(params, m, v), None
    for step, recorded in enumerate(file["losses"].astype(dtype)):
        loss, grads = loss_and_gradients(chain, state.params, batch, batch.count)
        apart[f"loss {step}"] = distance(loss / batch.count, recorded, n)
        if step == 0:
            apart["own loss"] = distance(loss / batch.count, file["own_loss"], n)
            theirs = dict(leaves(to_refpar(part(file, "gradients"), model)))
            apart |= {f"gradient {name}": distance(grad, theirs[name], n, scales(grads)[name]) for name, grad in leaves(grads)}
        dg = {layer: {name: np.full(g.shape, bound(dtype, n, scales(grads)[f"{layer}.{name}"])) for name, g in group.items()}
              for layer, group in grads.items()}
        bounds = step_bounds(state, grads, dg, TRAINING.rate, TRAINING, bounds)
        norm = np.sqrt(sum(squared(grad) for _, grad in leaves(grads)))
        state = State(*updated(state.params, clipped(grads, norm, TRAINING.clip), *state[1:], TRAINING.rate, TRAINING))
    after, limits = dict(leaves(to_refpar(part(file, "after"), model))), dict(leaves(bounds[0]))
    return apart | {f"after {name}": distance_within(w, after[name], limits[name]) for name, w in leaves(state.params)}


@pytest.mark.parametrize("kind", FAMILIES)
def test_it_is_what_the_class_recorded(kind):
    apart = differences(kind)
    wrong = {name: far for name, far in apart.items() if not far <= 1}
    assert not wrong, wrong
    assert any(name.startswith("gradient ") for name in apart) and any(name.startswith("after ") for name in apart)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_recorded_weights_come_back(kind):
    file = np.load(Path(__file__).with_name("recordings") / f"hf_{kind}.npz")
    model, theirs = model_of(json.loads(str(file["config"]))), part(file, "weights")
    back = from_refpar(to_refpar(theirs, model), model)
    assert back.keys() == theirs.keys()
    assert all(np.array_equal(back[name], array) and back[name].dtype == array.dtype for name, array in theirs.items())
