"""Planting: the faulty text runs everywhere while the block lasts, and the right one before and after."""
import pickle
import threading
import traceback
from functools import lru_cache, wraps

import pytest

from refpar.oracle.plant import Fault, PlantedWorld, planted


def loud(function):
    @wraps(function)
    def wrapper(*args, **options):
        return function(*args, **options) + 0.5
    return wrapper


def twice(x):
    """Twice x."""
    return 2 * x


@loud
@loud
def decorated(x):
    return 2 * x


@lru_cache
def remembered(x):
    return 2 * x


def with_defaults(x, factor=2, *, shift=1):
    return factor * x + shift


def maker(factor):
    offset = 1

    def times(x):
        return factor * x + offset
    return times


def tagged(factor):
    """A decorator that keeps the function within reach: the wrapped one has free variables."""
    def decorate(function):
        def inner(x):
            return factor * x + function(x)
        return loud(inner)
    return decorate


@tagged(3)
def far(x):
    return x


def fails(x):
    raise RuntimeError(f"right, {x}")


def repeats(x):
    x = x + 1
    x = x + 1
    return x


def counts(n):
    for i in range(n):
        yield i


class Base:
    def total(self, x):
        return x


class Counter(Base):
    def __secret(self, x):
        return x + 1

    def total(self, x):
        return super().total(x) + self.__secret(x)

    @staticmethod
    def still(x):
        return 2 * x

    @classmethod
    def made(cls, x):
        return 2 * x

    @property
    def size(self):
        return 2


def fault(function, old, new, module=__name__, name="typed"):
    return Fault(name, "owner/repository#1", "a test", f"{module}:{function}", old, new)


def test_every_reference_is_faulty_inside_and_right_again_after():
    held, code = twice, twice.__code__
    with planted(fault("twice", "2 * x", "3 * x")) as function:
        assert (held(1), twice(1), function is twice) == (3, 3, True)
        assert twice.__doc__ == "Twice x."
    assert twice(1) == 2 and twice.__code__ is code


def test_exceptions_restore_and_tracebacks_show_the_faulty_text():
    with pytest.raises(RuntimeError, match="wrong, 1") as caught:
        with planted(fault("fails", 'f"right', 'f"wrong')):
            fails(1)
    assert "wrong, {x}" in "".join(traceback.format_tb(caught.tb))
    with pytest.raises(RuntimeError, match="right, 1"):
        fails(1)


@pytest.mark.parametrize("function, old, new, call, right, wrong", [
    ("decorated", "2 * x", "3 * x", lambda: decorated(1), 3, 4),
    ("remembered", "2 * x", "3 * x", lambda: remembered(1), 2, 3),
    ("with_defaults", "x + shift", "x - shift", lambda: with_defaults(1), 3, 1),
    ("with_defaults", "factor=2, *, shift=1", "factor=5, *, shift=4", lambda: with_defaults(1), 3, 9),
    ("maker", "factor * x + offset", "factor * x - offset", lambda: maker(5)(1), 6, 4),
    ("maker", "factor * x + offset", "x", lambda: maker(5)(1), 6, 1),
    ("far", "return factor * x + function(x)", "return function(x)", lambda: far(1), 4.5, 1.5),
    ("far", "factor * x", "x", lambda: far(1), 4.5, 2.5),
    ("counts", "yield i", "yield -i", lambda: list(counts(3)), [0, 1, 2], [0, -1, -2]),
    ("Counter.total", "x) + self", "x) - self", lambda: Counter().total(1), 3, -1),
    ("Counter.total", "super().total(x)", "0", lambda: Counter().total(1), 3, 2),
    ("Counter.still", "2 * x", "3 * x", lambda: Counter.still(1), 2, 3),
    ("Counter.made", "2 * x", "3 * x", lambda: Counter().made(1), 2, 3),
    ("Counter.size", "return 2", "return 3", lambda: Counter().size, 2, 3)])
def test_all_kinds_of_functions(function, old, new, call, right, wrong):
    assert call() == right
    with planted(fault(function, old, new)):
        assert call() == wrong
    assert call() == right


def test_closures_made_before_keep_the_code_they_were_made_with():
    before = maker(5)
    with planted(fault("maker", "factor * x", "factor + x")):
        inside = maker(5)
        assert (before(2), inside(2)) == (11, 8)
    assert maker(5)(2) == 11


def test_planting_nests_on_one_function_and_repeats():
    for _ in range(2):
        with planted(fault("with_defaults", "factor * x", "factor + x")):
            with planted(fault("with_defaults", "+ shift", "- shift", name="another")):
                assert with_defaults(5) == 6
            assert with_defaults(5) == 8
            with planted(fault("with_defaults", "factor * x", "factor + x")):
                assert with_defaults(5) == 8
            with pytest.raises(ValueError, match="0 times"):
                with planted(fault("with_defaults", "factor * x", "x", name="another")):
                    pass
        assert with_defaults(5) == 11


def test_threads_see_it():
    seen = []
    with planted(fault("twice", "2 * x", "3 * x")):
        thread = threading.Thread(target=lambda: seen.append(twice(1)))
        thread.start()
        thread.join()
    assert seen == [3]


@pytest.mark.parametrize("function, old, new, sentence", [
    ("repeats", "x = x + 1", "pass", "stands 2 times in .*:repeats, and must stand there exactly once"),
    ("twice", "4 * x", "x", "stands 0 times"),
    ("twice", "", "x", "must stand there exactly once"),
    ("twice", "return 2", "return return 2", "is not Python"),
    ("nowhere", "x", "y", "there is no function"),
    ("Counter", "x", "y", "only functions"),
    ("pickle", "x", "y", "only functions")])
def test_faults_that_cannot_be_planted_are_refused(function, old, new, sentence):
    with pytest.raises(ValueError, match=sentence):
        with planted(fault(function, old, new)):
            pass


def program(wire, x):
    return twice(x) + wire


class Threads:
    """A world as PlantedWorld sees it: ranks one after the other."""
    kind, size = "threads", None

    def run(self, program, size, *args):
        return [program(rank, *args) for rank in range(size)]


class Processes(Threads):
    """Its program goes through pickle, as to another process; the right function stands there before."""
    kind = "processes"

    def run(self, program, size, *args):
        assert twice(1) == 2
        return super().run(pickle.loads(pickle.dumps(program)), size, *args)


@pytest.mark.parametrize("world", [Threads(), Processes()])
def test_a_planted_world_runs_faulty_programs_on_both_bodies(world):
    faulty = PlantedWorld(world, fault("twice", "2 * x", "3 * x"))
    assert faulty.run(program, 2, 10) == [30, 31]
    assert world.run(program, 2, 10) == [20, 21]
    assert faulty.size is None
