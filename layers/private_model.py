"""Turns a compiled Keras model into a model that trains well under differential privacy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras

from tfdpx._arguments import check_choice, check_positive_integer, refuse_elsewhere, require
from tfdpx._keras import layer_internals, model_internals
from tfdpx.account import copy_weights
from tfdpx.accounting import PrivacyPlan
from tfdpx.layers.blocks import GroupNorm
from tfdpx.layers.few_weights import last_layer
from tfdpx.suggestion import ADAM, SGD, batch_and_steps, suggest, trained_before
from tfdpx.training.optimizers import make_private

# The changes that `make_private_model` may make, by name.
CHANGES = {
    "group_norm": "GroupNorm for BatchNormalization",
    "pool": "averages of 3 x 3 regions, flattened, for a global average",
    "tanh": "tanh for ReLU",
}
_GRID = 3
# Layers that are allowed between a global average and the last layer, for the change "pool".
_BETWEEN: tuple[type, ...] = (
    keras.layers.Dropout,
    keras.layers.Flatten,
    keras.layers.Activation,
    keras.layers.Softmax,
    keras.layers.ReLU,
)
_OPTIMIZERS = keras.optimizers
_KINDS = {_OPTIMIZERS.SGD: SGD, _OPTIMIZERS.Adam: ADAM, _OPTIMIZERS.AdamW: ADAM}
# Arguments of Keras's optimizers that a private optimizer does not accept.
_DROPPED = ("clipnorm", "clipvalue", "global_clipnorm", "gradient_accumulation_steps")


def make_private_model(
    model: keras.Model,
    *,
    num_examples: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    l2_norm_clip: Any = None,
    learning_rate: Any = None,
    accountant: str = "pld",
    groups: int = 16,
    without: Iterable[str] = (),
    **arguments: Any,
) -> tuple[keras.Model, PrivacyPlan]:
    """Returns a private copy of a compiled model, and the plan for its training.

    The copy has the same loss and metrics, and the private variant of the optimizer. For example,
    `tfdpx.DPAdam` replaces `keras.optimizers.Adam` and has the same arguments. Train the copy by
    `model.fit(x, y, epochs=math.ceil(plan.epochs))`. The weights of `model` must be new or public:
    weights that were trained on the private data already reveal these data.

    A network that trains well without noise may train badly with noise. The function therefore
    changes the copy, and prints the name of each change. If you do not want a change, pass its name
    in `without`.

    - `"group_norm"`: each `BatchNormalization` becomes a `GroupNorm`
      (`tfdpx.layers.replace_batch_norm`).

    Two more changes are only for networks with convolutions that were not trained before:

    - `"pool"`: the network averages the last feature map over each of 3 x 3 regions, instead of
      averaging it over all positions.
    - `"tanh"`: tanh replaces ReLU if the network has no normalization.

    docs/own_code.md shows how much each change improves the accuracy. If there is nothing to
    change, the function compiles the model itself again and returns it. For arguments that you
    leave out, it uses the values from `tfdpx.suggest`, and prints how well the training will
    probably work (in the example, the line that begins with "Good"). The trained model has the
    moving average of the weights, unless you pass `use_ema=False`.

    Guarantee: the same as for `tfdpx.PrivacyPlan`.

    Args:
        model: A compiled `keras.Model`. Only a built Functional or Sequential model gets changes.
        num_examples: Int. Number of private examples. The guarantee does not hide this number.
        delta: Float in (0, 1), well below 1/num_examples.
        epsilon: Float. The privacy budget, from which the noise is computed.
        noise_multiplier: Float. The noise multiplier, instead of `epsilon`.
        epochs: Float. The average number of times that each example is drawn.
        steps: Int. Number of model updates, instead of `epochs`.
        batch_size: Int. Expected number of examples per update.
        l2_norm_clip: As for `tfdpx.DPSGD`, the norm to which gradients are clipped.
        learning_rate: Optional float or schedule. The default for SGD, Adam and AdamW comes from
            `tfdpx.suggest`. If the optimizer of `model` is another one or has a schedule, the
            default is its learning rate. Gradients are divided by `l2_norm_clip`, so a learning
            rate for ordinary training is seldom right.
        accountant: As for `tfdpx.PrivacyPlan`.
        groups: As for `tfdpx.layers.replace_batch_norm`.
        without: Strings, the names of changes to leave out.
        **arguments: Further arguments of `tfdpx.DPSGD`, for example `augment`, `augmult` and
            `microbatch_size`.

    Returns:
        `(model, plan)`: a compiled `keras.Model` and its `tfdpx.PrivacyPlan`.

    Raises:
        TypeError: If the optimizer has no private variant.
        ValueError: If the model is not compiled, or an argument is out of range.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    >>> model.add(keras.layers.BatchNormalization())
    >>> model.compile("adam", "mse")
    >>> private, plan = make_private_model(
    ...     model, num_examples=1000, epsilon=3.0, delta=1e-5, epochs=2, batch_size=100
    ... )
    Changed: GroupNorm for BatchNormalization ("group_norm").
    Good: 1,000 examples at epsilon 3 can train 21 weights.
    Learning rate: 0.034, by tfdpx.suggest.
    >>> private.layers[-1].__class__.__name__, private.optimizer.name, plan.steps
    ('GroupNorm', 'dp_adam', 20)
    """
    refuse_elsewhere("make_private_model", arguments)
    require(isinstance(model, keras.Model), "model", model, "be a keras.Model")
    must = "be compiled, because its optimizer, loss and metrics become private"
    require(model.compiled, "model", model, must, " Call `model.compile(...)` first.")
    check_positive_integer("num_examples", num_examples)
    without = (without,) if isinstance(without, str) else tuple(without)
    for name in without:
        check_choice("without", name, tuple(CHANGES))
    names = [name for name in _changes_of(model) if name not in without]
    twin = model
    if names:
        with model_internals.taken_for_uncompiled(model):
            twin = _clone(model, names, groups)
    for name in names:
        print(f'Changed: {CHANGES[name]} ("{name}").')
    size, updates = batch_and_steps(num_examples)
    if steps is epochs is None and None in (epsilon, noise_multiplier):
        steps = updates
    plan = PrivacyPlan(
        num_examples,
        batch_size=size if batch_size is None else batch_size,
        steps=steps,
        epochs=epochs,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
    )
    optimizer = _private_optimizer(model, twin, learning_rate, plan, l2_norm_clip, arguments)
    compiled = model_internals.compile_arguments(model)
    for name in ("metrics", "weighted_metrics"):
        compiled[name] = keras.tree.map_structure(_reset_metric, compiled[name])
    twin.compile(**{**compiled, "optimizer": optimizer})
    return twin, plan


def _reset_metric(metric):
    """Returns a new metric with the same arguments. A name or a function is returned unchanged."""
    is_object = isinstance(metric, keras.metrics.Metric)
    return type(metric).from_config(metric.get_config()) if is_object else metric


def _changes_of(model):
    """Returns a list of the names of changes that are possible and useful for a model."""
    layers = layer_internals.flatten_layers(model)
    names = ["group_norm"] if batch_norms(model) else []
    is_frozen = any(layer_internals.own_weights(x) and not x.trainable for x in layers)
    has_convolution = any(type(layer) is keras.layers.Conv2D for layer in layers)
    if is_frozen or not has_convolution or trained_before(model):
        return names
    if model_internals.plain_graph(model) is None or len(model.outputs) != 1:
        return names
    if _pool_of(model) is not None:
        names.append("pool")
    has_norm = any("Norm" in type(x).__name__ and x.trainable_variables for x in layers[1:])
    return names if has_norm or not any(map(_is_relu, _hidden(model))) else [*names, "tanh"]


def _hidden(model):
    """Returns a list of a model's layers before `last_layer(model)`."""
    head = last_layer(model)
    layers = layer_internals.flatten_layers(model)
    return layers[: next(i for i, layer in enumerate(layers) if layer is head)]


