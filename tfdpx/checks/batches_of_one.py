"""Compares a microbatch with batches of one example, once, on dummy data.

The construction of the engine says nothing about kernels, rules and hardware; for example, a oneDNN
product was once wrong from five rows on. So the traced microbatch runs on a few dummy examples, and
its norms and clipped sum are compared with ordinary gradients of each example alone.
"""

import concurrent.futures
import contextlib

import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context
from tfdpx._warnings import warn
from tfdpx.per_example.layout import probe_batch, probe_targets, restoring
from tfdpx.per_example.rows import Rows

# The rows in all, for products were wrong from five rows on; and the examples in them that differ,
# few because each is run alone.
_ROWS, _EXAMPLES = 8, 2
_TOLERANCE, _TOLERANCE_IN_16_BITS = 1e-3, 0.1
# Norms are raised by what rounding may have taken. That harms no guarantee.
_MOST_RAISED = 1e-2
_WRONG = (
    "A layer treats the views of an example and a single row differently (one that compares rows "
    "needs `augmult=0` and `examples_per_user=1`), or a rule given to "
    "`tfdpx.per_example.register` is wrong. Report the model if neither is the case."
)


def problems_of_microbatch(model, run, factors_of, specs, num_views, examples, trace):
    """Returns texts of the differences between a microbatch and batches of one example.

    Args:
        model: A compiled, built `keras.Model`.
        run: Function of `(x, y, sample_weight)`, nests of eager tensors [examples * views, ...], to
            the squared norms, float32 [examples], and the clipped sums.
        factors_of: Function of squared norms to the factors of the clipped sums.
        specs: `(x, y, sample_weight)`, nests of which shapes and dtypes are read.
        num_views: Int, rows an example.
        examples: Int, that `run` takes; None for any number.
        trace: Whether to trace batches of one: pays where an example takes many operations.
    """
    if examples == 0:
        return
    num_examples = max(_ROWS // num_views, _EXAMPLES) if examples is None else examples
    num_compared = min(_EXAMPLES, num_examples)
    x = probe_batch(model, specs[0], num_compared * num_views)
    batch = Rows((x, *probe_targets(specs[1:], num_compared * num_views)))
    # All rows are filled with the same examples again, in an order without a period.
    places = np.random.default_rng(0).permutation(np.arange(num_examples) % num_compared)
    rows = np.ravel(places[:, np.newaxis] * num_views + np.arange(num_views))
    with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
        # Its kernels run and leave Python to the batches of one.
        future = thread.submit(run, batch.map(lambda t: tf.gather(t, rows)))
        gradients = _mean_gradients(model, batch, num_views, trace)
        norms, sums = future.result()
    factors, norms = np.array(factors_of(norms)), np.sqrt(norms)
    weights = [factors[places == place].sum() for place in range(num_compared)]
    expected_norms, expected_sums = _norms_and_sums(gradients, weights)
    is_finite = np.isfinite(expected_norms)
    if not expected_norms[is_finite].any():
        warn(
            "The microbatch could not be compared with batches of one example: on made-up data all "
            "gradients are zero or not finite."
        )
        return
    is_full_precision = all(
        layer.compute_dtype not in ("float16", "bfloat16")
        for layer in layer_internals.flatten_layers(model)
    )
    tolerance = _TOLERANCE if is_full_precision else _TOLERANCE_IN_16_BITS
    scale = tolerance * expected_norms[is_finite].max()
    expected_norms = expected_norms[places]
    lower = (1 - tolerance) * expected_norms - scale
    upper = (1 + max(tolerance, _MOST_RAISED)) * expected_norms + scale
    wrong = is_finite[places] & ~((lower <= norms) & (norms <= upper))
    if wrong.any():
        yield (
            "Per-example gradient norms disagree with those of batches of one example: "
            f"{norms[wrong][:_ROWS].tolist()} against "
            f"{expected_norms[wrong][:_ROWS].tolist()}. {_WRONG}"
        )
        return
    scale *= max(np.abs(weights).max(), np.finfo("float32").tiny)
    for variable, clipped_sum, expected_sum in zip(
        model.trainable_variables, sums, expected_sums, strict=True
    ):
        if not np.allclose(clipped_sum, expected_sum, rtol=tolerance, atol=scale):
            yield (
                f"The clipped sum of gradients at '{variable.path}' disagrees with the sum of "
                f"batches of one example. {_WRONG}"
            )


def _norms_and_sums(gradients, weights):
    """Norms, float [examples], and the sums over examples of weights times gradients.

    Where a gradient is not finite its weight is zero.
    """
    norms, sums = [], [np.zeros_like(g) for g in gradients[0]]
    for weight, example_gradients in zip(weights, gradients, strict=True):
        with np.errstate(invalid="ignore", over="ignore"):
            norms.append(
                np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in example_gradients))
            )
        if weight and np.isfinite(norms[-1]):
            for total, gradient in zip(sums, example_gradients, strict=True):
                total += weight * gradient
    return np.array(norms), sums


def _mean_gradients(model, batch, num_views, trace):
    """A list of float32 arrays for each example: the mean gradient over its views, as Keras's."""

    def gradient(*tensors):
        x, y, sample_weight = batch.pack(tensors)
        values = [v.value for v in model.trainable_variables]
        with (
            tf.GradientTape() as tape,
            step_context.recording(None),
            layer_internals.without_weight_regularizers(model.trainable_variables),
            step_context.masking_invalid(),
        ):
            y_pred = model_internals.call_model(model, x)
            loss = model_internals.compute_loss(model, x, y, y_pred, sample_weight)
            loss = tf.cast(tf.reduce_sum(loss), "float32")
        zero = tf.UnconnectedGradients.ZERO
        gradients = tape.gradient(loss, values, unconnected_gradients=zero)
        return [tf.cast(tf.convert_to_tensor(g), "float32") for g in gradients]

    if trace:
        specs = [tf.TensorSpec([1, *t.shape[1:]], t.dtype) for t in batch.tensors]
        gradient = tf.function(gradient, autograph=False).get_concrete_function(*specs)
    row_gradients = [
        gradient(*(t[row : row + 1] for t in batch.tensors)) for row in range(batch.count)
    ]
    examples = [row_gradients[i : i + num_views] for i in range(0, len(row_gradients), num_views)]
    return [
        [
            np.mean([np.asarray(g) for g in view_gradients], axis=0)
            for view_gradients in zip(*example, strict=True)
        ]
        for example in examples
    ]


@contextlib.contextmanager
def preserving_state(model):
    """Within it graphs run as they are, because optimizing does not pay; state is given back."""
    option = "disable_meta_optimizer"
    previous = tf.config.optimizer.get_experimental_options().get(option, False)
    tf.config.optimizer.set_experimental_options({option: True})
    try:
        with restoring([*model.non_trainable_variables, *model.metrics_variables]):
            yield
    finally:
        tf.config.optimizer.set_experimental_options({option: previous})
