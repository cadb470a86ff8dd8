"""Wraps the methods of Keras that private training needs, and restores them.

Keras passes finished gradients to an optimizer, but neither the model nor the batch. No extension
point of Keras passes these two, so we wrap the following methods:

- `keras.Model.train_step`: if the optimizer defines `private_train_step(model, data)`, that method
  makes the step. Other optimizers train as before. A model class with another `train_step` bypasses
  this wrapper, and the optimizer then refuses the gradients.
- `keras.Model.fit`: if the optimizer defines a context manager `fitting(model, arguments)`, `fit`
  runs within it. The context manager may refuse the call. It takes the arguments that the
  optimizer's `fit_arguments` names, records the data, and yields the arguments for Keras. Within
  `fit`, `step_context.driver` tells the step that Keras has split the batch over replicas.
- `keras.Model.train_on_batch`: if the optimizer defines a context manager `unplanned_step(model,
  rows, sample_weight, class_weight)`, the call runs within it. The context manager accounts for
  batches that no plan drew.
- `keras.Model.compile`: if the optimizer defines `compiled(model)`, that method is called after
  `compile`.
- The `fit` of KerasHub's models: this `fit` passes a data set of preprocessed batches to Keras, but
  a plan draws from arrays. It is wrapped when such a model is compiled with a private optimizer.
- Functions that set the values of variables: initializers, loading of files, `set_weights`,
  `quantize`, and `fit`, `train_on_batch` and `apply` with other optimizers. `origins` and the
  functions of `watch_weights` record where the values come from.
- Saving and loading of whole models as HDF5: refused if the optimizer defines `refuse_hdf5()`.
- The look-up of registered classes: all modules of tfdpx are imported when Keras first looks for
  "tfdpx>...", for example in a file.
- Keras's scaling of losses by the number of replicas: left out within
  `model_internals.compute_loss`.
- Keras's cross-entropy of labels: in the private step an invalid label makes the loss of its
  example NaN, so the example counts as zero. Without this, TensorFlow ends the run on CPUs.
- Keras's `ops.take`, which `Embedding` uses: in the private step an entry at an index out of range
  is NaN, for the same reason.
- Keras's random numbers: all rows get the same ones while two forward passes are compared.
- TensorFlow's converters for `tf.vectorized_map`, and its stateful random draws: these change only
  within the private step.
- `keras.Operation.__call__`: if a recorder is active in this thread, the recorder sees every call
  of every layer. Otherwise the wrapper only adds an attribute look-up.

`install()` runs as soon as both tfdpx and Keras are imported. `uninstall()` restores all methods.
"""

import functools
import inspect
import types

import keras
import tensorflow as tf

from tfdpx._keras import (
    hub_internals,
    layer_internals,
    model_internals,
    origins,
    saving_internals,
    step_context,
    tensorflow_internals,
)

_installed = []  # (owner, name, original value, or None if it was inherited)
_load = [lambda: None]  # Imports the modules of `install`; called when Keras first needs them.
_watch = types.SimpleNamespace()


def install(load=None):
    """Wraps the methods that the module's docstring lists, unless they are wrapped already.

    Args:
        load: Function without arguments. It imports every module that registers a class with Keras
            or calls `watch_weights`. If None, the function of an earlier call stays in use.
    """
    if load is not None:
        _load[:] = [load]
    if _installed:
        return
    _wrap(keras.Model, "train_step", _train_step)
    _wrap(keras.Model, "fit", _fit)
    _wrap(keras.Model, "train_on_batch", _train_on_batch)
    # The class that defines `compile` is wrapped: Keras treats a model with another `compile` as
    # custom.
    _wrap(model_internals.compile_owner(), "compile", _compile)
    _wrap(keras.Operation, "__call__", _call)
    _wrap(*layer_internals.FILLING, _fill)
    _wrap(*layer_internals.RESTORING, _restore)
    _wrap(*model_internals.APPLYING, _apply)
    _wrap(keras.Layer, "set_weights", _set_weights)
    _wrap(keras.Model, "set_state_tree", _set_state_tree)
    for quantized in (keras.Model, *layer_internals.QUANTIZED):
        _wrap(quantized, "quantize", _quantize)
    _wrap(*saving_internals.LOOKING_UP, _registered_object)
    _wrap(*saving_internals.LOADING, _load_state)
    for module, name in saving_internals.LOADING_HDF5:
        _wrap(module, name, _load_hdf5)
    _wrap(*saving_internals.LOADING_HDF5_MODEL, _convert_hdf5)
    _wrap(*saving_internals.SAVING_HDF5_MODEL, _convert_hdf5)
    for module, name in model_internals.LOSS_SCALINGS:
        _wrap(module, name, _scaling)
    _wrap(*model_internals.LABELLED_LOSS, _labelled)
    for module, name in layer_internals.DRAWS:
        _wrap(module, name, _drawing)
    _wrap(*layer_internals.DROPPING, _dropping)
    for name, still in layer_internals.STILL.items():
        _wrap(layer_internals.RANDOM, name, functools.partial(_still, still))
    _wrap(*layer_internals.TAKING, _taking)
    for owner, name, make in tensorflow_internals.REPLACED:
        _wrap(owner, name, make)


def uninstall():
    """Restores the methods and functions of Keras and TensorFlow, if they are wrapped."""
    while _installed:
        owner, name, original = _installed.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def is_installed():
    """Returns whether the wrappers are in place."""
    return bool(_installed)


