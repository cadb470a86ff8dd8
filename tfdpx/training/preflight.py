"""Prepares the private step while it is traced: chooses microbatches, and checks the graph.

The checks make sure that each example's gradient depends only on this example.
"""

import contextlib
import dataclasses
import functools
import math
import re
import typing

import numpy as np
import tensorflow as tf

from tfdpx._keras import model_internals, step_context, tensorflow_internals
from tfdpx.checks.augmentation import problems_of_augment
from tfdpx.checks.batches_of_one import padding_of, preserving_state, problems_of_microbatch
from tfdpx.checks.declared import check_declared
from tfdpx.checks.errors import UnfitForPrivacy, refusing
from tfdpx.checks.state import metric_variables, problems_of_graph, problems_of_metrics
from tfdpx.per_example import rounding
from tfdpx.per_example.engine import Engine
from tfdpx.per_example.random_layers import UnmappedState
from tfdpx.per_example.rows import Rows
from tfdpx.per_example.vectorize import TakesBatch
from tfdpx.training.microbatches import Inputs, Microbatch, choose_size

# Relative tolerance of factors, in float32.
_ROUNDING = 1e-5
# Number of keys that a trial run uses: random numbers may decide which operations run.
_KEYS = 6


class _Kind(typing.NamedTuple):
    """The properties of a batch and a step that microbatches depend on."""

    num_rows: int | None  # None if it is not static
    weights: tuple  # `_specs` of sample weights, or ("present",) if rows may be absent, or ()
    mode: str  # "eager", "compiled" or "graph"


@dataclasses.dataclass
class ModelCache:
    """The results of this module's checks for a model and the shapes of its batches.

    Attributes:
        key: Tuple that identifies the compiled model and the shapes.
        engine: The per-example engine.
        sizes: Dict from a `_Kind` of batch to its `MicrobatchSize`.
        checked: Set of tuples. Each identifies a `_Kind` of batch and a trace whose microbatches
            have been compared with batches of one example.
        eager: Dict from a `_Kind` of batch to its `Microbatch`, in eager mode.
    """

    key: tuple
    engine: Engine
    sizes: dict = dataclasses.field(default_factory=dict)
    checked: set = dataclasses.field(default_factory=set)
    eager: dict = dataclasses.field(default_factory=dict)


def prepare(optimizer, model, views, batch):
    """Checks that a model can be trained privately, and returns the traced `Microbatch` of a step.

    Each trace of the step traces the microbatch and checks its graph. All other checks run once for
    a model and the shapes of its batches.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled, built `keras.Model`.
        views: `tfdpx.training.views.Views`.
        batch: `Batch`; only shapes and dtypes are read.

    Raises:
        UnfitForPrivacy: If the model, the loss or the augmentation is unfit for private training.
    """
    try:
        preparation = _Preparation(optimizer, model, views, batch)
        if tf.executing_eagerly() and (traced_step := preparation.reuse_trace()):
            return traced_step
        microbatch = preparation.trace()
        try:
            preparation.check(microbatch)
        except tf.errors.ResourceExhaustedError as error:
            raise UnfitForPrivacy(
                f"A microbatch of {microbatch.size.examples} examples does not fit in memory. Take "
                "a smaller `microbatch_size`; and where a table of embeddings is read outside of "
                "its layer (tied weights), use `keras.layers.ReversibleEmbedding`, of which no "
                "example's whole gradient is formed."
            ) from error
        except tf.errors.OpError:
            if microbatch.engine.loops:
                raise
            # Some operations that TensorFlow cannot vectorize fail only when they run.
            microbatch.engine.loops = True
            microbatch = preparation.trace()
            preparation.check(microbatch)
    except (UnmappedState, TakesBatch) as error:
        raise UnfitForPrivacy(str(error)) from error
    return microbatch


