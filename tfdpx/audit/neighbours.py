"""Whether a run shows anything of its data besides what its noise covers: record and replay."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tfdpx._arguments import check_positive_integer
from tfdpx.audit._observables import Observables, leaves
from tfdpx.audit._replay import GradientRecorder

_SEED = 20_220_428
_SHORT = 100


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What `check_run` found.

    Attributes:
        differences: Tuple of strings: what the two runs show differently, and how.
        updates: Int, private updates of the first run.
        files: Tuple of strings, the files that it wrote.
    """

    differences: tuple[str, ...]
    updates: int
    files: tuple[str, ...]

    @property
    def passed(self):
        """Bool: the two runs show the same."""
        return not self.differences

    def __str__(self):
        seen = f"{self.updates} private updates and {len(self.files)} files"
        if self.passed:
            return f"PASSED: on neighbouring data all is the same, in {seen}."
        head = f"FAILED: past the noise, the run shows its data. Compared: {seen}."
        return "\n".join([head, *(f"- {each}" for each in self.differences)])


def check_run(
    train_function: Callable[[Any], Any],
    data: Any,
    neighbour: Any,
    *,
    ignore: Sequence[str] = (),
    max_updates: int = 1000,
) -> RunReport:
    """Trains on neighbouring data with the noise held still, and says what does not match.

    The first run's noisy gradients are recorded, and handed to the second run in place of its own:
    so the weights of both are the same at each step, and all else that differs came from the data
    past the noise. Compared are the number of private updates and their learning rates; the shapes
    that steps were traced for; calls of `fit`, `evaluate`, `predict`, `save` and the like, in
    order, with their arguments but for the values of arrays; the files in the current folder, with
    their contents (of archives, the sizes); what is printed, without times; and what
    `train_function` returns, which is taken for published: do not return `History`, whose training
    loss no noise covers.

    Guarantee: none but what it says. A difference is a leak; that there is none on this pair, with
    these releases, does not show that there never is. Choose a neighbour that differs as much as
    one example can. Both runs have a known seed: their weights are not private, so give made-up or
    public data. Of `tfdpx.heads` and `tfdpx.distributed.fit` on several replicas the noise is not
    held; of private updates by the optimizers it is.

    Args:
        train_function: Function of data. Builds, compiles and trains a model, and does all that the
            real run would show to others, with files at relative paths: it is run in a fresh folder
            each time.
        data: What `train_function` takes, such as a tuple of arrays.
        neighbour: The same with one example changed, or taken out: of weight zero, or away.
        ignore: Sequence of glob patterns, of files that are not compared, as `("*.log",)`.
        max_updates: Int, room to record so many updates, each as large as the weights.

    Returns:
        `RunReport`, with `passed` and `differences`. Print it.

    Raises:
        ValueError: If the runs make more updates than `max_updates`, or none, or use several
            replicas.
        Exception: What `train_function` raises on both.

    Example:
    >>> def train(data):
    ...     model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    ...     optimizer = tfdpx.DPSGD(0.5, batch_size=8, noise_multiplier=1.0)
    ...     model.compile(optimizer, loss="mse")
    ...     model.fit(*data, batch_size=8, verbose=0)
    >>> data = np.ones((8, 4)), np.ones((8, 1))
    >>> neighbour = np.append(data[0][1:], [[9.0] * 4], axis=0), data[1]
    >>> tfdpx.audit.check_run(train, data, neighbour).passed
    True
    """
    check_positive_integer("max_updates", max_updates)
    first = _Run(train_function, data, ignore, GradientRecorder(max_updates))
    second = _Run(train_function, neighbour, ignore, GradientRecorder(max_updates, first.recorder))
    if first.error and second.error:
        raise first.error
    updates = sum(map(len, first.rates.values()))
    if not updates and not sum(map(len, second.rates.values())):
        raise ValueError(
            "`train_function` made no private update: nothing was held still, and nothing shown "
            "about private training. Compile the model with a tfdpx optimizer, and train it."
        )
    return RunReport(
        tuple(itertools.chain(*_differences(first, second))), updates, tuple(first.observed.files)
    )


class _Run:
    """One call of `train_function`, and what it showed."""

    def __init__(self, train_function, data, ignore, recorder):
        self.recorder, self.observed, self.error = recorder, Observables(ignore), None
        with recorder.held(_SEED), self.observed.watched():
            try:
                self.observed.returned = train_function(data)
            except Exception as error:
                self.error = error
        self.rates = recorder.rates()
        # Read now: a model that is returned may be trained on.
        self.returned = dict(leaves(self.observed.returned))


def _differences(first, second):
    """Lists of texts."""
    if first.error or second.error:
        place = "data" if first.error else "neighbour"
        yield [f"an error, on {place} alone: {first.error or second.error!r}"]
    yield _of_updates(first.rates, second.rates)
    traced = first.recorder.traced, second.recorder.traced
    yield _of_lists("the shapes of batches", *traced)
    yield _of_lists("the calls", first.observed.calls, second.observed.calls)
    yield _of_files(first.observed.files, second.observed.files)
    yield _of_lists("what is printed", first.observed.printed, second.observed.printed)
    yield _of_results(first.returned, second.returned)


def _of_updates(first, second):
    if sorted(first) != sorted(second):
        yield f"the number of weights: {sorted(first)} and {sorted(second)}"
    for size in sorted(first.keys() & second.keys()):
        pair = first[size], second[size]
        if len(pair[0]) != len(pair[1]):
            yield f"the number of private updates: {len(pair[0])} and {len(pair[1])}"
        both = min(map(len, pair))
        differ = np.flatnonzero(pair[0][:both] != pair[1][:both])
        if len(differ):
            at = differ[0]
            yield (
                f"the learning rate, of {len(differ)} updates; of update {at + 1}: "
                f"{pair[0][at]:.6g} and {pair[1][at]:.6g}"
            )


def _of_lists(name, first, second):
    """The first place at which two lists of strings differ, if any."""
    for index, pair in enumerate(itertools.zip_longest(first, second, fillvalue="nothing")):
        if pair[0] != pair[1]:
            yield f"{name}, at place {index + 1}: {_short(pair[0])} and {_short(pair[1])}"
            return


def _of_files(first, second):
    for name in sorted(first.keys() ^ second.keys()):
        yield f"the file '{name}': only on {'data' if name in first else 'neighbour'}"
    for name in sorted(first.keys() & second.keys()):
        yield from _of_lists(f"the file '{name}'", first[name], second[name])


def _of_results(first, second):
    for name in [*first, *(n for n in second if n not in first)]:
        pair = first.get(name, "nothing"), second.get(name, "nothing")
        if type(pair[0]) is not type(pair[1]) or not _same(*pair):
            yield f"{name}: {_short(pair[0])} and {_short(pair[1])}"


def _same(first, second):
    if isinstance(first, np.ndarray) and first.dtype.kind in "fiub":
        return first.shape == second.shape and np.array_equal(
            first, second, equal_nan=first.dtype.kind == "f"
        )
    return np.array_equal(first, second)


def _short(value):
    """A text of `value` that fits into a line."""
    text = " ".join(str(value).split())
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."
