"""Turns a model with batch normalization into one that can be trained privately."""

from __future__ import annotations

import keras

from tfdpx._arguments import check_positive_integer
from tfdpx._keras import layer_internals
from tfdpx.account import copy_weights
from tfdpx.layers.group_norm import GroupNorm


def replace_batch_norm(model: keras.Model, groups: int = 16) -> keras.Model:
    """Clones `model` with a `GroupNorm` in place of each `BatchNormalization`.

    Batch normalization computes statistics across examples, so that no per-example gradient
    exists and DP-SGD does not apply. Each such layer becomes a `GroupNorm` of the same name,
    `axis`, `epsilon`, `center`, `scale`, initializers, regularizers, constraints and `trainable`.
    Its number of groups is the largest divisor of its channels that is at most `groups`.

    All weights are copied, `gamma` and `beta` of the replaced layers among them; the moving
    statistics have no counterpart and are dropped. The clone therefore computes another function
    than `model` and has to be trained or fine-tuned. `GroupNorm` normalises masked positions too.

    Args:
        model: A built Functional or Sequential `keras.Model`. Functional and Sequential models
            nested in it are cloned too. It is left as it was.
        groups: Positive integer, the greatest number of groups of any layer. De et al. (2022) use
            16 throughout.

    Returns:
        A `keras.Model` with weights of its own, compiled like `model` if that was compiled.

    Raises:
        ValueError: If `groups` is not a positive integer, if `model` is a subclassed or an
            unbuilt model, or if a layer holds a `BatchNormalization` inside itself.
    """
    check_positive_integer("groups", groups, " Use 16.")
    if not isinstance(model, keras.Sequential) and not hasattr(model, "inputs"):
        raise ValueError(
            "Argument `model` must be a Functional or Sequential keras.Model, since only those can "
            f"be cloned layer by layer. Received: model={model!r}. Write "
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

    # A Sequential model records no call arguments, and clone_model refuses the function there.
    call_function = None if isinstance(model, keras.Sequential) else _call_without_mask
    new_model = keras.models.clone_model(
        model, clone_function=clone_layer, call_function=call_function, recursive=True
    )
    for layer, clone in counterparts:
        _copy_weights(layer, clone)
    return new_model


def _group_norm_like(layer, groups):
    """Returns the unbuilt `GroupNorm` that takes the place of the BatchNormalization `layer`."""
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
    """Calls `layer` as its counterpart was, less the arguments that `GroupNorm` does not take."""
    if isinstance(layer, GroupNorm):
        kwargs = {key: kwargs[key] for key in kwargs if key not in ("mask", "training")}
    return layer(*args, **kwargs)


def _refuse_hidden_batch_norm(layer):
    """Raises ValueError if `layer` is not a BatchNormalization but has one inside."""
    is_layer = isinstance(layer, keras.layers.Layer)
    sublayers = layer_internals.flatten_layers(layer) if is_layer else []
    hidden = [sub for sub in sublayers if isinstance(sub, keras.layers.BatchNormalization)]
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
