"""What is decided as a step is traced: the engine, and why examples cannot interact.

The layerwise engine is taken where the graph of its microbatch proves that no example influences
another: for any number of rows if it can, else for the number at hand. What nothing proves is
computed alone, example by example, by the vectorized engine. There is no third verdict.
"""

import contextlib
import dataclasses
import math
import typing

import numpy as np
import tensorflow as tf

from tfdpx._keras import model_internals, step_context, tensorflow_internals
from tfdpx._warnings import warn
from tfdpx.checks.augmentation import problems_of_augment
from tfdpx.checks.batches_of_one import problems_of_microbatch, undisturbed
from tfdpx.checks.declared import check_declared
from tfdpx.checks.errors import UnfitForPrivacy, refusing
from tfdpx.independence import raising
from tfdpx.independence.hidden_state import Found
from tfdpx.independence.lengths import ROWS, Length
from tfdpx.independence.metrics import problems_of_metrics
from tfdpx.independence.verdict import (
    Independence,
    independence_of_microbatch,
    reasons_of_loss,
)
from tfdpx.per_example.capture import UnexplainedVariables
from tfdpx.per_example.engines import ENGINES
from tfdpx.per_example.randomness import UnmappedState
from tfdpx.per_example.rows import Rows
from tfdpx.per_example.vectorize import TakesBatch
from tfdpx.training import microbatch_size
from tfdpx.training._microbatch import Inputs, Microbatch

_ALONE = "vmap"
# Of factors, in float32.
_ROUNDING = 1e-5
# Of random numbers that an engine is run with where they decide what it runs.
_KEYS = 6


class _Kind(typing.NamedTuple):
    """What microbatches depend on besides the model: of a batch, and of how the step runs."""

    num_rows: int | None  # where it is static
    weights: tuple  # `_specs` of the sample weights, or a word that rows may be absent; or empty
    way: str  # "eager", "compiled" or "graph"


class Batch(typing.NamedTuple):
    """A batch of the step, and what its microbatches get besides.

    Attributes:
        views: `tfdpx.training.views.Views`.
        data: `(x, y, sample_weight)`, nests of tensors [B, ...]; only shapes and dtypes are read.
        may_be_absent: Whether an example may be padding.
    """

    views: object
    data: tuple
    may_be_absent: bool


@dataclasses.dataclass
class ModelCache:
    """What is found out for a model and the shapes of its batches.

    Attributes:
        key: Tuple, of the model and the shapes.
        engine: The per-example engine of the last step that was traced.
        engines: Dict by name.
        sizes: The `MicrobatchSize` for each `_Kind` of batch.
        independence: List of the `Independence`s that steps were traced with.
        checked: Set of what was compared with batches of one.
        fitting: Dict of `microbatch_size.MicrobatchAutotuner` by the name of an engine.
        eager: Pair of a `Microbatch` and its `MicrobatchSize` for each `_Kind`, in eager mode.
    """

    key: tuple
    engine: object = None
    engines: dict = dataclasses.field(default_factory=dict)
    sizes: dict = dataclasses.field(default_factory=dict)
    independence: list = dataclasses.field(default_factory=list)
    checked: set = dataclasses.field(default_factory=set)
    fitting: dict = dataclasses.field(default_factory=dict)
    eager: dict = dataclasses.field(default_factory=dict)


def prepare(optimizer, model, batch, fits):
    """The `Microbatch` of this step, and the `MicrobatchSize` that it was traced for.

    It is traced anew for each trace of the step, and proved each time; the rest is looked at once
    for a model and the shapes of its batches.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled, built `keras.Model`.
        batch: `Batch`.
        fits: Function of an engine and a `MicrobatchAutotuner` to the examples that fit in memory.

    Raises:
        UnfitForPrivacy: If the model, the loss or the augmentation is unfit for private training;
            with `require_proof` also if nothing proves that examples cannot interact.
    """
    preparation = _Preparation(optimizer, model, batch, fits)
    if tf.executing_eagerly() and (kept := preparation.kept()):
        return kept
    try:
        microbatch, size, found = preparation.proved() or preparation.alone()
    except (UnmappedState, TakesBatch) as error:
        raise UnfitForPrivacy(str(error)) from error
    try:
        preparation.check(microbatch, size, found)
    except tf.errors.OpError:
        if not found.reasons:
            raise
        # What TensorFlow cannot vectorize shows when it runs.
        microbatch = preparation.looped(size)
        preparation.check(microbatch, size, found)
    return microbatch, size


