"""What the passes of one update share: tensors of the weights alone, and the end of a sum."""


class Update:
    """Made outside of the passes of an update, given to each, and used once more after the last.

    Work of the size of the weights, whatever the examples, would otherwise be done in every pass.

    Args:
        units: Pairs of a layer and the rule class that serves it.
    """

    def __init__(self, units=()):
        self._shared = {id(layer): rule.shared(layer) for layer, rule in units}
        self._finishers = {}

    def shared(self, layer):
        """What the layer's rule gives as `Rule.shared`."""
        return self._shared[id(layer)]

    def add_finishers(self, finishers):
        """Keeps functions of `Rule.finishers`, which every pass gives alike."""
        self._finishers.update(finishers)

    def finished(self, variables, sums):
        """Sums over the examples of all passes, as the optimizer needs them.

        Args:
            variables: The trained `keras.Variable`s.
            sums: List of float32 tensors, one a variable, what passes gave and were added up.
        """
        return [
            self._finishers.get(id(variable), _as_it_is)(each)
            for variable, each in zip(variables, sums, strict=True)
        ]


def _as_it_is(tensor):
    return tensor
