"""Turns a Keras model into one that can be trained privately, or in few of its weights."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras

from tfdpx._arguments import check_choice, check_positive_integer, require
from tfdpx._keras import layer_internals, lora, model_internals
from tfdpx.account import copy_weights
from tfdpx.accounting import PrivacyPlan
from tfdpx.layers.blocks import GroupNorm
from tfdpx.training.optimizers import make_private

_BATCH_SIZE = 256
# Arguments of Keras's optimizers that a private one refuses.
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
    l2_norm_clip: Any = 1.0,
    learning_rate: Any = None,
    accountant: str = "pld",
    groups: int = 16,
    **arguments: Any,
) -> tuple[keras.Model, PrivacyPlan]:
    """Returns a private copy of a compiled model, and the plan for its training.

    The copy has the weights of `model`, a `GroupNorm` in place of each `BatchNormalization`
    (`tfdpx.layers.replace_batch_norm`), the same loss and metrics, and the private variant of its
    optimizer. For example, `keras.optimizers.Adam` becomes `tfdpx.DPAdam` with the same arguments.
    Train it by `model.fit(x, y, epochs=epochs)`. The weights must be new or public, because weights
    that were trained on the private data before reveal them already.

    Guarantee: the same as `tfdpx.PrivacyPlan`.

    Args:
        model: A compiled `keras.Model`; with batch normalization it must be Functional or
            Sequential, and built. Without it, `model` itself is compiled anew and returned.
        num_examples: Int. Number of private examples, which is public.
        delta: Float in (0, 1), well below 1/num_examples.
        epsilon: Float. The budget, from which the noise is computed.
        noise_multiplier: Float, instead of `epsilon`.
        epochs: Float. Passes over the data.
        steps: Int, model updates, instead of `epochs`.
        batch_size: Int. Expected examples per update. Defaults to 256, or to all if there are
            fewer.
        l2_norm_clip: As for `tfdpx.DPSGD`: the bound on each example's gradient.
        learning_rate: Optional float or schedule, instead of the optimizer's. Gradients are divided
            by `l2_norm_clip`, so a rate that suits ordinary SGD seldom suits here.
        accountant: As for `tfdpx.PrivacyPlan`.
        groups: As for `tfdpx.layers.replace_batch_norm`.
        **arguments: More arguments of `tfdpx.DPSGD`, for example `augment`, `augmult` and
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
    >>> private.layers[-1].__class__.__name__, private.optimizer.name, plan.steps
    ('GroupNorm', 'dp_adam', 20)
    """
    require(isinstance(model, keras.Model), "model", model, "be a keras.Model")
    must = "be compiled, because its optimizer, loss and metrics become private"
    require(model.compiled, "model", model, must, " Call `model.compile(...)` first.")
    if batch_size is None:
        batch_size = min(_BATCH_SIZE, num_examples)
    plan = PrivacyPlan(
        num_examples,
        batch_size=batch_size,
        steps=steps,
        epochs=epochs,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        delta=delta,
        accountant=accountant,
    )
    optimizer = _private_optimizer(model.optimizer, learning_rate, plan, l2_norm_clip, arguments)
    compiled = model_internals.compile_arguments(model)
    for name in ("metrics", "weighted_metrics"):
        compiled[name] = keras.tree.map_structure(_reset_metric, compiled[name])
    twin = replace_batch_norm(model, groups) if batch_norms(model) else model
    twin.compile(**{**compiled, "optimizer": optimizer})
    return twin, plan


def _reset_metric(metric):
    """Returns a metric without its measurements; names and functions stay the same."""
    is_object = isinstance(metric, keras.metrics.Metric)
    return type(metric).from_config(metric.get_config()) if is_object else metric


def _private_optimizer(optimizer, learning_rate, plan, l2_norm_clip, arguments):
    """Returns the private variant of a Keras optimizer, with its arguments, but a new state."""
    inner = model_internals.innermost(optimizer)
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
    rate = config["learning_rate"] if learning_rate is None else learning_rate
    if isinstance(rate, dict):
        rate = keras.saving.deserialize_keras_object(rate)
    config["learning_rate"] = rate
    private = make_private(type(inner))
    return private(plan=plan, l2_norm_clip=l2_norm_clip, **config, **arguments)


def replace_batch_norm(model: keras.Model, groups: int = 16) -> keras.Model:
    """Clones `model` with a `GroupNorm` in place of each `BatchNormalization`.

    Batch normalization computes statistics across examples, so no per-example gradient exists and
    DP-SGD does not apply. Each such layer becomes a `GroupNorm` with the same name, `axis`,
    `epsilon`, `center`, `scale`, initializers, regularizers, constraints and `trainable`. Its
    number of groups is the largest divisor of its channels that is at most `groups`.

    All weights are copied, including `gamma` and `beta` of the replaced layers; the moving
    statistics have no counterpart and are dropped. The clone therefore computes another function
    than `model` and has to be trained or fine-tuned. `GroupNorm` normalises masked positions too.

    Args:
        model: A built Functional or Sequential `keras.Model`. Functional and Sequential models
            nested in it are cloned too. It does not change.
        groups: Positive integer, the largest number of groups of any layer. De et al. (2022) use
            16 throughout.

    Returns:
        A `keras.Model` with separate weights, compiled like `model` if that was compiled.

    Raises:
        ValueError: If `groups` is not a positive integer, if `model` is a subclassed or an
            unbuilt model, or if a layer has a `BatchNormalization` inside.
    """
    check_positive_integer("groups", groups, " Use 16.")
    if not isinstance(model, keras.Sequential) and not hasattr(model, "inputs"):
        raise ValueError(
            "Argument `model` must be a Functional or Sequential keras.Model, because only those "
            f"can be cloned layer by layer. Received: model={model!r}. Write "
            "tfdpx.layers.GroupNorm(16) for keras.layers.BatchNormalization() in the code of the "
            "model, or build the model with the functional API."
        )
    counterparts = []

    def clone_layer(layer):
        if isinstance(layer, keras.layers.BatchNormalization):
            clone = _group_norm_like(layer, groups)
        else:
            _refuse_hidden_batch_norm(layer)
            clone = layer.__class__.from_config(layer.get_config())
        counterparts.append((layer, clone))
        return clone

    # A Sequential model records no call arguments, and clone_model refuses the function for it.
    call_function = None if isinstance(model, keras.Sequential) else _call_without_mask
    new_model = keras.models.clone_model(
        model, clone_function=clone_layer, call_function=call_function, recursive=True
    )
    for layer, clone in counterparts:
        _copy_weights(layer, clone)
    return new_model


def batch_norms(layer):
    """Returns the `BatchNormalization` layers in a model or layer, or the layer itself, a list."""
    layers = layer_internals.flatten_layers(layer)
    return [part for part in layers if isinstance(part, keras.layers.BatchNormalization)]


def _group_norm_like(layer, groups):
    """Returns the unbuilt `GroupNorm` that replaces the BatchNormalization `layer`."""
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
    """Calls `layer` like its counterpart, without the arguments that `GroupNorm` does not take."""
    if isinstance(layer, GroupNorm):
        kwargs = {key: kwargs[key] for key in kwargs if key not in ("mask", "training")}
    return layer(*args, **kwargs)


def _refuse_hidden_batch_norm(layer):
    """Raises ValueError if `layer` is not a BatchNormalization but has one inside."""
    hidden = batch_norms(layer) if isinstance(layer, keras.layers.Layer) else []
    if hidden:
        raise ValueError(
            f"Layer {layer.name!r} of class {layer.__class__.__name__} holds the "
            f"BatchNormalization {hidden[0].name!r}, which cannot be replaced from outside. Use "
            "tfdpx.layers.GroupNorm in the code of that layer."
        )


def _copy_weights(layer, clone):
    """Copies every weight of `layer` that its counterpart `clone` has too."""
    if isinstance(layer, keras.layers.BatchNormalization):
        for name in ("gamma", "beta"):
            if getattr(layer, name) is not None:
                getattr(clone, name).assign(getattr(layer, name))
    elif isinstance(layer, keras.layers.Layer):
        copy_weights(layer, clone)


WHAT = ("last", "bias", "norm", "lora")
# As in Hu et al. (2021), arXiv 2106.09685, and keras_hub: the queries and values of attention.
_OF_ATTENTION = ("query", "value", "query_dense", "value_dense")
_DENSE = (keras.layers.Dense, keras.layers.EinsumDense)


def trainable(model: keras.Model, what: str, rank: int = 8) -> int:
    """Freezes a model except for its last layer and the weights that `what` names.

    The noise of a private update grows with the number of trainable weights, so a pre-trained
    model is best fine-tuned in few. The gradients of frozen weights are not computed, nothing about
    the data is released through them, and they are not in the ledger.

    - `"last"`: the last layer alone.
    - `"bias"`: every bias, and the offsets of normalization (BiTFiT, Bu et al. 2022,
      arXiv 2210.00036).
    - `"norm"`: scales and offsets of the layers with "Norm" in the name of their class. Batch
      normalization stays frozen, because it uses the statistics of its pre-training.
    - `"lora"`: two thin factors for the kernels of queries and values, or if no layer has such a
      name, of every `Dense` and `EinsumDense`. Layers that have LoRA already keep their rank, and
      are then the only ones. For other layers, such as an `Embedding`, call
      `layer.enable_lora(rank)` before.

    The last layer is the last one with weights before the output, the new head; in a subclassed
    model it is the last that its constructor made. It trains in all four cases, except for an
    `Embedding` that it is or contains, for example in language models that use the embedding twice.
    `"last"` trains that too if it is the layer itself.

    Call this before `compile`: as in Keras, a compiled model trains on as before. Keras saves which
    layers train, but not which weights of a layer, so call this again on a loaded model.

    Args:
        model: A built `keras.Model`. It is changed; it does not matter what trained before.
        what: `"last"`, `"bias"`, `"norm"` or `"lora"`.
        rank: Positive integer, of the factors of `"lora"`.

    Returns:
        Int, the number of weights that are trained.

    Raises:
        ValueError: If the model is not built or has no such weights, its last layer is quantized,
            or an argument is not one of the above.
    """
    check_choice("what", what, WHAT)
    check_positive_integer("rank", rank, " Use 8.")
    is_built, must = model.built and model.weights, "be built, with weights"
    require(is_built, "model", model, must, " Call it on a batch, or give it a keras.Input.")
    head = last_layer(model)
    chosen = {} if what == "last" else _chosen(model, head, what, rank)
    if what != "last" and not chosen:
        raise ValueError(
            f"Argument `what` names weights that the model {model.name!r} does not have before its "
            f"last layer. Received: what={what!r}. Use 'last', or make layers that have them."
        )
    if what == "last" or not isinstance(head, keras.layers.Embedding):
        head.trainable = True
        chosen |= {id(v): v for v in _of_head(head)}
    train_only(model, chosen.values())
    return sum(math.prod(v.shape) for v in model.trainable_variables)


def train_only(model: keras.Model, variables: Iterable[keras.Variable]) -> None:
    """Makes these variables of a model the only ones that train.

    Args:
        model: A built `keras.Model`.
        variables: Iterable of its weights.
    """
    chosen = {id(v) for v in variables}
    # From the outside in, because Keras passes `trainable` on to all that a layer contains.
    for layer in layer_internals.flatten_layers(model):
        layer.trainable = any(id(v) in chosen for v in layer.weights)
    for variable in model.weights:
        if variable.trainable:
            variable.trainable = id(variable) in chosen


def last_layer(model: keras.Model) -> keras.layers.Layer:
    """Returns the last layer of a model that has weights, inside of its last part.

    Args:
        model: A built `keras.Model`.
    """
    last = [layer for layer in model.layers if layer.weights][-1]
    outputs = getattr(model, "outputs", None) or []
    inputs = outputs if len(outputs) == 1 else []
    while len(inputs) == 1:  # A layer that is called twice may be the last but not the newest.
        layer, inputs = layer_internals.made_by(inputs[0])
        if getattr(layer, "weights", None):
            last = layer
            break
    return last_layer(last) if isinstance(last, keras.Model) else last


def _of_head(head):
    """Returns the trainable variables of the last layer, without a table of tokens in it."""
    if getattr(head, "quantization_mode", None) not in (None, "float8") and not lora.factors(head):
        raise ValueError(
            f"Argument `model` ends with the quantized layer {head.name!r}, and its kernel cannot "
            "train. Quantize the other layers alone, by `model.quantize(mode, filters=...)`, or "
            "call `enable_lora` of this one."
        )
    parts = layer_internals.flatten_layers(head)
    parts = [x for x in parts if x is head or not isinstance(x, keras.layers.Embedding)]
    held = [(x, v) for x in parts for v in layer_internals.own_weights(x)]
    return [v for x, v in held if v.trainable and v is not lora.frozen(x)]


def _chosen(model, head, what, rank):
    """Returns the variables to train before the last layer, by id."""
    layers = [layer for layer in layer_internals.flatten_layers(model) if layer is not head]
    held = [(layer, v) for layer in layers for v in layer_internals.own_weights(layer)]
    if what == "bias":
        variables = [v for _, v in held if v.name == "beta" or "bias" in v.name]
    elif what == "norm":
        variables = [v for layer, v in held if "norm" in type(layer).__name__.lower()]
    else:
        layers += [head] if isinstance(head, keras.layers.Embedding) else []
        if not any(map(lora.is_enabled, layers)):
            dense = [layer for layer in layers if isinstance(layer, _DENSE)]
            for layer in [x for x in dense if x.name in _OF_ATTENTION] or dense:
                layer.enable_lora(rank)
        variables = [v for layer in layers for v in lora.factors(layer)]
    normed = [x for x in layers if isinstance(x, keras.layers.BatchNormalization)]
    frozen = {id(v) for layer in normed for v in layer.weights}
    return {id(v): v for v in variables if id(v) not in frozen}
