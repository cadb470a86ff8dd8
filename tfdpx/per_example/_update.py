"""What the microbatches of one update share: tensors of the weights alone, and the end of a sum."""

import copy

import tensorflow as tf


class Update:
    """Made outside of the microbatches of an update, given to each, and used after the last.

    Work of the size of the weights, whatever the examples, would otherwise be done in each of them.

    Args:
        units: Pairs of a layer and the rule class that serves it.
    """

    def __init__(self, units=()):
        self._shared = {id(layer): rule.shared(layer) for layer, rule in units}
        self._post_sum_transforms = {}

    @property
    def tensors(self):
        """List of the tensors that are shared."""
        return [t for t in tf.nest.flatten(self._shared) if t is not None]

    def of(self, tensors):
        """The same update with `tensors` in place of `self.tensors`, as a graph takes them."""
        twin, new = copy.copy(self), iter(tensors)
        twin._shared = tf.nest.map_structure(
            lambda t: None if t is None else next(new), self._shared
        )
        return twin

    def shared(self, layer):
        """What the layer's rule gives as `Rule.shared`."""
        return self._shared[id(layer)]

    def add_post_sum_transforms(self, layer, transforms):
        """Keeps functions of `Rule.post_sum_transforms`, which every microbatch gives alike."""
        for key, function in transforms.items():
            self._post_sum_transforms[key] = layer, function

    def finished(self, variables, sums):
        """Sums over the examples of all microbatches, as the optimizer needs them.

        Args:
            variables: The trained `keras.Variable`s.
            sums: List of float32 tensors, one a variable, added up over microbatches.
        """
        done = list(sums)
        for place, variable in enumerate(variables):
            if id(variable) in self._post_sum_transforms:
                layer, function = self._post_sum_transforms[id(variable)]
                done[place] = function(sums[place], self.shared(layer))
        return done
