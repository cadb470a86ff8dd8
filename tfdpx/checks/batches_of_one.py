"""Checks once, on dummy data, that a microbatch gives the same results as batches of one example.

The engine computes each example separately by construction, but kernels, rules and hardware can
still be wrong: for example, a oneDNN product was once wrong for five rows or more. So the traced
microbatch runs on dummy rows, which are filled with two different examples. The norm and the
clipped sum of one example are compared with its ordinary gradient. A second run exchanges the
examples, so every place in the microbatch is compared.
"""

import concurrent.futures
import contextlib
import functools

import numpy as np
import tensorflow as tf

from tfdpx._keras import layer_internals, model_internals, step_context, tensorflow_internals
from tfdpx._warnings import warn
from tfdpx.per_example.layout import probe_batch, probe_targets, restoring
from tfdpx.per_example.rows import Rows

# The number of rows (a product was wrong only for five or more), and the number of different
# examples that fill them.
_ROWS, _EXAMPLES = 8, 2
_TOLERANCE, _TOLERANCE_IN_16_BITS = 1e-3, 0.1
# Norms include an allowance for rounding errors. If a norm exceeds the norm from a batch of one by
# more than this share, it is compared again without the allowance.
_MOST_RAISED = 1e-2
# An example counts as one without a gradient if its norm is below `_NO_GRADIENT` times the norm for
# all rows: the rest is rounding. The norm for all rows is computed only for norms below `_SMALL`.
_NO_GRADIENT, _SMALL = 1e-6, 1e-3
_MORE_PADDING = 16
_WRONG_SUM = "The clipped sum of gradients at"
_WRONG = (
    "A layer treats the views of an example and a single row differently (one that compares rows "
    "needs `augmult=0` and `examples_per_user=1`), or a rule given to "
    "`tfdpx.per_example.register` is wrong. Report the model if neither is the case."
)