class _Preparation:
    def __init__(self, optimizer, model, views, batch):
        self._optimizer, self._model, self._views, self._batch = optimizer, model, views, batch
        self._cache = _find_cache(optimizer, model, views, batch)
        x, _, sample_weight = batch.data
        count = Rows(x).count
        mode = "compiled" if tensorflow_internals.is_for_xla(model) else "graph"
        mode = "eager" if tf.executing_eagerly() else mode
        count = count if isinstance(count, int) else None
        may_be_absent = batch.present is not None and count is not None
        absence = ("present",) if may_be_absent else ()
        self._kind = _Kind(count, _specs(sample_weight) or absence, mode)

    def reuse_trace(self):
        """Returns the `Microbatch` that an earlier eager step traced for such a batch, or None."""
        microbatch = self._cache.eager.get(self._kind)
        return microbatch and microbatch.renew()

    def trace(self):
        """Traces and returns a `Microbatch`, for any number of rows if the model allows this."""
        for size in self._sizes():
            try:
                return self._trace(size)
            except (TypeError, ValueError) as error:
                # A layer or a loss may ask for the number of rows.
                if not size.varies or not re.search("None|unknown", str(error)):
                    raise
        raise AssertionError("The last size does not vary.")

    def check(self, microbatch):
        """Runs the checks that this trace needs; raises UnfitForPrivacy if one finds a problem."""
        cache, model, size = self._cache, self._model, microbatch.size
        with refusing() as problems:
            name = f"The training pass of '{model.name}'"
            unread = metric_variables(model)
            problems += problems_of_graph(microbatch.graph, model, name, unread)
            check_key = (self._kind, size, microbatch.engine.obstacle, microbatch.engine.loops)
            if not problems and check_key not in cache.checked:
                data, may_be_absent = microbatch.inputs.rows, microbatch.inputs.present is not None
                y_pred, rows = microbatch.output.y_pred, self._rows(size)
                problems += problems_of_metrics(model, data, y_pred, rows, may_be_absent)
                problems += step_context.eagerly(self._compare, microbatch)
        cache.checked.add(check_key)
        cache.sizes[self._kind] = size
        if tf.executing_eagerly():
            cache.eager[self._kind] = microbatch

    def _compare(self, microbatch):
        """Compares the results of a microbatch with the results for batches of one example.

        Returns a list of strings, one for each difference.
        """
        model, num_views, specs = self._model, self._views.count, microbatch.inputs
        size = microbatch.size
        policy, draws = self._optimizer.clip_policy, microbatch.draws
        keys = [tf.constant([0, number], tf.int64) for number in range(_KEYS if draws else 0)]
        examples = None if size.varies else self._rows(size) // num_views
        freezing = step_context.freeze_rng() if draws else contextlib.nullcontext()
        with preserving_state(model), freezing:
            # Random layers are frozen for the comparison, because batches of one would draw other
            # numbers.
            still = self._trace(size) if draws else microbatch

            def run(rows, added, still=still):
                count, shared = len(added), still.update.again().tensors
                inputs = Inputs(
                    rows,
                    None if specs.present is None else tf.ones([count], tf.bool),
                    tf.zeros([2], tf.int64),
                    tf.cast(added, "float32"),
                    None if specs.clips is None else policy.clips(None, count),
                    shared,
                    None
                    if specs.row_weights is None
                    else tf.fill([count * num_views], 1.0 / num_views),
                )
                while keys:  # Random numbers may choose branches, so several are tried.
                    others = microbatch.update.again().tensors
                    microbatch(inputs._replace(key=keys.pop(), shared=others))
                output = still(inputs)
                sums = still.update.with_tensors(shared).apply_transforms(
                    model.trainable_variables, output.sums
                )
                return output.squared_norms.numpy(), [np.asarray(total) for total in sums]

            def lowest_norms(rows, added):
                with rounding.from_below():
                    return np.maximum(run(rows, added, self._trace(size))[0], 0.0)

            factors_of = functools.partial(factors_of_policy, self._optimizer)
            # If the microbatch has loops, batches of one are traced too.
            loops = any("While" in op.type for op in microbatch.graph.get_operations())
            padding = padding_of(self._batch.data, self._optimizer.session)
            rows = specs.rows, num_views, examples, loops, padding
            return list(problems_of_microbatch(model, run, lowest_norms, factors_of, *rows))

    def _trace(self, size):
        """Returns the `Microbatch` traced for a `MicrobatchSize`."""
        views, (x, y, sample_weight) = self._views, self._batch.data
        rows = self._rows(size)
        examples = None if rows is None else rows // views.count

        specs = views.row_specs(x), *views.target_specs(x, y, sample_weight)
        specs = Inputs(
            _with_rows(specs, rows),
            None if self._is_full(size) else tf.TensorSpec([examples], tf.bool),
            tf.TensorSpec([2], tf.int64),
            tf.TensorSpec([examples], tf.float32),
            None if self._batch.clips is None else tf.TensorSpec([examples], tf.float32),
            row_weights=tf.TensorSpec([rows], tf.float32) if views.per_user else None,
        )
        return Microbatch(self._optimizer, self._cache.engine, specs, size)

    def _is_full(self, size):
        return self._batch.present is None and size.holds_exactly(self._kind.num_rows)

    def _rows(self, size):
        """Returns the number of rows of a microbatch, an int; None if it can be any number."""
        if size.varies:
            return None
        count = self._kind.num_rows
        is_whole = self._is_full(size) and count <= size.examples
        return (count if is_whole else size.examples) * self._views.count

    def _sizes(self):
        """Yields the `MicrobatchSize`s to try, the best first. The last has `varies` False."""
        optimizer, kind, cache = self._optimizer, self._kind, self._cache
        # XLA needs microbatches of one size. Without absent examples, a smaller last one gains
        # nothing.
        may_vary = (bool(kind.weights) or kind.num_rows is None) and kind.mode != "compiled"
        for varies in [True, False] if may_vary and cache.engine.suits_any_number else [False]:
            num_views, has_padding = self._views.count, bool(kind.weights)
            yield choose_size(
                optimizer, cache.engine.work, num_views, kind.num_rows, has_padding, varies
            )


