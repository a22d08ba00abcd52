"""What `bench step` and `bench scan` refuse, and, where PyTorch and Hugging Face are installed, that all contestants agree."""
import importlib.util
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from refpar.bench import scan, step
from refpar.commands.memory import keep_pages
from refpar.config import Model
from refpar.nn.attention import Places
from refpar.nn.blocks import blocks, remembering

COMPARED = all(importlib.util.find_spec(name) for name in ("torch", "transformers"))


@pytest.mark.parametrize("bench", [step, scan])
def test_an_unknown_case_is_refused(bench):
    with pytest.raises(ValueError, match="there is no case 'llama-3'; the cases are "):
        bench.prepare(SimpleNamespace(cases=("llama-3",), rounds=None))


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ValueError, match=r"torch is missing: pip install refpar\[compare\]"):
        step.prepare(SimpleNamespace(cases=None, rounds=None))


@pytest.mark.skipif(not COMPARED, reason="PyTorch and Hugging Face are an optional extra")
@pytest.mark.parametrize("model", [
    Model(blocks=1, width=16, ffn=24), Model(pattern=("mamba2",), blocks=1, width=16, ssm_head_width=4),
    Model(pattern=("mamba1",), blocks=1, width=16, inner=32), step._gpt2(16, 2)])
def test_all_contestants_have_the_same_loss(model):
    losses = {name: run() for name, run in step.contestants(step.Case(model, rows=2, sequence=9)).items()}
    assert len(losses) >= 2 and max(losses.values()) - min(losses.values()) < 1e-5


@pytest.mark.skipif(not COMPARED, reason="PyTorch and Hugging Face are an optional extra")
@pytest.mark.parametrize("heads", [0, 2])
def test_all_scans_have_the_same_result(heads):
    assert scan.measure(scan.Case(2, 20, 16, 4, heads=heads, chunk=8), rounds=1).keys() >= {"refpar", "recurrence", "loop"}


def test_useful_operations_are_those_of_the_weights_and_of_the_visible_pairs():
    model = Model(blocks=1, width=4, heads=1, kv_heads=1, head_width=2, ffn=3, vocab=5)
    weights = 4 * 2 * 4 + 3 * 4 * 3 + 4 * 5
    assert step.useful(step.Case(model, rows=2, sequence=3)) == 6 * 6 * weights + 12 * 2 * 6 * 2


def test_pages_are_kept_by_a_whole_process():
    done = subprocess.run([sys.executable, "-c", "from refpar.commands.memory import keep_pages; print(keep_pages())"],
                          capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("True", "False") and callable(keep_pages)


def test_a_memory_of_blocks_answers_as_they_do():
    """Asked the same again, and then something else in each of its arguments."""
    plan, place = remembering(), np.arange(2 * 70).reshape(2, 70)
    one = Places(place // 70, place % 70, place)
    other = one._replace(document=place // 7, position=place % 7)
    for asked in ((one, one, 2, np.float32, 9), (one, one, 2, np.float32, 9), (one, one, 2, np.float32, 99),
                  (other, one, 2, np.float32, 99), (other, other, 2, np.float32, 99), (other, other, 2, np.float64, 99),
                  (other, other, 9000, np.float64, 99)):
        answer, expected = plan(*asked), list(blocks(*asked))
        assert len(answer) == len(expected)
        for mine, theirs in zip(answer, expected):
            assert mine[:4] == theirs[:4] and np.array_equal(mine.bias, theirs.bias) and mine.bias.dtype == theirs.bias.dtype
