"""Per-example gradients by book-keeping: one forward, one backward over activations, then rules."""

import tensorflow as tf

from tfdpx import keras_hook
from tfdpx.per_example.capture import Recorder
from tfdpx.per_example.losses import row_losses
from tfdpx.per_example.probe import find_layout
from tfdpx.per_example.result import PerExample
from tfdpx.per_example.rules.base import squared_norms, weighted_sums


class LayerwiseEngine:
    """Captures what each layer saw and forms norms and clipped sums layer by layer.

    Args:
        model: A compiled, built `keras.Model`.
        x: Nest of tensors [rows, ...] like those to come; only shapes and dtypes are read.
        views: Int K, rows of the batch per example.

    Raises:
        UnexplainedVariables: If the gradient of a trainable variable cannot be told by example.
    """

    def __init__(self, model, x, views):
        self._model = model
        self._views = views
        self._variables = model.trainable_variables
        self._layout = find_layout(model, x)

    def __call__(self, x, y, sample_weight):
        """A `PerExample` for rows [B * views, ...] of `x`, `y` and `sample_weight`."""
        model = self._model
        recorder = Recorder(self._variables, self._layout, self._views)
        with recorder.taping():
            with keras_hook.recording(recorder):
                y_pred = keras_hook.call_model(model, x)
            losses, output_losses = row_losses(model, x, y, y_pred, sample_weight)
            # 1/K: the gradient of an example is the mean over its views.
            total = tf.reduce_sum(losses) / self._views
        gradients = recorder.gradients(total)
        groups = _groups(
            [
                call.rule(call, outputs, self._views, self._trained_by(call))
                for call, outputs in zip(recorder.calls, gradients, strict=True)
            ]
        )
        norms = [group.squared_norms() for group in groups]
        if not norms:
            norms = [tf.zeros_like(losses[:: self._views])]

        def weighted(factors):
            sums = {id(v): tf.zeros(v.shape, "float32") for v in self._variables}
            for group in groups:
                sums.update(zip(map(id, group.variables), group.clipped_sum(factors), strict=True))
            return [sums[id(v)] for v in self._variables]

        return PerExample(losses, output_losses, y_pred, tf.add_n(norms), weighted)

    def _trained_by(self, call):
        wanted = {id(v) for v in self._variables}
        return [v for v in call.layer.trainable_variables if id(v) in wanted]


class _Joint:
    """Several calls that share variables: their gradients are added before the norm is taken."""

    def __init__(self, rules):
        self._rules = rules
        self.variables = list({id(v): v for rule in rules for v in rule.variables}.values())

    def squared_norms(self):
        totals = {}
        for rule in self._rules:
            for variable, gradient in zip(
                rule.variables, rule.per_example_gradients(), strict=True
            ):
                totals[id(variable)] = totals.get(id(variable), 0.0) + gradient
        self._totals = [totals[id(v)] for v in self.variables]
        return squared_norms(self._totals)

    def clipped_sum(self, factors):
        return weighted_sums(self._totals, factors)


def _groups(rules):
    """Rules as they are, or joined where they share a variable."""
    groups = []
    for rule in rules:
        mine = {id(v) for v in rule.variables}
        sharing = [g for g in groups if any(mine & {id(v) for v in r.variables} for r in g)]
        groups = [g for g in groups if g not in sharing]
        groups.append([r for g in sharing for r in g] + [rule])
    return [group[0] if len(group) == 1 else _Joint(group) for group in groups]