def _is_relu(layer):
    kind = type(layer)
    if kind is keras.layers.ReLU:
        return layer.max_value is None and not (layer.negative_slope or layer.threshold)
    has_activation = kind in (keras.layers.Activation, keras.layers.Conv2D, keras.layers.Dense)
    return has_activation and layer.activation is keras.activations.relu


def _pool_of(model):
    """Returns the global average pooling before a model's dense last layer.

    Returns:
        The pooling layer. None if there is no such layer or if it cannot be replaced, for example
        because two layers read its output.
    """
    tensor, head = model.outputs[0], None
    while True:
        layer, inputs = layer_internals.made_by(tensor)
        if head is not None and type(layer) is keras.layers.GlobalAveragePooling2D:
            is_plain = not layer.keepdims and layer.data_format == "channels_last"
            has_sizes = all(inputs[0].shape[1:])
            is_read_once = layer_internals.count_calls_of_output(layer) == 1
            return layer if is_plain and has_sizes and is_read_once else None
        if head is None and type(layer) is keras.layers.Dense:
            head = layer
        elif not isinstance(layer, _BETWEEN):
            return None
        tensor = inputs[0]


def _private_optimizer(model, twin, learning_rate, plan, l2_norm_clip, arguments):
    """Returns the private variant of the optimizer of `model`, with a new state.

    Args:
        model: The user's compiled `keras.Model`.
        twin: The model that will be trained: a changed copy of `model`, or `model` itself.
        learning_rate: As for `make_private_model`.
        plan: A `tfdpx.PrivacyPlan`.
        l2_norm_clip: As for `make_private_model`.
        arguments: Dict of further arguments for the private optimizer.
    """
    inner = model_internals.innermost(model.optimizer)
    if hasattr(inner, "private_train_step"):
        raise ValueError(
            f"Argument `model` is private already: its optimizer is {type(inner).__name__}. "
            "Compile it with another plan by `model.compile(tfdpx.DPSGD(..., plan=plan), ...)`."
        )
    config = inner.get_config()
    refused = [name for name in _DROPPED if config.pop(name, None) is not None]
    if refused:
        raise ValueError(
            f"The optimizer of `model` has {', '.join(refused)}, which would change the privacy "
            "mechanism. Compile `model` without them, and pass `l2_norm_clip`."
        )
    for name in ("name", "is_legacy_optimizer", "jit_compile", "loss_scale_factor"):
        config.pop(name, None)
    rate, kind = config["learning_rate"], _KINDS.get(type(inner))
    if isinstance(rate, dict):
        rate = keras.saving.deserialize_keras_object(rate)
    if twin.built and twin.trainable_variables:
        suggestion = suggest(plan, twin, kind or SGD)
        print(suggestion.advice)
        if kind and isinstance(rate, float) and learning_rate is None:
            learning_rate = suggestion.learning_rate * (1 - config.get("momentum", 0.0))
            print(f"Learning rate: {learning_rate:.2g}, by tfdpx.suggest.")
        if not config["use_ema"]:
            config |= {"use_ema": True, "ema_momentum": suggestion.ema_momentum}
        l2_norm_clip = suggestion.l2_norm_clip if l2_norm_clip is None else l2_norm_clip
    else:
        print("The model is not built, so nothing is suggested: give it a keras.Input.")
    config["learning_rate"] = rate if learning_rate is None else learning_rate
    clip = 1.0 if l2_norm_clip is None else l2_norm_clip
    return make_private(type(inner))(plan=plan, l2_norm_clip=clip, **{**config, **arguments})


