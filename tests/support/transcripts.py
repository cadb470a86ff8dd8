"""Measures the privacy loss of a head's releases on two data sets that differ in one example.

A head is adaptive: each release depends on the noisy ones before. Its guarantee is about
each release for given earlier outputs, so the second run receives the outputs of the first.
"""

import math

import numpy as np

from tfdpx.accounting.gaussian import exact_epsilon
from tfdpx.heads.releases import Releases


class Recorder:
    """Records the values of all releases by name, use and part."""

    def __init__(self, monkeypatch, outputs=None):
        self.values, self.deviations, self.outputs = {}, {}, outputs or {}
        replay, original_count, draw = outputs is not None, Releases._count, Releases._noise
        current = []

        def count(releases, name, part):
            use = releases._done.get((name, part), 0)
            current[:] = [(name, use, part)]
            return original_count(releases, name, part)

        def noise(releases, shape, deviation):
            self.deviations[current[0]] = deviation
            return draw(releases, shape, deviation)

        def wrapped(method):
            def release(releases, name, value, *args, **kwargs):
                noisy = method(releases, name, value, *args, **kwargs)
                key = current[0]
                self.values[key] = np.array(value)
                if replay:
                    return np.array(self.outputs[key])
                self.outputs[key] = np.array(noisy)
                return noisy

            return release

        monkeypatch.setattr(Releases, "_count", count)
        monkeypatch.setattr(Releases, "_noise", noise)
        monkeypatch.setattr(Releases, "gaussian", wrapped(Releases.gaussian))
        monkeypatch.setattr(Releases, "symmetric", wrapped(Releases.symmetric))


def spent(monkeypatch, head, data, neighbour):
    """Returns `{release: mu}` of fits on two neighbours, and their epsilon at the head's delta.

    Fails if the weights depend on the data in any other way than through the releases.

    Args:
        monkeypatch: The fixture of pytest.
        head: Function that returns a fresh head.
        data: Pair of features and labels.
        neighbour: Another pair, with one example more, also in labels because counts are releases.
    """
    with monkeypatch.context() as patched:
        first = Recorder(patched)
        one = head().fit(*data)
    with monkeypatch.context() as patched:
        second = Recorder(patched, first.outputs)
        other = head().fit(*neighbour)
    assert first.values.keys() == second.values.keys()
    assert first.deviations == second.deviations, "The scale of the noise follows the data."
    for name in ("kernel", "bias"):
        np.testing.assert_array_equal(
            getattr(one, name),
            getattr(other, name),
            f"The {name} follows more of the data than it releases.",
        )
    squares = {}
    for (name, use, part), value in first.values.items():
        key = (name, use, part)
        change = np.linalg.norm(value - second.values[key]) / first.deviations[key]
        squares[name, use] = squares.get((name, use), 0.0) + change**2
    mus = {key: math.sqrt(square) for key, square in squares.items()}
    return mus, exact_epsilon(math.sqrt(sum(squares.values()) + 1e-24), head().delta)
