"""Batches: five arrays that any rank computes alike, documents that stay apart, and texts refused at the door."""
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refpar import corpus, reading
from refpar.config import Training
from refpar.corpus import IGNORED
from refpar.oracle.packed import packed

TRAINING = Training(rows=7, sequence=12, seed=3)


@pytest.fixture
def small():
    documents = [b"a document of some length. " * 3, b"x", b"", b"another one, " * 4,
                 b"and the last of them all, held out, or so we hope"]
    return corpus.Corpus("small", *corpus._cut(documents, 130))


def check_laws(batch):
    """What every batch owes to those who read it."""
    rises = batch.position[:, 1:] == batch.position[:, :-1] + 1
    assert (rises | (batch.position[:, 1:] == 0)).all()
    assert (rises == (batch.document[:, 1:] == batch.document[:, :-1])).all()
    assert (batch.position >= 0).all()
    answered = batch.targets[:, :-1] != IGNORED
    assert (batch.targets[:, :-1][answered] == batch.tokens[:, 1:][answered]).all()
    assert rises[answered].all()                                            # no target across documents
    assert all(array.dtype == np.int64 and array.shape == batch.tokens.shape for array in batch[:5])


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@given(rows=st.integers(0, 9), sequence=st.integers(1, 20), lengths=st.lists(st.integers(1, 30), min_size=1, max_size=6),
       ignored=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_packed_batches_keep_the_laws(rows, sequence, lengths, ignored, seed):
    batch = packed(seed, rows, sequence, 11, lengths, ignored)
    check_laws(batch)
    assert same(batch, packed(seed, rows, sequence, 11, lengths, ignored))
    masked = np.resize(ignored, rows) == 1
    assert (batch.targets[masked] == IGNORED).all()
    assert batch.count == (batch.targets >= 0).sum()


def test_packed_batches_reach_the_hard_corners():
    batch = packed(0, 4, 10, 11, lengths=(7, 1, 12), ignored=(0, 1))
    assert (batch.position[:, 0] > 0).any()                                 # a row that begins within a document
    assert (np.diff(batch.document[0]) != 0).sum() >= 2                     # three documents in a row, one of a single token
    assert (batch.targets[1] == IGNORED).all() and (batch.targets[0] != IGNORED).any()
    with pytest.raises(ValueError, match="at least 1"):
        packed(0, 2, 3, 11, lengths=())


def test_rows_of_a_step_keep_the_laws(small):
    for step in range(20):
        batch = corpus.batch(small, TRAINING, step)
        check_laws(batch)
        assert batch.step == step and (batch.position[:, 0] == 0).all()
        assert np.array_equal(batch.index.ravel(), np.arange(7 * 12))


@given(ranks=st.integers(1, 9), count=st.integers(1, 5), step=st.integers(0, 50))
def test_any_rank_computes_its_part(ranks, count, step):
    text = corpus.lay([bytes(range(32, 120)), b"second document here"])
    small = corpus.Corpus("small", text, text)
    parts = [corpus.batch(small, TRAINING, step, rows) for rank in range(ranks)
             for rows in corpus.micro_batches(TRAINING.rows, ranks, rank, count)]
    assert len(parts) == ranks * count                                      # empty ones too
    whole = corpus.batch(small, TRAINING, step)
    for name in ("tokens", "targets", "position", "document", "index"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name)), name
    assert sum(part.count for part in parts) == whole.count


def test_places_depend_on_seed_step_and_row(small):
    first = corpus.batch(small, TRAINING, 0)
    assert not same(first, corpus.batch(small, TRAINING, 1))
    assert not same(first, corpus.batch(small, Training(rows=7, sequence=12, seed=4), 0))
    more = corpus.batch(small, Training(rows=9, sequence=12, seed=3), 0)    # a larger batch begins with the smaller one
    assert np.array_equal(more.tokens[:7], first.tokens)


def test_every_place_of_the_train_text_is_drawn():
    text = corpus.lay([bytes(range(40, 60))])
    small = corpus.Corpus("tiny", text, text)
    firsts = {int(t) for step in range(60) for t in corpus.batch(small, TRAINING, step).tokens[:, 0]}
    assert firsts == set(range(40, 60 - TRAINING.sequence))                 # the last one still has a target for each token


@pytest.mark.parametrize("sequence", [1, 4, 7, 48, 49, 200])
def test_held_out_windows_cover_the_text_once(small, sequence):
    size = small.held_out.size
    batch = corpus.held_out(small, sequence)
    check_laws(batch)
    assert len(batch.tokens) == corpus.held_out_rows(small, sequence)
    assert np.array_equal(batch.tokens.ravel()[:size], small.held_out.tokens)
    pads = batch.document.ravel()[size:]
    assert (batch.targets.ravel()[size:] == IGNORED).all() and (pads < 0).all() and (batch.document.ravel()[:size] >= 0).all()
    documents = len(np.unique(small.held_out.document))
    assert batch.count == size - documents                                  # every byte but the first of each document
    halves = [corpus.held_out(small, sequence, rows).count for rows in (slice(0, 1), slice(1, None))]
    assert sum(halves) == batch.count


def test_a_cut_batch_keeps_its_places(small):
    batch = corpus.batch(small, TRAINING, 5)
    part = batch.cut(slice(2, 4), np.array([11, 0, 3]))
    assert part.step == 5 and np.array_equal(part.index, batch.index[2:4][:, [11, 0, 3]])


def test_the_default_text():
    default = reading.load(None, 256)
    total = default.train.size + default.held_out.size
    assert default.held_out.size == total // 10 and total > 200_000
    assert default.train.tokens.max() < 256
    documents = reading.python_reference()
    assert len(documents) == len(set(documents)) > 30


def test_form_feeds_separate_documents(tmp_path):
    path = tmp_path / "text"
    path.write_bytes(b"one\f\ftwo two")
    assert reading.read_documents(path) == [b"one", b"two two"]


@pytest.mark.parametrize("content, sentence", [
    (b"", "is empty .0 bytes"), (b"\f\f", "is empty .2 bytes"), (b"ab\0c", "byte 2 is NUL"), (b"abc\xff", "byte 3 is not UTF-8"),
    (b"x" * 70, "has 70 bytes, 63 of them .* sequence of 64 .* need 65"), (b"x\f" * 200, "nothing can be predicted")])
def test_refused_texts(tmp_path, content, sentence):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        reading.load(path, 64)


def test_texts_that_are_no_files(tmp_path):
    with pytest.raises(ValueError, match="is a directory"):
        reading.load(tmp_path, 64)
    with pytest.raises(ValueError, match="does not exist"):
        reading.load(tmp_path / "none", 64)
