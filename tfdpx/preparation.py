"""What is found out once for a model and its batches: an engine, checks, how passes are cut."""

import dataclasses
import typing
from collections.abc import Callable

import tensorflow as tf

from tfdpx import checks, keras_internals, tensorflow_internals
from tfdpx._warnings import warn
from tfdpx.memory import pass_size
from tfdpx.per_example import ENGINES
from tfdpx.per_example.rows import Rows


class _Kind(typing.NamedTuple):
    """What passes depend on besides the model: of a batch, and of how the step runs."""

    count: int | None  # of rows, where it is static
    weights: tuple  # `_specs` of the sample weights, empty where there are none
    way: str  # "eager", "compiled" or "graph"


@dataclasses.dataclass
class Prepared:
    """What is found out once for a model and the shapes of its batches."""

    key: tuple
    engine: Callable
    sizes: dict = dataclasses.field(default_factory=dict)  # the `PassSize` of each `_Kind`
    checked: set = dataclasses.field(default_factory=set)  # what passes were found fit
    may_vary: bool = True  # False where the proof was tried in vain
    independence: list = dataclasses.field(default_factory=list)  # of the passes that were checked
    fitting: pass_size.Fitting = dataclasses.field(default_factory=pass_size.Fitting)


def prepare(optimizer, model, views, data):
    """The `Prepared` for this model and these shapes, and the `PassSize`.

    Made and checked once for each.

    Args:
        optimizer: The tfdpx optimizer that `model` is compiled with.
        model: A compiled, built `keras.Model`.
        views: Its `tfdpx.augmult.Views`.
        data: `(x, y, sample_weight)`, nests of tensors [B, ...]; only shapes and dtypes are read.

    Raises:
        UnfitForPrivacy: If the model, the loss or the augmentation is unfit for private training.
    """
    x, y, _ = data
    rows = views.example_rows(x)
    # A model may be compiled again with the same optimizer, and another loss or other metrics.
    key = (
        keras_internals.compilation(model),
        tuple(id(v) for v in model.trainable_variables),
        # The data's too: what has another length in each batch is made up of one.
        _specs((rows, x, y)),
    )
    known = optimizer.prepared.get(model)
    if known is None or known.key != key:
        checks.check_declared(model)
        engine = ENGINES[optimizer.per_example_engine](model, rows, views.count)
        known = Prepared(key, engine)
    kind = _kind(model, data)
    if kind not in known.sizes:
        size = _chosen_size(optimizer, model, known, views, data, kind)
        why = checks.why_alone(model, views, x, known.independence[-1])
        if why and not isinstance(known.engine, ENGINES["vmap"]):
            known = Prepared(key, ENGINES["vmap"](model, rows, views.count))
            checks.check_alone(model, known.engine, views, *data, why)
            warn(
                "Each example is computed alone, which takes longer, so that its random numbers "
                f"are its own: {why}."
            )
            size = _chosen_size(optimizer, model, known, views, data, kind)
        known.sizes[kind] = size
    optimizer.prepared[model] = known
    return known, known.sizes[kind]


def take(model, known, views, data, size):
    """Makes `size` that of passes for such batches, once they are checked; returns it.

    Args:
        model: As for `prepare`.
        known: The `Prepared` for it.
        views: As for `prepare`.
        data: As for `prepare`.
        size: `PassSize`, of which `varies` is as `prepare` found it.

    Raises:
        UnfitForPrivacy: As for `prepare`.
    """
    kind = _kind(model, data)
    # What is proved for any number of rows is proved for these.
    if not size.varies:
        _check(model, known, views, data, kind, [size])
    known.sizes[kind] = size
    return size


def _kind(model, data):
    x, _, sample_weight = data
    count = Rows(x).count
    compiled = tensorflow_internals.is_for_xla(model)
    way = "eager" if tf.executing_eagerly() else "compiled" if compiled else "graph"
    return _Kind(count if isinstance(count, int) else None, _specs(sample_weight), way)


def _specs(nest):
    """Shapes of rows, and dtypes, of the tensors in `nest`."""
    tensors = [t for t in tf.nest.flatten(nest) if t is not None]
    return tuple((tuple(t.shape[1:]), t.dtype) for t in tensors)


def _chosen_size(optimizer, model, known, views, data, kind):
    """The `PassSize` for such batches, once passes of it are checked."""
    # XLA needs passes that are alike; Python is told their rows in eager mode, where none are
    # proved for an unknown number; and where no example can be missing, nothing is gained.
    may_vary = (bool(kind.weights) or kind.count is None) and kind.way == "graph"
    given = optimizer, known.engine.work, views.count, kind.count, bool(kind.weights)
    may_vary &= known.may_vary and known.engine.suits_any_number and views.suit_any_number
    varying = [True, False] if may_vary else [False]
    sizes = [pass_size.choose(*given, varies) for varies in varying]
    size = _check(model, known, views, data, kind, sizes)
    known.may_vary &= size == sizes[0]
    return size


def _check(model, known, views, data, kind, sizes):
    """The first of `sizes` whose passes are found fit, now or before."""

    def passes(size):
        # Metrics are given weights where rows of a pass may be absent.
        return kind.way, kind.weights, size.fits(kind.count), size

    if passes(sizes[0]) in known.checked:
        return sizes[0]
    found, size = checks.check_step(model, known.engine, views, *data, sizes)
    known.checked.add(passes(size))
    known.independence.append(found)
    return size
