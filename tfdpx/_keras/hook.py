"""Puts the wrappers into Keras that private training needs, and takes them out again.

Keras hands an optimizer finished gradients and shows it neither the model nor the batch, so private
training needs doors that Keras does not have:

- `keras.Model.train_step`: an optimizer that defines `private_train_step(model, data)` drives the
  step, any other trains as before. A model's own `train_step` still wins by the method resolution
  order; the optimizer then refuses its gradients.
- `keras.Model.fit`: an optimizer that defines `fitting(model, arguments)`, a context manager, may
  refuse first, takes the arguments that its `fit_arguments` names, learns what data are trained on,
  and gives the arguments for Keras; the step can tell that Keras has split the batch over replicas.
- `keras.Model.train_on_batch`: an optimizer that defines `unplanned_step(model, rows,
  sample_weight, class_weight)`, a context manager, accounts for such batches apart.
- `keras.Model.compile`: an optimizer that defines `compiled(model)` learns the weights.
- The `fit` of KerasHub's models, wrapped when one is compiled with such an optimizer: it hands
  Keras a data set of preprocessed batches, where a plan draws from arrays.
- Files, `set_weights`, `quantize` of models and layers, and `fit` and
  `train_on_batch` with any other optimizer: what `watch_weights` was given learns where values
  come from. A file cannot be HDF5 where an optimizer defines `refuse_hdf5()`.
- Names of classes in files: what is called "tfdpx>..." is imported when Keras first looks for it.
- Keras's mean losses divide by the number of replicas; `model_internals.compute_loss` turns that
  off.
- Keras's cross-entropy of labels: in the private step an invalid label makes the loss of its
  example NaN, so that the example counts as zero. By itself TensorFlow ends the run, on CPUs.
- Keras's `ops.take`, by which `Embedding` looks up: in the private step an entry at an index out
  of range is NaN, for the same reason.
- Keras's random numbers: where one forward pass is compared with another, all rows have the same.
- `keras.Operation.__call__`: while a recorder is active in this thread it sees every call of every
  layer. Without one, the wrapper adds a single attribute look-up.

`install()` runs once tfdpx and Keras are imported, twice does no harm, and `uninstall()` takes all
away again.
"""

import contextlib
import functools
import inspect
import types

import keras
import tensorflow as tf

from tfdpx._keras import (
    hub_internals,
    layer_internals,
    model_internals,
    saving_internals,
    step_context,
)

_installed = []  # (owner, name, what stood there, or None where it was inherited)
_load = [lambda: None]  # Imports what `install` was given; called when Keras first asks for it.
_watch = types.SimpleNamespace()


def install(load=None):
    """Wraps what the module's docstring lists. Idempotent.

    Args:
        load: Function without arguments that imports all that registers with Keras, and what calls
            `watch_weights`; None for the one of the last call.
    """
    if load is not None:
        _load[:] = [load]
    if _installed:
        return
    _wrap(keras.Model, "train_step", _train_step)
    _wrap(keras.Model, "fit", _fit)
    _wrap(keras.Model, "train_on_batch", _train_on_batch)
    # On the class that defines it: Keras takes a model with another `compile` for a custom one.
    _wrap(model_internals.compile_owner(), "compile", _compile)
    _wrap(keras.Operation, "__call__", _call)
    _wrap(keras.Layer, "set_weights", _set_weights)
    _wrap(keras.Model, "set_state_tree", _set_state_tree)
    for quantized in (keras.Model, *layer_internals.QUANTIZED):
        _wrap(quantized, "quantize", _quantize)
    _wrap(*saving_internals.LOOKING_UP, _registered_object)
    _wrap(*saving_internals.LOADING, _load_state)
    for module, name in saving_internals.LOADING_HDF5:
        _wrap(module, name, _load_hdf5)
    _wrap(*saving_internals.LOADING_HDF5_MODEL, _load_hdf5_model)
    _wrap(*saving_internals.SAVING_HDF5_MODEL, _save_hdf5_model)
    for module, name in model_internals.LOSS_SCALINGS:
        _wrap(module, name, _scaling)
    _wrap(*model_internals.LABELLED_LOSS, _labelled)
    for module, name in layer_internals.DRAWS:
        _wrap(module, name, _drawing)
    _wrap(*layer_internals.DROPPING, _dropping)
    for name, still in layer_internals.STILL.items():
        _wrap(layer_internals.RANDOM, name, functools.partial(_still, still))
    _wrap(*layer_internals.TAKING, _taking)