def replace_batch_norm(model: keras.Model, groups: int = 16) -> keras.Model:
    """Returns a clone of a model with a `GroupNorm` in place of each `BatchNormalization`.

    Batch normalization computes statistics over the examples of a batch. So the gradient of an
    example depends on other examples, which makes DP-SGD impossible. The `GroupNorm` has the same
    name, `axis`, `epsilon`, `center`, `scale`, initializers, regularizers, constraints and
    `trainable` as the layer that it replaces. Its number of groups is the largest number up to
    `groups` that divides the number of channels.

    All weights are copied, including `gamma` and `beta` of the replaced layers. But `GroupNorm` has
    no moving statistics, so the outputs of the clone differ from those of `model`, and the clone
    must be trained or fine-tuned. `GroupNorm` ignores masks: it also normalizes masked positions.

    Args:
        model: A built Functional or Sequential `keras.Model`, which does not change. Functional and
            Sequential models inside it are cloned, too.
        groups: Positive integer, the largest number of groups that a layer may have. De et al.
            (2022) use 16 in all layers.

    Returns:
        A `keras.Model` with separate weights. If `model` is compiled, the clone is compiled in the
        same way.

    Raises:
        ValueError: If `groups` is not a positive integer, if `model` is a subclassed model or not
            built, or if a layer of another class contains a `BatchNormalization`.
    """
    return _clone(model, ("group_norm",), groups)


