"""What two runs must share to go on from one checkpoint.

They add the same noise, so whatever would make their sums differ must be the same: the difference
would show the sums without noise. Settings are compared by name. What no configuration tells (the
code of a loss or of a model, loss weights) is compared by what it does: to made-up examples, at
made-up weights.
"""

import contextlib
import json
import math
import os

import numpy as np
import tensorflow as tf

from tfdpx import augmult, keras_internals
from tfdpx.data.draws import draws_of
from tfdpx.per_example.layout import restored
from tfdpx.per_example.rows import synthetic

NOT_OF_THE_RUN = (
    "`tfdpx.callbacks.Checkpoint` restores the draws together with the noise, so `fit` must be "
    "given `plan.batches(x, y, optimizer=model.optimizer)` as it is."
)
_BEHAVIOUR = "behaviour (loss, loss weights or the model's code)"


def identity(model, data):
    """The identity of a run: a dict of JSON values by name.

    Args:
        model: The compiled, built model.
        data: What `fit` trains on.

    Raises:
        ValueError: If `data` are not the batches of the optimizer's own run.
    """
    optimizer, draws = keras_internals.innermost(model.optimizer), draws_of(data)
    if draws is None or draws.plan is None or draws.run is not optimizer.run:
        raise ValueError(NOT_OF_THE_RUN)
    settings = optimizer.get_config()
    if optimizer.first_learning_rate is not None:
        settings["learning_rate"] = optimizer.first_learning_rate
    found = {
        "plan": {"optimizer": settings.pop("plan"), "batches": draws.plan.get_config()},
        "number of examples": draws.examples.count,
        "data set": draws.examples.fingerprint(),
        "seed of the draws": draws.seed_digest,
        "optimizer": {"class": type(optimizer).__name__, **settings},
        "model": [_layer(layer) for layer in keras_internals.flatten_layers(model)],
        "execution": {"jit_compile": model.jit_compile, "run_eagerly": model.run_eagerly},
        "loss": getattr(model.loss, "__qualname__", None) or str(_nameless(_config(model.loss))),
        _BEHAVIOUR: _behaviour(model, data),
    }
    return json.loads(json.dumps(_nameless(found), default=lambda value: type(value).__qualname__))


def example_of(data):
    """One made-up example of a data set: `(x, y, sample_weight)`.

    Raises:
        ValueError: If it is no data set.
    """
    if not isinstance(data, tf.data.Dataset):
        raise ValueError(NOT_OF_THE_RUN)
    return tf.nest.map_structure(
        lambda spec: (
            tf.zeros([1, *spec.shape[1:]], spec.dtype) if isinstance(spec, tf.TensorSpec) else None
        ),
        data.element_spec,
    )


def check_same(saved, given, directory):
    """Raises ValueError, naming what differs, unless two identities are the same.

    Args:
        saved: That of the run in a checkpoint.
        given: That of the run that would go on from it.
        directory: Path of the checkpoint, for the message.
    """
    for name, value in given.items():
        known = saved.get(name)
        if known == value or name == _BEHAVIOUR and _is_close(known, value):
            continue
        raise ValueError(
            f"The checkpoint in {os.fspath(directory)!r} is of a run with another {name}: "
            f"{_difference(known, value)}. Noise must not be used twice on different sums. Go on "
            "with what that run had, or give the new run another folder."
        )


def _layer(layer):
    """A layer as JSON."""
    weights = [[list(v.shape), v.dtype, v.trainable] for v in layer.weights]
    inner = len(keras_internals.flatten_layers(layer)) > 1
    config = {} if inner else _config(layer)
    config.pop("batch_shape", None)
    return [type(layer).__name__, config, weights]


def _config(value):
    """The configuration of an object of Keras as a dict, as far as it has one."""
    if not hasattr(value, "get_config"):
        return {"value": repr(value) if isinstance(value, (str, type(None))) else type(value)}
    with contextlib.suppress(NotImplementedError, TypeError, ValueError):
        return {"class": type(value).__name__, **value.get_config()}
    return {"class": type(value).__name__}


def _nameless(value):
    """`value` without entries called "name", which Keras numbers from one object to the next."""
    if isinstance(value, dict):
        return {key: _nameless(each) for key, each in value.items() if key != "name"}
    if isinstance(value, (list, tuple)):
        return [_nameless(each) for each in value]
    return value


def _behaviour(model, data):
    """Loss and gradient norms of made-up examples at made-up weights: a list of floats."""
    if model.distribute_strategy.num_replicas_in_sync > 1:
        return []
    x, y, sample_weight = tf.nest.map_structure(
        lambda spec: (
            tf.zeros([1, *(size or 1 for size in spec.shape[1:])], spec.dtype)
            if isinstance(spec, tf.TensorSpec)
            else None
        ),
        data.element_spec,
    )
    optimizer = keras_internals.innermost(model.optimizer)
    rows = augmult.Views(optimizer.augment, optimizer.augmult, x).example_rows(x)
    x, y, sample_weight = synthetic((rows, y, sample_weight), 3, seed=2)
    variables = model.trainable_variables
    with (
        restored([*model.non_trainable_variables, *model.metrics_variables, *variables]),
        keras_internals.still(),
        tf.GradientTape() as tape,
    ):
        generator = np.random.default_rng(0)
        for variable in variables:
            fan_in = math.prod(variable.shape[:-1]) or 1
            variable.assign(generator.normal(size=variable.shape) / math.sqrt(fan_in))
        y_pred = keras_internals.call_model(model, x)
        loss = keras_internals.compute_loss(model, x, y, y_pred, sample_weight)
        loss = tf.reduce_sum(tf.cast(loss, "float32"))
    values = [v.value for v in variables]
    gradients = tape.gradient(loss, values, unconnected_gradients="zero")
    norms = [tf.norm(tf.cast(tf.convert_to_tensor(g), "float32")) for g in gradients]
    # JSON has no NaN.
    return [str(float(number)) for number in (loss, *norms)]


def _is_close(a, b):
    """Whether two behaviours agree, but for rounding on another machine."""
    a, b = np.array(a or [], float), np.array(b or [], float)
    return a.shape == b.shape and np.allclose(a, b, rtol=1e-3, atol=1e-6, equal_nan=True)


def _difference(saved, given):
    """Where two JSON values differ, for people."""
    if isinstance(saved, dict) and isinstance(given, dict):
        names = [name for name in {**saved, **given} if saved.get(name) != given.get(name)]
        return ", ".join(
            f"{name}: {_difference(saved.get(name), given.get(name))}" for name in names
        )
    return f"saved {_short(saved)}, received {_short(given)}"


def _short(value):
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."