def uninstall():
    """Gives Keras its own methods and functions back. Does nothing if not installed."""
    while _installed:
        owner, name, original = _installed.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def is_installed():
    """Whether the wrappers are in place."""
    return bool(_installed)


def watch_weights(loaded, changed, put, replaced):
    """Says whom to tell where the values of weights come from, of all models.

    Args:
        loaded: Function of a model or layer that has loaded a file, and the arrays, a dict by name,
            of the optimizer's state in the file, whatever the model's optimizer; None without one.
        changed: Function of a model or layer, and a list of the `keras.Variable`s of it that have
            other values from elsewhere.
        put: Function of a layer and the arrays that its `set_weights` took.
        replaced: Function of the lists of a model's or layer's `keras.Variable`s before and after
            some were replaced by others that follow from them.
    """
    vars(_watch).update(loaded=loaded, changed=changed, put=put, replaced=replaced)


def _watching():
    """What `watch_weights` was given."""
    if not vars(_watch):
        _load[0]()
    return _watch


def _wrap(owner, name, make):
    """Replaces `owner.name` by `make` of it."""
    original = getattr(owner, name)
    _installed.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, functools.wraps(original)(make(original)))


def _method(model, name):
    """The method of the model's optimizer of this name, or None."""
    optimizer = model_internals.innermost(getattr(model, "optimizer", None))
    return getattr(optimizer, name, None)


def _train_step(original):
    def train_step(self, data):
        private_step = _method(self, "private_train_step")
        return original(self, data) if private_step is None else private_step(self, data)

    return train_step


def _fit(original):
    def fit(self, x=None, *args, **kwargs):
        fitting = _method(self, "fitting")
        if fitting is None:
            with _changing_weights_of(self):
                return original(self, x, *args, **kwargs)
        more = {name: kwargs.pop(name) for name in _method(self, "fit_arguments") if name in kwargs}
        given = inspect.signature(original).bind(self, x, *args, **kwargs)
        given.arguments.update(more)
        named = {name: value for name, value in given.arguments.items() if name != "self"}
        with step_context.driving(self, "keras"), fitting(self, named) as arguments:
            return original(self, **arguments)

    return fit


def _train_on_batch(original):
    def train_on_batch(self, x, y=None, sample_weight=None, class_weight=None, *args, **kwargs):
        unplanned_step = _method(self, "unplanned_step")
        if unplanned_step is None:
            with _changing_weights_of(self):
                return original(self, x, y, sample_weight, class_weight, *args, **kwargs)
        shape = getattr(next(iter(tf.nest.flatten(x)), None), "shape", None)
        with unplanned_step(self, shape[0] if shape else None, sample_weight, class_weight):
            return original(self, x, y, sample_weight, None, *args, **kwargs)

    return train_on_batch


def _compile(original):
    def compile(self, *args, **kwargs):
        original(self, *args, **kwargs)
        compiled = _method(self, "compiled")
        if compiled is not None:
            owner = hub_internals.preprocessing_class(self)
            if owner is not None and (owner, "fit") not in [each[:2] for each in _installed]:
                _wrap(owner, "fit", functools.partial(_fit_preprocessed, owner))
            compiled(self)
            for layer in layer_internals.flatten_layers(self):
                _follow_quantize(layer)

    return compile


def _fit_preprocessed(owner, original):
    def fit(self, *args, **kwargs):
        if _method(self, "fitting") is None:
            return original(self, *args, **kwargs)
        arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
        arguments.update(arguments.pop("kwargs", {}))
        if not hub_internals.preprocess(arguments.pop("self"), arguments):
            return original(self, *args, **kwargs)
        return super(owner, self).fit(**arguments)

    return fit


def _call(original):
    def call(self, *args, **kwargs):
        recorder = step_context.recorder()
        if recorder is None:
            return layer_internals.call_operation(self, args, kwargs)
        return recorder.observe(self, args, kwargs)

    return call


def _registered_object(original):
    def get_registered_object(name, *args, **kwargs):
        registered = original(name, *args, **kwargs)
        if registered is None and str(name).startswith("tfdpx>"):
            _load[0]()
            registered = original(name, *args, **kwargs)
        return registered

    return get_registered_object


def _load_state(original):
    def load_state(saveable, weights_store, assets_store, inner_path, *args, **kwargs):
        original(saveable, weights_store, assets_store, inner_path, *args, **kwargs)
        if inner_path == "" and isinstance(saveable, keras.Layer) and weights_store:
            _watching().loaded(saveable, saving_internals.saved_optimizer(weights_store))

    return load_state