def _clone(model, changes, groups):
    """Returns a clone of a model to which `changes` are applied.

    Args:
        model: A built Functional or Sequential `keras.Model`.
        changes: Names from `CHANGES`, changes that are possible for this model.
        groups: As for `replace_batch_norm`.
    """
    check_positive_integer("groups", groups, " Use 16.")
    if not isinstance(model, keras.Sequential) and not hasattr(model, "inputs"):
        raise ValueError(
            "Argument `model` must be a Functional or Sequential keras.Model, because only those "
            f"can be cloned layer by layer. Received: model={model!r}. Write "
            "tfdpx.layers.GroupNorm(16) for keras.layers.BatchNormalization() in the code of the "
            "model, or build the model with the functional API."
        )
    pool = _pool_of(model) if "pool" in changes else None
    bounded = [x for x in _hidden(model) if _is_relu(x)] if "tanh" in changes else []
    head = None if pool is None else last_layer(model)
    counterparts = []

    def clone_layer(layer):
        config = layer.get_config()
        if isinstance(layer, keras.layers.BatchNormalization) and "group_norm" in changes:
            clone = _group_norm_like(layer, groups)
        elif layer is pool:
            clone = _pool_of_regions(layer)
        elif any(layer is x for x in bounded):
            is_relu = type(layer) is keras.layers.ReLU
            kind = keras.layers.Activation if is_relu else type(layer)
            config = {k: config[k] for k in ("name", "dtype")} if is_relu else config
            clone = kind.from_config({**config, "activation": "tanh"})
        else:
            if "group_norm" in changes:
                _refuse_hidden_batch_norm(layer)
            clone = layer.__class__.from_config(config)
        counterparts.append((layer, clone))
        return clone

    # For a Sequential model, whose layers have no call arguments, `clone_model` accepts no call
    # function.
    call_function = None if isinstance(model, keras.Sequential) else _call_without_mask
    new_model = keras.models.clone_model(
        model, clone_function=clone_layer, call_function=call_function, recursive=True
    )
    for layer, clone in counterparts:
        if layer is not head and layer is not pool:
            _copy_weights(layer, clone)
    return new_model


def _pool_of_regions(layer):
    """Returns a model that averages over `_GRID x _GRID` regions, to replace a global average."""
    grid = [math.ceil(size / _GRID) for size in layer.input.shape[1:3]]
    pool = keras.layers.AveragePooling2D(grid, padding="same", dtype=layer.dtype_policy)
    flatten = keras.layers.Flatten(dtype=layer.dtype_policy)
    return keras.Sequential([pool, flatten], name=layer.name)


def batch_norms(layer):
    """Returns a list of the `BatchNormalization` layers in `layer`, or `[layer]` if it is one."""
    layers = layer_internals.flatten_layers(layer)
    return [part for part in layers if isinstance(part, keras.layers.BatchNormalization)]


def _group_norm_like(layer, groups):
    """Returns a new `GroupNorm` that replaces a `BatchNormalization` layer. It is not built yet."""
    if not layer.built:
        raise ValueError(
            f"Argument `model` must be built: the channels of layer {layer.name!r} are not known. "
            "Give the model a keras.Input, or call model.build(input_shape) first."
        )
    channels = layer.moving_mean.shape[0]
    config = layer.get_config()
    shared = set(config) & set(GroupNorm().get_config())
    return GroupNorm.from_config(
        {key: config[key] for key in shared}
        | {"groups": max(g for g in range(1, groups + 1) if channels % g == 0)}
    )


def _call_without_mask(layer, *args, **kwargs):
    """Calls a layer and returns its outputs. Drops `mask` and `training` for a `GroupNorm`."""
    if isinstance(layer, GroupNorm):
        kwargs = {key: kwargs[key] for key in kwargs if key not in ("mask", "training")}
    return layer(*args, **kwargs)


def _refuse_hidden_batch_norm(layer):
    """Raises ValueError if a layer of another class contains a `BatchNormalization`."""
    hidden = batch_norms(layer) if isinstance(layer, keras.layers.Layer) else []
    if hidden:
        raise ValueError(
            f"Layer {layer.name!r} of class {layer.__class__.__name__} holds the "
            f"BatchNormalization {hidden[0].name!r}, which cannot be replaced from outside. Use "
            "tfdpx.layers.GroupNorm in the code of that layer."
        )


def _copy_weights(layer, clone):
    """Copies weights from a layer to its clone, except for weights that only one of them has."""
    if isinstance(clone, GroupNorm) and isinstance(layer, keras.layers.BatchNormalization):
        for name in ("gamma", "beta"):
            if getattr(layer, name) is not None:
                getattr(clone, name).assign(getattr(layer, name))
    elif isinstance(layer, keras.layers.Layer):
        copy_weights(layer, clone)