def watch_weights(on_load, on_set_weights, on_replace):
    """Sets the functions that record where the values of weights come from, for all models.

    Args:
        on_load: Function `on_load(layer, arrays)`, called before a model or layer loads a file.
            `arrays` is the optimizer's state in the file, a dict by name; None if the file has no
            optimizer. `on_load` returns a function, which is called after loading with the list of
            weights that a ledger in the file accounts for.
        on_set_weights: Function `on_set_weights(layer, arrays)`, called before
            `layer.set_weights(arrays)`.
        on_replace: Function `on_replace(before, after)` of two lists of `keras.Variable`s, called
            after a model or layer has replaced its variables `before` by variables `after`. The
            values of `after` were computed from `before`.
    """
    vars(_watch).update(on_load=on_load, on_set_weights=on_set_weights, on_replace=on_replace)


def _listeners():
    """Returns the functions set by `watch_weights`."""
    if not vars(_watch):
        _load[0]()
    return _watch


def _wrap(owner, name, make):
    """Replaces `owner.name` by `make(original)`."""
    original = getattr(owner, name)
    _installed.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, functools.wraps(original)(make(original)))


def _method(model, name):
    """Returns the method `name` of the model's innermost optimizer; None if it has none."""
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
            with origins.changing(self):
                return original(self, x, *args, **kwargs)
        more = {name: kwargs.pop(name) for name in _method(self, "fit_arguments") if name in kwargs}
        bound = inspect.signature(original).bind(self, x, *args, **kwargs)
        bound.arguments.update(more)
        named = {name: value for name, value in bound.arguments.items() if name != "self"}
        with step_context.driving(self, "keras"), fitting(self, named) as arguments:
            return original(self, **arguments)

    return fit


def _train_on_batch(original):
    def train_on_batch(self, x, y=None, sample_weight=None, class_weight=None, *args, **kwargs):
        unplanned_step = _method(self, "unplanned_step")
        if unplanned_step is None:
            with origins.changing(self, is_fit=False):
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
            if owner is not None and (owner, "fit") not in [entry[:2] for entry in _installed]:
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
        if inner_path or not (isinstance(saveable, keras.Layer) and weights_store):
            return original(saveable, weights_store, assets_store, inner_path, *args, **kwargs)
        arrays = saving_internals.saved_optimizer(weights_store)
        loaded = _listeners().on_load(saveable, arrays)  # May refuse the file.
        weights = saving_internals.weights_to_load(saveable, kwargs.get("visited_saveables"))
        known = origins.mark_unknown(weights)
        original(saveable, weights_store, assets_store, inner_path, *args, **kwargs)
        loaded(known if kwargs.get("error_msgs") else weights)

    return load_state


def _load_hdf5(original):
    def load(group, model, *args, **kwargs):
        origins.mark_unknown(model.weights)
        return original(group, model, *args, **kwargs)

    return load


def _convert_hdf5(original):
    def convert(source, *args, **kwargs):
        # One of the two is a model: the source if it is saved, the result if it is loaded.
        return _refuse_hdf5(original(_refuse_hdf5(source), *args, **kwargs))

    return convert


def _refuse_hdf5(model):
    refuse = _method(model, "refuse_hdf5")
    if refuse is not None:
        refuse()
    return model


def _fill(original):
    def initialize(self, initializer):
        original(self, initializer)
        mark = origins.mark_of(self)
        mark.is_known = mark.is_initialized = origins.holds_no_data(initializer)

    return initialize


def _restore(original):
    def restore_from_tensors(self, *args, **kwargs):
        mark, restore = origins.mark_of(self), layer_internals.checkpoint_of(self)
        mark.is_initialized = False
        # The ledger in the same checkpoint is restored before the variables.
        mark.is_known = any(account.restored == restore for account in mark.followers)
        return original(self, *args, **kwargs)

    return restore_from_tensors


def _apply(original):
    def apply(self, grads, trainable_variables=None):
        # The variables may come from a generator, which can be read only once.
        trainable_variables = trainable_variables and list(trainable_variables)
        if not hasattr(self, "private_train_step"):
            origins.mark_unknown(trainable_variables or getattr(self, "_trainable_variables", ()))
        return original(self, grads, trainable_variables)

    return apply


def _set_state_tree(original):
    def set_state_tree(self, state_tree):
        origins.mark_unknown(self.weights)
        original(self, state_tree)

    return set_state_tree


def _quantize(original):
    def quantize(self, *args, **kwargs):
        old = list(self.weights)
        try:
            original(self, *args, **kwargs)
        finally:
            _listeners().on_replace(old, self.weights)

    quantize.is_followed = True
    return quantize


def _follow_quantize(layer):
    """Wraps the method `quantize` of a layer, also if the layer was made before `install`."""
    quantize = layer.quantize
    if not getattr(quantize, "is_followed", False):
        followed = _quantize(lambda self, *args, **kwargs: quantize(*args, **kwargs))
        layer.quantize = types.MethodType(followed, layer)


def _set_weights(original):
    def set_weights(self, weights):
        _listeners().on_set_weights(self, weights)
        original(self, weights)

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
        # Compare in a wide type: bytes cannot represent the number 256.
        label = tf.cast(target, "int64" if target.dtype.is_integer else "float32")
        # Both comparisons are False for NaN.
        valid = (label >= 0) & (label < tf.cast(tf.shape(output)[axis], label.dtype))
        target = tf.where(valid, target, tf.zeros_like(target))
        losses = original(target, output, from_logits=from_logits, axis=axis)
        ones = tf.where(valid, tf.ones([], losses.dtype), float("nan"))
        # As a factor, NaN makes the gradient NaN too.
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
        # As a factor, NaN makes the gradient NaN too.
        return entries * ones[(..., *[tf.newaxis] * behind)]

    return take