class _Preparation:
    def __init__(self, optimizer, model, batch, fits):
        self._optimizer, self._model, self._batch, self._fits = optimizer, model, batch, fits
        self._known = _known(optimizer, model, batch)
        x, _, sample_weight = batch.data
        count = Rows(x).count
        way = "compiled" if tensorflow_internals.is_for_xla(model) else "graph"
        way = "eager" if tf.executing_eagerly() else way
        count = count if isinstance(count, int) else None
        flags = ("present",) if batch.may_be_absent and count is not None else ()
        self._kind = _Kind(count, _specs(sample_weight) or flags, way)
        self._reasons = []

    def kept(self):
        """What the last eager step of such batches took, a pair; None if there was none."""
        microbatch, size = self._known.eager.get(self._kind, (None, None))
        return microbatch and (microbatch.renewed(), size)

    def proved(self):
        """Triple of a `Microbatch` of the layerwise engine, its size and proof; None if none."""
        name = self._optimizer.per_example_engine
        if name == _ALONE:
            self._reasons = [f'`per_example_engine="{_ALONE}"` asks for it']
            return None
        try:
            for size in self._sizes(name):
                try:
                    made = self._traced(name, size)
                except Exception as error:
                    known = isinstance(error, UnexplainedVariables | UnmappedState | TakesBatch)
                    if known or not size.varies:
                        raise
                    # Whatever a layer or a loss raises that asks for the number.
                    self._reasons = [f"it cannot be traced for any number of rows: {error}"]
                    continue
                found = independence_of_microbatch(self._model, made, self._rows(size))
                ends = raising.problems(made.graph, Rows(made.inputs.rows).tensors)
                if not found.reasons and not ends:
                    return made, size, found
                self._reasons = [
                    *(f"batch independence is not proved: {reason}" for reason in found.reasons),
                    *(f"one example could end the run: {reason}" for reason in ends),
                ]
        except (UnexplainedVariables, TakesBatch) as error:
            self._reasons = [str(error)]
        return None

    def alone(self):
        """Triple as of `proved`, of the engine that computes each example alone.

        Raises:
            UnfitForPrivacy: With `require_proof`.
        """
        found = Independence(tuple(self._reasons))
        if self._optimizer.require_proof:
            raise UnfitForPrivacy(
                f"With `require_proof=True`, model '{self._model.name}' is refused: "
                f"{found.reasons[0]}. Use operations that treat examples one by one and take every "
                "value, or leave `require_proof` out to compute each example alone."
            )
        size = next(self._sizes(_ALONE))
        return self._traced(_ALONE, size), size, found

    def looped(self, size):
        """The `Microbatch` as of `alone`, one example after the other."""
        engines = self._known.engines
        engines[_ALONE] = engines[_ALONE].looping()
        return self._traced(_ALONE, size)

    def check(self, microbatch, size, found):
        """Raises UnfitForPrivacy for what a microbatch keeps, or does wrong; then remembers it."""
        known, model = self._known, self._model
        with refusing() as problems:
            state = Found(microbatch.graph, model, [])
            problems += state.problems(f"The training pass of '{model.name}'")
            if found.reasons:
                rows = Rows(microbatch.inputs.rows).tensors
                loops = microbatch.engine.loops
                ends = raising.problems(microbatch.graph, rows, alone=True, varying=loops)
                problems += [f"One example could end the run: {reason}." for reason in ends]
            what = (self._kind, size, type(microbatch.engine).__name__)
            if not problems and what not in known.checked:
                problems += self._problems_of_loss(microbatch, size, found)
                problems += step_context.eagerly(self._compared, microbatch, size, found)
        known.checked.add(what)
        known.engine, known.sizes[self._kind] = microbatch.engine, size
        if tf.executing_eagerly():
            known.eager[self._kind] = microbatch, size
        if found not in known.independence:
            known.independence.append(found)
            if found.reasons and self._optimizer.per_example_engine != _ALONE:
                self._warn_of_the_cost(found.reasons[0], microbatch.engine.loops)

    def _warn_of_the_cost(self, reason, loops):
        cost = "about twice the time of an ordinary step"
        if loops:
            cost = "the time of one example after the other, for TensorFlow cannot vectorize it"
        warn(
            f"Each example of model '{self._model.name}' is computed alone, since {reason}. It "
            f"takes {cost}, and memory for each example's gradient. A model that compares examples "
            "sees one at a time: that is another model than without privacy."
        )

    def _problems_of_loss(self, microbatch, size, found):
        """Of the metrics; a loss that compares examples is said, for each is computed alone."""
        data, y_pred, rows = microbatch.inputs.rows, microbatch.found.y_pred, self._rows(size)
        length = ROWS if rows is None else Length(rows)
        reasons = reasons_of_loss(self._model, data, y_pred, length)
        if reasons and not found.reasons:
            text = f"nothing proves that the loss is a sum over examples: {reasons[0]}"
            if self._optimizer.require_proof:
                yield f"With `require_proof=True`, {text}. Use a loss that is a sum or a mean."
            warn(
                f"The loss of each example is computed alone, since {text}. A loss that compares "
                "examples sees one at a time: that is another loss than without privacy."
            )
        absent = microbatch.inputs.present is not None
        yield from problems_of_metrics(self._model, data, y_pred, rows, absent)

    def _compared(self, microbatch, size, found):
        """Texts of how the microbatch differs from batches of one example, a list."""
        model, views, specs = self._model, self._batch.views.count, microbatch.inputs
        draws = microbatch.draws
        drawn, key, alone = microbatch, tf.zeros([2], tf.int64), not microbatch.found.of_rows
        examples = None if size.varies else self._rows(size) // views
        still = step_context.freeze_rng() if draws else contextlib.nullcontext()
        with undisturbed(model), still:
            if draws:  # Random layers hold still for the comparison, as batches of one cannot draw.
                given = specs._replace(shared=())
                microbatch = Microbatch(
                    self._optimizer, microbatch.engine, tf.nest.map_structure(_spec, given)
                )
            update = microbatch.engine.update()

            def run(rows):
                count = Rows(rows).count // views
                given = Inputs(
                    rows,
                    None if specs.present is None else tf.ones([count], tf.bool),
                    key,
                    self._optimizer.clip_policy.whole(count),
                    update.tensors,
                    None if specs.shares is None else tf.fill([count * views], 1.0 / views),
                )
                # Which branches run in vectorization is drawn.
                for number in range(_KEYS if drawn is not microbatch and alone else 0):
                    drawn(given._replace(key=tf.constant([0, number], tf.int64)))
                found = microbatch(given)
                sums = microbatch.update.of(update.tensors).finished(
                    model.trainable_variables, found.sums
                )
                return found.squared_norms.numpy(), [np.asarray(total) for total in sums]

            def factors_of(squared_norms):
                return factors_of_policy(self._optimizer, squared_norms)

            rows = specs.rows
            # An assertion, of what is not proved, and a loop are for a graph.
            trace = found.reasons or any("While" in op.type for op in drawn.graph.get_operations())
            return list(
                problems_of_microbatch(model, run, factors_of, rows, views, examples, trace)
            )

    def _traced(self, name, size):
        """The `Microbatch` of an engine, of a `MicrobatchSize`."""
        views, (x, y, sample_weight) = self._batch.views, self._batch.data
        rows = self._rows(size)
        examples = None if rows is None else rows // views.count

        behind = 2 if views.per_user else 1

        def spec(t):
            return None if t is None else tf.TensorSpec([rows, *t.shape[behind:]], t.dtype)

        targets = tf.nest.map_structure(spec, (y, sample_weight))

        specs = Inputs(
            (_with_rows(views.row_specs(x), rows), *targets),
            None if self._is_full(size) else tf.TensorSpec([examples], tf.bool),
            tf.TensorSpec([2], tf.int64),
            self._optimizer.clip_policy.specs(examples),
            shares=tf.TensorSpec([rows], tf.float32) if views.per_user else None,
        )
        return Microbatch(self._optimizer, self._engine(name), specs)

    def _is_full(self, size):
        return not self._batch.may_be_absent and size.fits(self._kind.num_rows)

    def _rows(self, size):
        """The rows of a microbatch, an int; None for any number."""
        if size.varies:
            return None
        count = self._kind.num_rows
        whole = self._is_full(size) and count <= size.examples
        return (count if whole else size.examples) * self._batch.views.count

    def _engine(self, name):
        engines, views = self._known.engines, self._batch.views
        if name not in engines:
            rows = views.example_rows(self._batch.data[0])
            engines[name] = ENGINES[name](self._model, rows, views.count)
        return engines[name]

    def _sizes(self, name):
        """Yields `MicrobatchSize`s to try, the best first; the last does not vary."""
        optimizer, kind, engine = self._optimizer, self._kind, self._engine(name)
        # XLA needs microbatches that are alike; and where no example can be missing, nothing is
        # gained.
        may_vary = (bool(kind.weights) or kind.num_rows is None) and kind.way != "compiled"
        for varies in [True, False] if may_vary and engine.suits_any_number else [False]:
            if optimizer.microbatch_size == microbatch_size.AUTO:
                fitting = self._known.fitting.setdefault(
                    name, microbatch_size.MicrobatchAutotuner()
                )
                yield microbatch_size.of_examples(self._fits(engine, fitting), varies)
                continue
            views, weighted = self._batch.views.count, bool(kind.weights)
            yield microbatch_size.choose(
                optimizer, engine.work, views, kind.num_rows, weighted, varies
            )


