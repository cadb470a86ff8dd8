"""Whether what `fit` validates on is private, so that nothing may act on what is measured there.

Metrics of public examples cost nothing: they are computed from weights that are private already.
Metrics of private examples are functions of them without noise, whether these are trained on or
held out. So examples that equal some that the plan trains on count as private, one of them is
enough, and so does a `validation_split`. Equal examples may be an accident, and data that cannot be
read twice may be public: `public_validation=True` of the optimizer says so.

Private examples that were never part of what is trained on, and were given as `validation_data`,
cannot be distinguished from public ones.
"""

import functools

import keras

from tfdpx.sampling.batch_sampler import sampler_of
from tfdpx.sampling.common_examples import count_common, examples_of
from tfdpx.sampling.random_access import RandomAccess


class Validation:
    """What a `fit` validates on. Nothing is read before it is asked for.

    Args:
        optimizer: The tfdpx optimizer.
        x: What `fit` trains on, without targets.
        data: The `validation_data` of `fit`, or None.
        split: Float, the `validation_split` of `fit`, or None.
    """

    def __init__(self, optimizer, x, data, split=None):
        draws = sampler_of(x)
        self._held_out = None if draws is None else draws.held_out
        self._x, self._split, self._optimizer = x, split, optimizer
        self._data = None if data is None else keras.utils.unpack_x_y_sample_weight(data)[0]

    @property
    def is_private(self):
        """Whether the examples are known to be private; no `RandomAccess` is read to know it."""
        return not isinstance(self._trained_on, RandomAccess) and self._found[0]

    @property
    def objection(self):
        """Why nothing may act on the metrics, a clause; None if it may.

        A `RandomAccess` that is trained on is read once, which is said.
        """
        return self._found[1]

    @functools.cached_property
    def _trained_on(self):
        return examples_of(self._x)

    @functools.cached_property
    def _found(self):
        """Pair: whether the examples are private, and the objection."""
        optimizer = self._optimizer
        if not optimizer.noise_multiplier or optimizer.public_validation:
            return False, None
        if self._data is None:
            held_out = self._split or self._held_out is not None
            why = "the examples of `validation_split` are held out of the private ones"
            return (True, why) if held_out else (False, None)
        if self._trained_on is None:
            return False, (
                f"`validation_data` cannot be compared with what is trained on, which is of type "
                f"{type(self._x).__name__} (arrays and `plan.batches(...)` can)"
            )
        if isinstance(self._trained_on, RandomAccess):
            print(
                f"tfdpx reads the {self._trained_on.count:,} examples of the RandomAccess once, to "
                "compare them with `validation_data`, since a callback acts on it."
            )
        private = [self._trained_on]
        if self._held_out is not None:
            private.append(examples_of(self._held_out[0]))
        given_views = optimizer.augmult if optimizer.augment is None else 0
        counts = count_common(self._data, private, views=given_views or 1)
        if counts is None:
            return False, (
                f"`validation_data` of type {type(self._data).__name__} cannot be compared with "
                "what is trained on (arrays, and a tf.data.Dataset of known size, can)"
            )
        common, total = counts
        if not common:
            return False, None
        return True, f"{common} of the {total} examples of `validation_data` are private ones too"
