"""The freezer: no layer, seam or step writes into what it was lent, and one that does fails at that line."""
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from strategies import situations

from refpar.config import PRESETS
from refpar.nn.build import build, plain
from refpar.nn.gradient import add, loss_and_gradients
from refpar.nn.seams import KEEP, Layer
from refpar.oracle.equal import leaves
from refpar.oracle.freeze import freeze, frozen, frozen_layer, frozen_seams
from refpar.oracle.run import fresh
from refpar.oracle.situation import PROOF, Situation
from refpar.watch import arrays_of


def gradients(chain, params, situation):
    batch = situation.batch(0)
    return loss_and_gradients(chain, params, batch, batch.count)


@settings(max_examples=40)
@given(situations(1))
def test_frozen_layers_compute_the_same(situation):
    """Every family, forward and backward: nothing is written, and what comes out is the same to the bit."""
    chain, state = fresh(situation)
    loss, grads = gradients(chain, state.params, situation)
    free_loss, free = gradients(build(situation.model, situation.training.seed), state.params, situation)
    assert loss == free_loss
    for (name, one), (_, other) in zip(leaves(grads), leaves(free)):
        assert one.tobytes() == other.tobytes(), name
    assert all(not array.flags.writeable for array in arrays_of(state.params))
    add(grads, free)


def in_place(which):
    """A layer that writes into its x, its dy or its saved."""
    def forward(x, w, batch, before):
        if which == "x":
            x *= 2
        y = x * 2
        return y, None, {"y": y[:1]}

    def backward(dy, dafter, saved, w, batch):
        if which == "dy":
            dy += 1
        if which == "saved":
            np.multiply(saved["y"], 2, out=saved["y"])
        return 2 * dy, None, {}
    return Layer(forward, backward, {}, {})


@pytest.mark.parametrize("which", ["x", "dy", "saved"])
def test_who_writes_into_what_it_was_lent_fails_at_the_line(which):
    layer = frozen_layer(in_place(which))
    with pytest.raises(ValueError, match="read-only") as caught:
        _, _, saved = layer.forward(np.ones((2, 3)), {}, None, None)
        layer.backward(np.ones((2, 3)), None, saved, {}, None)
    assert any(entry.name in ("forward", "backward") and entry.path == caught.traceback[0].path for entry in caught.traceback)


def test_the_owner_of_a_view_is_frozen_too():
    owner = np.zeros((2, 3))
    freeze({"a": [owner[1:, 0]]})
    with pytest.raises(ValueError, match="read-only"):
        owner[0, 0] = 1


@pytest.mark.parametrize("seam", ["enter", "leave"])
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_seams_are_guarded(seam, way):
    """A communication that writes into its argument."""
    def double(x, batch):
        x *= 2
        return x

    def fill(name, kind):
        pair = KEEP._replace(**{way: double})
        return plain(model)(name, kind)._replace(**{seam: pair})
    model = replace(PRESETS["llama-tiny"], blocks=1)
    situation = Situation(model, training=PROOF)
    chain, state = fresh(situation)
    with pytest.raises(ValueError, match="read-only"):
        gradients(frozen(build(model, 0, frozen_seams(fill))), state.params, situation)
