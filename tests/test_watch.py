"""What the ledger counts as held."""
import numpy as np

from refpar import watch


def test_elements_are_of_the_size_that_is_seen():
    """Two views of one buffer are one buffer, counted in elements of the views: a complex base holds twice as many floats."""
    x = np.zeros((3, 4), complex)
    assert watch.elements({"whole": x.view(float), "part": [x.view(float)[1:]], "none": None}) == 24
    assert watch.elements([x, np.zeros(5)]) == 12 + 5
    assert watch.elements([np.zeros(0), {}]) == 0
