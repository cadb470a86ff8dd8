"""What is found out once for a model and its batches: an engine, checks, how passes are cut."""

import dataclasses
import typing
from collections.abc import Callable

import tensorflow as tf

from tfdpx import checks, keras_internals, tensorflow_internals
from tfdpx.memory import pass_size
from tfdpx.per_example import ENGINES
from tfdpx.per_example.rows import Rows


class _Kind(typing.NamedTuple):
    """What passes depend on besides the model: of a batch, and of how the step runs."""

    count: int | None  # of rows, where it is static
    weighted: bool
    way: str  # "eager", "compiled" or "graph"


@dataclasses.dataclass
class Prepared:
    """What is found out once for a model and the shapes of its batches."""

    key: tuple
    engine: Callable
    sizes: dict = dataclasses.field(default_factory=dict)  # `PassSize` of checked ones, by `_Kind`
    may_vary: bool = True  # False where the proof was tried in vain
    separations: list = dataclasses.field(default_factory=list)  # of the passes that were checked
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
    x, _, sample_weight = data
    rows = views.example_rows(x)
    # A model may be compiled again with the same optimizer, and another loss or other metrics.
    key = (
        keras_internals.compilation(model),
        tuple(id(v) for v in model.trainable_variables),
        # The data's too: what has another length in each batch is made up of one.
        tuple((tuple(t.shape[1:]), t.dtype) for t in tf.nest.flatten((rows, x))),
    )
    known = optimizer.prepared.get(model)
    if known is None or known.key != key:
        checks.check_declared(model)
        engine = ENGINES[optimizer.per_example_engine](model, rows, views.count)
        known = Prepared(key, engine)
    count = Rows(x).count
    weighted = any(weight is not None for weight in tf.nest.flatten(sample_weight))
    compiled = tensorflow_internals.is_for_xla(model)
    way = "eager" if tf.executing_eagerly() else "compiled" if compiled else "graph"
    kind = _Kind(count if isinstance(count, int) else None, weighted, way)
    if kind not in known.sizes:
        known.sizes[kind] = _checked_size(optimizer, model, known, views, data, kind)
    optimizer.prepared[model] = known
    return known, known.sizes[kind]


def _checked_size(optimizer, model, known, views, data, kind):
    """The `PassSize` for such batches, once passes of it are checked."""
    # XLA needs passes that are alike; Python is told their rows in eager mode, where none are
    # proved for an unknown number; and where no example can be missing, nothing is gained.
    may_vary = (kind.weighted or kind.count is None) and kind.way == "graph"
    given = optimizer, known.engine.work, views.count, kind.count, kind.weighted
    may_vary &= known.may_vary and known.engine.suits_any_number and views.suit_any_number
    varying = [True, False] if may_vary else [False]
    sizes = [pass_size.choose(*given, varies) for varies in varying]
    checked = [size for other, size in known.sizes.items() if other.way == kind.way]
    if sizes[0] in checked:
        return sizes[0]
    found, size = checks.check_step(model, known.engine, views, *data, sizes)
    known.may_vary &= size == sizes[0]
    known.separations.append(found)
    return size