def factors_of_policy(optimizer, squared_norms):
    """Returns the clip policy's factors, float32 [n]; raises UnfitForPrivacy for wrong factors.

    Args:
        optimizer: The tfdpx optimizer.
        squared_norms: float32 array [n], of made-up examples.
    """
    policy, batch_size = optimizer.clip_policy, optimizer.batch_size

    def factors_of(norms):
        count = len(norms)
        present, clips = tf.fill([count], True), policy.clips(None, count)
        return tf.broadcast_to(policy.clip(norms, present, batch_size, clips), [count])

    count, clip = len(squared_norms), policy.l2_norm_clip
    # Norms below and above the clip are added: the norms of made-up rows may all be below it.
    others = np.square(np.multiply([1e-3, 1.0, 1e3], clip if clip < math.inf else 1.0))
    squared_norms = np.concatenate([squared_norms, others.astype("float32")])
    factors = factors_of(tf.constant(squared_norms))
    single_factors = tf.concat([factors_of(tf.constant([norm])) for norm in squared_norms], axis=0)
    if not np.allclose(factors, single_factors, rtol=_ROUNDING, atol=0, equal_nan=True):
        raise UnfitForPrivacy(
            f"The clip policy {type(policy).__name__} decides on an example by the norms of others "
            "too, so one example changes what the others add. Let `clip` decide by each norm alone."
        )
    # Examples with norms that are not finite are left out of the update.
    finite = {"where": np.isfinite(squared_norms), "initial": 0.0}
    longest_norm = np.max(np.abs(factors) * np.sqrt(squared_norms), **finite) * batch_size
    if clip < math.inf and not longest_norm <= 1 + _ROUNDING:
        raise UnfitForPrivacy(
            f"The clip policy {type(policy).__name__} lets an example add {longest_norm:.4g} / "
            "batch_size to the sum, and noise hides 1 / batch_size. Return smaller factors."
        )
    return factors[:count]


def _find_cache(optimizer, model, views, batch):
    """Returns the `ModelCache` for a model and the shapes of its batches; makes it if needed."""
    x, y, _ = batch.data
    # A model may be compiled again with the same optimizer, and another loss or other metrics.
    key = (
        model_internals.compilation(model),
        tuple(id(v) for v in model.trainable_variables),
        # The specs of x are needed, too: in example rows, an axis of unknown length has length one.
        _specs((views.example_rows(x), x, y)),
    )
    cache = optimizer.prepared.get(model)
    if cache is None or cache.key != key:
        check_declared(model)
        with refusing() as problems:
            problems += problems_of_augment(views.augment)
        engine = Engine(model, views.example_rows(x), views.count)
        cache = optimizer.prepared[model] = ModelCache(key, engine)
    return cache


def _specs(nest):
    """Returns a tuple of pairs (shape of a row, dtype), one for each tensor in `nest`."""
    tensors = [t for t in tf.nest.flatten(nest) if t is not None]
    return tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)


def _with_rows(specs, rows):
    return tf.nest.map_structure(
        lambda t: None if t is None else tf.TensorSpec([rows, *t.shape[1:]], t.dtype), specs
    )