def problems_of_microbatch(
    model, run, lowest_norms, factors_of, specs, num_views, examples, trace, padding=None
):
    """Yields a text for each way in which a microbatch differs from batches of one example.

    Args:
        model: A compiled, built `keras.Model`.
        run: Function `run(rows, added)`. `rows` is `(x, y, sample_weight)`, nests of eager tensors
            [examples * views, ...], and `added` is bool [examples], whether to add the gradient of
            an example to the sums. `run` returns the squared norms, float32 [examples], and a list
            of clipped sums.
        lowest_norms: Function like `run` that returns only squared norms. These may be too small by
            rounding errors, but never too large.
        factors_of: Function of squared norms that returns the factors of the clipped sums.
        specs: `(x, y, sample_weight)`, nests; only shapes and dtypes are read.
        num_views: Int, the number of rows (views) of each example.
        examples: Int, the number of examples that `run` takes; None for any number.
        trace: Bool, whether to trace the gradient of a batch of one. This saves time if an example
            takes many operations.
        padding: The result of `padding_of`.
    """
    if examples == 0:
        return
    num_examples = max(_ROWS // num_views, _EXAMPLES) if examples is None else examples
    num_compared = min(_EXAMPLES, num_examples)
    batch = _make_up(model, specs, num_compared * num_views)
    all_rows = _make_up(model, specs, _ROWS)
    norm_of_all = functools.cache(lambda: _norm(_gradient(model, all_rows)))
    # The few examples fill all rows, in a random order.
    places = np.random.default_rng(0).permutation(np.arange(num_examples) % num_compared)
    problems = None
    for compared in range(num_compared):
        inputs = []
        for shift in range(num_compared):
            order = (places + shift) % num_compared
            rows = np.ravel(order[:, np.newaxis] * num_views + np.arange(num_views))
            inputs.append((_take(batch, rows), order == compared))
        one = Rows(_take(batch, compared * num_views + np.arange(num_views)))
        with concurrent.futures.ThreadPoolExecutor(max_workers=1) as thread:
            # While the kernels of the microbatch run, Python computes the batches of one.
            outputs = thread.map(run, *zip(*inputs, strict=True))
            gradients = _mean_gradient(model, one, trace)
        norm = _norm(gradients)
        if not (np.isfinite(norm) and (norm > _SMALL or norm > _NO_GRADIENT * norm_of_all())):
            continue
        wanted, outputs = (norm, gradients), zip(inputs, outputs, strict=True)
        problems = list(_problems_of_outputs(model, outputs, wanted, lowest_norms, factors_of))
        # At a kink, for example of a ReLU, rounding can change an example's gradient. So if only
        # sums are wrong, the other example decides.
        if not problems or not all(problem.startswith(_WRONG_SUM) for problem in problems):
            break
    if problems is None:
        yield from _problems_without_gradient(model, all_rows, norm_of_all())
        return
    yield from problems
    if padding is None or problems:
        return
    pair = [_mean_gradient(model, part, trace) for part in _pad(one, padding)]
    change = _norm([g - h for g, h in zip(*pair, strict=True)])
    if not change <= _tolerance(model) * _norm(pair[0]):
        yield (
            "The gradient of an example changes if it is padded further, so the longest example of "
            "a batch changes the gradients of all others, which no clipping bounds. Pad all "
            "examples of the data set to one length, or let the model ignore padding, for example "
            "by `mask_zero=True` and layers that use masks."
        )


def _problems_of_outputs(model, outputs, wanted, lowest_norms, factors_of):
    """Compares runs of a microbatch with one example; yields a text for each problem.

    Args:
        model: The `keras.Model`.
        outputs: Iterable with a pair for each run: the arguments `(rows, added)` of `run`, and the
            result `(squared_norms, sums)`. `added` is True at the places that hold the example.
        wanted: Pair from a batch of one: the norm of the example's gradient, and the gradient, a
            list of arrays.
        lowest_norms: As for `problems_of_microbatch`.
        factors_of: As for `problems_of_microbatch`.
    """
    (norm, gradients), tolerance = wanted, _tolerance(model)
    for (rows, added), (squared_norms, sums) in outputs:
        norms, factors = np.sqrt(squared_norms), np.array(factors_of(squared_norms))
        is_low = ~(norms >= (1 - 2 * tolerance) * norm)
        is_high = ~(norms <= (1 + max(2 * tolerance, _MOST_RAISED)) * norm)
        if is_high[added].any():
            is_high = ~(np.sqrt(lowest_norms(rows, added)) <= (1 + 2 * tolerance) * norm)
        wrong_norms = norms[added & (is_low | is_high)].tolist()
        if wrong_norms:
            yield (
                "Per-example gradient norms disagree with norms from batches of one example: "
                f"{wrong_norms} against {norm}. {_WRONG}"
            )
            return
        weight = factors[added].sum()
        scale = tolerance * norms[added].max() * max(weight, np.finfo("float32").tiny)
        for variable, total, gradient in zip(
            model.trainable_variables, sums, gradients, strict=True
        ):
            if not np.allclose(total, weight * gradient, rtol=tolerance, atol=scale):
                yield (
                    f"{_WRONG_SUM} '{variable.path}' disagrees with the sum of "
                    f"batches of one example. {_WRONG}"
                )


def padding_of(data, session):
    """Returns how many entries to pad the tensors of an example with, and the entries' value.

    Args:
        data: `(x, y, sample_weight)`, nests; only shapes are read.
        session: The `tfdpx.training.session.Session`, or None.

    Returns:
        List with a pair for each tensor. The first part of a pair is a list of ints, the number of
        entries to add to each axis after the batch axis. The second part is the value of these
        entries; None means zero. If the user's batches have no padding, the function returns None.
    """
    dataset, leaves = session and session.data, Rows(data).tensors
    # Later versions of Keras trace with the lengths of the current batch. Only the data set knows
    # which lengths vary.
    spec = tf.nest.flatten(getattr(dataset, "element_spec", data))
    is_known = len(spec) == len(leaves) and all(leaf.shape.rank for leaf in spec)
    shapes = [leaf.shape for leaf in (spec if is_known else leaves)]
    if all(shape[1:].is_fully_defined() for shape in shapes) or (session and session.draws):
        return None
    values = tensorflow_internals.padding_values(dataset)
    values = values if len(values) == len(leaves) else [None] * len(leaves)
    more = [[_MORE_PADDING * (n is None) for n in shape[1:]] for shape in shapes]
    return list(zip(more, values, strict=True))


def _problems_without_gradient(model, all_rows, norm_of_all):
    """Yields a text if a batch has a gradient but no single example has one.

    If the batch has no gradient either, nothing can be compared, and the function warns.
    """
    rows = (Rows(_take(all_rows, [row])) for row in range(_ROWS))
    least = max(_NO_GRADIENT * norm_of_all, np.finfo("float32").eps)
    if least < norm_of_all and not any(least < _norm(_gradient(model, r)) < np.inf for r in rows):
        yield (
            "The loss of a single example has no gradient, but the loss of a batch has one: it "
            "compares examples, as contrastive losses, triplets, ranks and correlations do. In "
            "private training a loss is computed for each example by itself. Put the rows that "
            "belong together into one example, for example pairs as x of shape [examples, 2, ...]."
        )
        return
    warn(
        "The microbatch could not be compared with batches of one example: on made-up data all "
        "gradients are zero or not finite."
    )


def _tolerance(model):
    is_full_precision = all(
        layer.compute_dtype not in ("float16", "bfloat16")
        for layer in layer_internals.flatten_layers(model)
    )
    return _TOLERANCE if is_full_precision else _TOLERANCE_IN_16_BITS


def _make_up(model, specs, rows):
    """Returns `Rows` of made-up data, with sample weights that are not zero."""
    x, (y, weights) = probe_batch(model, specs[0], rows), probe_targets(specs[1:], rows)
    return Rows((x, y, Rows(weights).map(lambda t: t if t.dtype.is_floating else tf.ones_like(t))))


def _take(batch, rows):
    return batch.map(lambda t: tf.gather(t, rows))


def _pad(batch, padding):
    """Returns two `Rows`: the batch, and the batch padded further by `padding`.

    In both, integers of the batch that equal the padding value are changed, so models do not take
    them for padding.
    """
    tensors, longer_tensors = [], []
    for tensor, (more, value) in zip(batch.tensors, padding, strict=True):
        value = tf.zeros([], tensor.dtype) if value is None else tf.cast(value, tensor.dtype)
        if any(more) and tensor.dtype.is_integer:
            tensor = tf.where(tensor == value, value + 1, tensor)
        tensors.append(tensor)
        pads = [[0, n] for n in (0, *more)]
        longer_tensors.append(tf.pad(tensor, pads, constant_values=value))
    return Rows(batch.pack(tensors)), Rows(batch.pack(longer_tensors))


def _norm(gradients):
    """Returns the norm of a list of arrays, a float."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.sqrt(sum(np.sum(np.square(g, dtype="float64")) for g in gradients))


def _mean_gradient(model, batch, trace):
    """Computes Keras's gradient of each row by itself; returns their mean, a list of arrays."""

    def gradient(*tensors):
        return _gradient(model, Rows(batch.pack(tensors)))

    if trace:
        specs = [tf.TensorSpec([1, *t.shape[1:]], t.dtype) for t in batch.tensors]
        gradient = tf.function(gradient, autograph=False).get_concrete_function(*specs)
    rows = [gradient(*(t[row : row + 1] for t in batch.tensors)) for row in range(batch.count)]
    return [
        np.mean([np.asarray(g) for g in gradients], axis=0) for gradients in zip(*rows, strict=True)
    ]


def _gradient(model, batch):
    """Returns Keras's gradient of the loss of a batch (`Rows`), a list of float32 tensors."""
    x, y, sample_weight = batch.pack(batch.tensors)
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


@contextlib.contextmanager
def preserving_state(model):
    """Context manager that restores the model's state, and runs graphs without optimizing them."""
    option = "disable_meta_optimizer"
    previous = tf.config.optimizer.get_experimental_options().get(option, False)
    tf.config.optimizer.set_experimental_options({option: True})
    try:
        with restoring([*model.non_trainable_variables, *model.metrics_variables]):
            yield
    finally:
        tf.config.optimizer.set_experimental_options({option: previous})