def factors_of_policy(optimizer, squared_norms):
    """float32 [n]: what the clip policy multiplies gradients by; UnfitForPrivacy if it is unfit.

    Args:
        optimizer: The tfdpx optimizer.
        squared_norms: float32 array [n].
    """
    policy, batch_size = optimizer.clip_policy, optimizer.batch_size

    def factors_of(norms):
        count = len(norms)
        found = policy.factors(norms, tf.fill([count], True), batch_size, *policy.whole(count))
        return tf.broadcast_to(found, [count])

    factors = factors_of(squared_norms)
    alone = tf.concat([factors_of(norm[tf.newaxis]) for norm in squared_norms], axis=0)
    if not np.allclose(factors, alone, rtol=_ROUNDING, atol=0, equal_nan=True):
        raise UnfitForPrivacy(
            f"The clip policy {type(policy).__name__} decides on an example by the norms of others "
            "too, so one example changes what the others add. Return `factors` of each norm alone."
        )
    longest = float(tf.reduce_max(tf.abs(factors) * tf.sqrt(squared_norms)) * batch_size)
    if policy.l2_norm_clip < math.inf and not longest <= 1 + _ROUNDING:
        raise UnfitForPrivacy(
            f"The clip policy {type(policy).__name__} lets an example add {longest:.4g} / "
            "batch_size to the sum, and noise hides 1 / batch_size. Return smaller `factors`."
        )
    return factors


def _known(optimizer, model, batch):
    """The `ModelCache` for a model and the shapes of its batches."""
    x, y, _ = batch.data
    # A model may be compiled again with the same optimizer, and another loss or other metrics.
    key = (
        model_internals.compilation(model),
        tuple(id(v) for v in model.trainable_variables),
        # The data's too: what has another length in each batch is made up of one.
        _specs((batch.views.example_rows(x), x, y)),
    )
    known = optimizer.prepared.get(model)
    if known is None or known.key != key:
        check_declared(model)
        with refusing() as problems:
            problems += problems_of_augment(batch.views.augment)
        known = optimizer.prepared[model] = ModelCache(key)
    return known


def _specs(nest):
    """Shapes of rows, and dtypes, of the tensors in `nest`."""
    tensors = [t for t in tf.nest.flatten(nest) if t is not None]
    return tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)


def _with_rows(specs, rows):
    return tf.nest.map_structure(lambda t: tf.TensorSpec([rows, *t.shape[1:]], t.dtype), specs)


def _spec(tensor):
    return None if tensor is None else tf.TensorSpec(tensor.shape, tensor.dtype)
