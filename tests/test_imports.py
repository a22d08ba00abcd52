"""Checkpoints of other libraries: every element used exactly once, a round trip that changes nothing, and one sentence for each
refusal.  That the elements end in the right places is `test_recordings_hf.py`'s to show."""
import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refpar.config import Model
from refpar.imports.convert import arrays_of, from_refpar, to_refpar
from refpar.imports.families import FAMILIES
from refpar.imports.settings import fields_of, model_of
from refpar.nn.build import build
from refpar.oracle.equal import leaves

SMALL = st.integers(1, 3)


@st.composite
def models(draw):
    """A model that a known class of checkpoints holds, of any small sizes."""
    family = FAMILIES[draw(st.sampled_from(list(FAMILIES)))]
    names = "blocks", "vocab", "longest", "kv_heads", "ffn", "ssm_head_width", "groups", "state", "conv", "dt_rank"
    size = {name: draw(SMALL) for name in names}
    heads, ssm_heads, head_width = size["kv_heads"] * draw(SMALL), size["groups"] * draw(SMALL), 2 * draw(SMALL)
    if family is FAMILIES["gpt2"]:
        size |= {"kv_heads": heads, "width": heads * head_width, "mlp": draw(st.sampled_from(["gelu", "gelu_tanh"]))}
    else:
        channels = ssm_heads * size["ssm_head_width"]
        size |= {"width": draw(st.sampled_from([part for part in (1, 2, 3, 4, 6) if channels % part == 0]))}
    if family is FAMILIES["llama"]:
        size |= {"attention_bias": draw(st.sampled_from(["none", "all"])), "mlp_bias": draw(st.booleans()),
                 "rope_scaling": draw(st.sampled_from(["none", "linear", "llama3"]))}
    if family is FAMILIES["mamba2"]:
        size |= {"dt_least": draw(st.sampled_from([0.0, 0.01])), "conv_bias": draw(st.booleans())}
    return Model(pattern=family.pattern, heads=heads, head_width=head_width, ssm_heads=ssm_heads, tied=draw(st.booleans()),
                 inner=size["width"] * draw(SMALL), **family.ours | size)


def tagged(model):
    """Parameters whose elements are numbered, each with its own number."""
    params, count = {}, 0
    for layer, group in build(model).dims().items():
        params[layer] = {}
        for name, dims in group.items():
            shape = model.shape(dims)
            size = int(np.prod(shape))
            params[layer][name] = np.arange(count, count + size, dtype=np.float64).reshape(shape)
            count += size
    return params, count


@given(models())
@settings(max_examples=60, deadline=None)
def test_every_element_is_used_exactly_once(model):
    params, count = tagged(model)
    state = from_refpar(params, model)
    assert np.array_equal(np.sort(np.concatenate([array.ravel() for array in state.values()])), np.arange(count))
    assert all(array.flags.c_contiguous for array in state.values())
    back = dict(leaves(to_refpar(state, model)))
    assert all(np.array_equal(back[name], w) and back[name].dtype == w.dtype for name, w in leaves(params))
    assert back.keys() == dict(leaves(params)).keys()


@given(models())
@settings(max_examples=30, deadline=None)
def test_the_settings_come_back(model):
    """What a class has no field for comes back as the default."""
    fields = json.loads(json.dumps(fields_of(model)))
    family = FAMILIES[fields["model_type"]]
    kept = {name: getattr(model, name) for name in {*family.fields, *family.derived, *family.ours}}
    assert model_of(fields) == Model(pattern=model.pattern, **kept)


def test_nothing_of_the_argument_is_kept():
    params, _ = tagged(LLAMA)
    state = from_refpar(params, LLAMA)
    back = to_refpar(state, LLAMA)
    pools = [array for _, array in leaves(params)], list(state.values()), [array for _, array in leaves(back)]
    for i, one in enumerate(pools):
        for other in pools[i + 1:]:
            assert not any(np.shares_memory(a, b) for a in one for b in other)


LLAMA = Model(blocks=2, vocab=5, width=6, heads=2, kv_heads=1, head_width=4, ffn=3)
TIED = dataclasses.replace(LLAMA, tied=True)


def state_of(model):
    return from_refpar(tagged(model)[0], model)


def test_old_files_are_understood():
    """Without the class's prefix, with its constants, with a copy of the tied table."""
    state = state_of(TIED)
    bare = {name.removeprefix("model."): array for name, array in state.items()}
    bare |= {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(2), "lm_head.weight": bare["embed_tokens.weight"].copy()}
    expected = dict(leaves(tagged(TIED)[0]))
    assert all(np.array_equal(expected[name], w) for name, w in leaves(to_refpar(bare, TIED)))


def without(state, name):
    return {key: array for key, array in state.items() if key != name}