def _load_hdf5(original):
    def load(group, model, *args, **kwargs):
        try:
            return original(group, model, *args, **kwargs)
        finally:
            _watching().changed(model, model.weights)

    return load


def _load_hdf5_model(original):
    def load(*args, **kwargs):
        model = original(*args, **kwargs)
        _refuse_hdf5(model)
        return model

    return load


def _save_hdf5_model(original):
    def save(model, *args, **kwargs):
        _refuse_hdf5(model)
        return original(model, *args, **kwargs)

    return save


def _refuse_hdf5(model):
    refuse = _method(model, "refuse_hdf5")
    if refuse is not None:
        refuse()


@contextlib.contextmanager
def _changing_weights_of(model):
    """Around a training whose data nobody accounts for."""
    try:
        yield
    finally:
        _watching().changed(model, model.trainable_variables)


def _set_state_tree(original):
    def set_state_tree(self, state_tree):
        try:
            original(self, state_tree)
        finally:
            _watching().changed(self, self.weights)

    return set_state_tree


def _quantize(original):
    def quantize(self, *args, **kwargs):
        old = list(self.weights)
        try:
            original(self, *args, **kwargs)
        finally:
            _watching().replaced(old, self.weights)

    quantize.is_followed = True
    return quantize


def _follow_quantize(layer):
    """Wraps the `quantize` that Keras took when it made the layer, maybe before `install`."""
    quantize = layer.quantize
    if not getattr(quantize, "is_followed", False):
        followed = _quantize(lambda self, *args, **kwargs: quantize(*args, **kwargs))
        layer.quantize = types.MethodType(followed, layer)


def _set_weights(original):
    def set_weights(self, weights):
        try:
            original(self, weights)
        except Exception:  # Some may have been set.
            _watching().changed(self, self.weights)
            raise
        _watching().put(self, weights)

    return set_weights


def _scaling(original):
    def scaled(value):
        return value if step_context.is_unscaled() else original(value)

    return scaled


def _drawing(original):
    def draw(shape, *args, **kwargs):
        return layer_internals.draw(original, shape, args, kwargs)

    return draw


def _dropping(original):
    def drop(inputs, *args, **kwargs):
        return inputs if step_context.is_rng_frozen() else original(inputs, *args, **kwargs)

    return drop


def _still(still, original):
    def draw(*args, **kwargs):
        return (still if step_context.is_rng_frozen() else original)(*args, **kwargs)

    return draw


def _labelled(original):
    def labelled(target, output, from_logits=False, axis=-1):
        if not step_context.is_unscaled():
            return original(target, output, from_logits=from_logits, axis=axis)
        target = tf.convert_to_tensor(target)
        # In a wide type: bytes cannot say that there are 256 classes.
        label = tf.cast(target, "int64" if target.dtype.is_integer else "float32")
        valid = (label >= 0) & (label < tf.cast(tf.shape(output)[axis], label.dtype))  # No NaN is.
        target = tf.where(valid, target, tf.zeros_like(target))
        losses = original(target, output, from_logits=from_logits, axis=axis)
        ones = tf.where(valid, tf.ones([], losses.dtype), float("nan"))
        # A product, so that the gradient is NaN as well.
        return losses * tf.reshape(ones, tf.shape(losses))

    return labelled


def _taking(original):
    def take(x, indices, axis=None):
        is_index = tf.is_tensor(indices) and indices.dtype.is_integer
        if not (step_context.is_masking_invalid() and is_index and hasattr(x, "dtype")):
            return original(x, indices, axis=axis)
        if not tf.as_dtype(x.dtype).is_floating:
            return original(x, indices, axis=axis)
        shape = tf.shape(x)
        length = tf.cast(tf.reduce_prod(shape) if axis is None else shape[axis], "int64")
        wide = tf.cast(indices, "int64")
        valid = (wide >= -length) & (wide < length)
        entries = original(x, tf.where(valid, indices, tf.zeros_like(indices)), axis=axis)
        place = 0 if axis is None else axis % len(x.shape)
        behind = entries.shape.rank - place - indices.shape.rank
        ones = tf.where(valid, tf.ones([], entries.dtype), float("nan"))
        # A product, so that the gradient is NaN as well.
        return entries * ones[(..., *[tf.newaxis] * behind)]

    return take