@pytest.mark.parametrize("change, sentence", [
    (lambda s: without(s, "model.norm.weight"), "this checkpoint lacks model.norm.weight; it has 20 arrays where .* has 21"),
    (lambda s: without(s, "model.layers.1.mlp.up_proj.weight"), "lacks model.layers.1.mlp.up_proj.weight"),
    (lambda s: s | {"model.layers.2.mlp.up_proj.weight": np.ones(3)}, "has model.layers.2.mlp.up_proj.weight, which"),
    (lambda s: s | {"score.weight": np.ones(3)}, "has model.score.weight, which"),
    (lambda s: s | {"model.layers.0.self_attn.k_proj.weight": np.ones((8, 6))},
     r"model.layers.0.self_attn.k_proj.weight has shape \[8, 6\], and in this model it has \[4, 6\]"),
    (lambda s: s | {"lm_head.weight": np.ones(6)}, r"lm_head.weight has shape \[6\], and in this model it has \[5, 6\]"),
    (lambda s: {name: array.astype(int) for name, array in s.items()}, "are int64, and weights must be"),
])
def test_a_wrong_checkpoint_is_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence) as refused:
        to_refpar(change(state_of(LLAMA)), LLAMA)
    assert "\n" not in str(refused.value)


def test_a_head_that_is_not_the_table_is_no_tied_model():
    with pytest.raises(ValueError, match="in a tied model they are one"):
        to_refpar(state_of(TIED) | {"lm_head.weight": np.ones((5, 6))}, TIED)


def test_wrong_parameters_are_refused():
    params, _ = tagged(LLAMA)
    for changed, sentence in [
            (params | {"1.attention": without(params["1.attention"], "q")}, "params lacks 1.attention.q"),
            (params | {"1.attention": params["1.attention"] | {"z": np.ones(3)}}, "params has 1.attention.z"),
            (params | {"1.attention": params["1.attention"] | {"q": np.ones((8, 6))}}, r"1.attention.q has shape \[8, 6\]")]:
        with pytest.raises(ValueError, match=sentence):
            from_refpar(changed, LLAMA)


@pytest.mark.parametrize("change, sentence", [
    ({"model_type": "bert"}, "model_type 'bert' is not known; those known are"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' in config.json, and in refpar's llama model it is 'silu'"),
    ({"hidden_size": None}, "config.json lacks hidden_size"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 8.0}}, "rope_type='yarn' in config.json, and refpar knows 'default', "),
])
def test_settings_that_refpar_lacks_are_refused(change, sentence):
    with pytest.raises(ValueError, match=sentence):
        model_of(fields_of(LLAMA) | change)


def test_newer_settings_group_the_rotary_ones():
    fields = fields_of(LLAMA)
    assert fields.pop("rope_parameters")["rope_theta"] == 10000.0
    assert model_of(fields | {"rope_theta": 50.0, "rope_scaling": None}).rope_base == 50.0
    old = model_of(fields | {"rope_scaling": {"type": "linear", "factor": 2.0}})
    assert (old.rope_base, old.rope_scaling, old.rope_factor) == (10000.0, "linear", 2.0)


def test_what_must_follow_from_other_fields_is_checked():
    mamba2 = Model(pattern=("mamba2",), width=6, ssm_heads=4, ssm_head_width=3)
    assert fields_of(mamba2)["expand"] == 2
    with pytest.raises(ValueError, match="expand=3 in config.json, and in refpar's mamba2 model it is 2"):
        model_of(fields_of(mamba2) | {"expand": 3})
    with pytest.raises(ValueError, match="expand must be a whole number .* and is 2.400"):
        fields_of(dataclasses.replace(mamba2, width=5))
    assert model_of(fields_of(mamba2) | {"time_step_limit": [0.5, {"__float__": "Infinity"}]}).dt_least == 0.5


def test_a_model_that_turns_halves_needs_no_permutation():
    halves = dataclasses.replace(LLAMA, rope_pairs="halves")
    state = from_refpar(tagged(halves)[0], halves)
    assert np.array_equal(state["model.layers.0.self_attn.q_proj.weight"], tagged(halves)[0]["1.attention"]["q"].T)


def test_a_model_that_no_class_holds_is_refused():
    with pytest.raises(ValueError, match="no class of checkpoints has the pattern mlp"):
        arrays_of(Model(pattern=("mlp",)))
    with pytest.raises(ValueError, match="no class of checkpoints has a place for 2.mlp.gate_bias of this model"):
        arrays_of(Model(**FAMILIES["gpt2"].ours))


def test_safetensors(tmp_path):
    """A folder as `save_pretrained` writes it, and files that are none; where the extra is missing, one sentence says so."""
    from refpar.imports.files import load_folder, load_safetensors
    try:
        from safetensors.numpy import save_file
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install refpar\[compare\]"):
            load_safetensors(tmp_path / "model.safetensors")
        return
    (tmp_path / "config.json").write_text(json.dumps(fields_of(LLAMA)))
    with pytest.raises(ValueError, match="has no "):
        load_folder(tmp_path)
    state = state_of(LLAMA)
    save_file(state, tmp_path / "model.safetensors")
    model, params = load_folder(tmp_path)
    assert model.width == 6 and np.array_equal(params["2.mlp"]["down"], tagged(LLAMA)[0]["2.mlp"]["down"])
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="cut short or no safetensors"):
        load_safetensors(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="cannot be read"):
        load_safetensors(tmp_path / "other.safetensors")
