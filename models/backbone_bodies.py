"""The networks behind `tfdpx.models.backbone`, by name, without their classifiers."""

import difflib
import inspect
import sys

import keras

# Of keras_cv, whose own presets hold no architecture: it comes with the weights, by download.
_BASIC = {18: [2, 2, 2, 2], 34: [3, 4, 6, 3]}
_BOTTLENECK = {50: [3, 4, 6, 3], 101: [3, 4, 23, 3], 152: [3, 8, 36, 3]}
_MIT_DEPTHS = {
    "b0": [2, 2, 2, 2],
    "b1": [2, 2, 2, 2],
    "b2": [3, 4, 6, 3],
    "b3": [3, 4, 18, 3],
    "b4": [3, 8, 27, 3],
    "b5": [3, 6, 40, 3],
}


def names():
    """The names of all known networks: those of keras.applications, then those of keras_cv."""
    return [*_applications(), *_keras_cv_arguments()]


def body(name, input_shape):
    """Returns the network called `name` without classifier.

    Args:
        name: One of `names()`.
        input_shape: `(height, width, channels)`.

    Returns:
        `preprocess`, a function of images with values 0 to 255 to what the network was made for,
        and the network, a `keras.Model` to feature maps `[batch, height, width, channels]`.

    Raises:
        ValueError: If there is no such network, or it does not fit images of that shape.
    """
    applications, keras_cv_arguments = _applications(), _keras_cv_arguments()
    if name in applications:
        constructor = applications[name]
        network = constructor(include_top=False, weights=None, input_shape=input_shape)
        return sys.modules[constructor.__module__].preprocess_input, network
    if name in keras_cv_arguments:
        class_name, arguments = keras_cv_arguments[name]
        if class_name == "MiTBackbone":
            _check_mit_shape(input_shape)
        import keras_cv  # Here: it is slow, and most users need none of its networks.

        constructor = getattr(keras_cv.models, class_name)
        # These rescale by themselves.
        network = constructor(include_rescaling=True, input_shape=input_shape, **arguments)
        return (lambda images: images), network
    close = difflib.get_close_matches(str(name), names(), n=1, cutoff=0.6)
    raise ValueError(
        f"Argument `name` must be one of {names()}. Received: name={name!r}."
        + (f" Did you mean {close[0]!r}?" if close else "")
    )


def _applications():
    """{name: constructor} of keras.applications, which differs between versions of Keras."""
    members = inspect.getmembers(keras.applications, inspect.isfunction)
    return {name: member for name, member in members if name[0].isupper()}


def _keras_cv_arguments():
    """{preset name of keras_cv: (class name, arguments)}."""
    bodies = {}
    for suffix, class_name in (("", "ResNetBackbone"), ("_v2", "ResNetV2Backbone")):
        for depth, blocks in (_BASIC | _BOTTLENECK).items():
            bodies[f"resnet{depth}{suffix}"] = (
                class_name,
                {
                    "stackwise_filters": [64, 128, 256, 512],
                    "stackwise_blocks": blocks,
                    "stackwise_strides": [1, 2, 2, 2],
                    "block_type": "basic_block" if depth in _BASIC else "block",
                },
            )
    for size, depths in _MIT_DEPTHS.items():
        widths = [32, 64, 160, 256] if size == "b0" else [64, 128, 320, 512]
        bodies[f"mit_{size}"] = "MiTBackbone", {"depths": depths, "embedding_dims": widths}
    return bodies


def _check_mit_shape(input_shape):
    """Raises ValueError unless MiT's five halvings leave a square of at least 2 by 2."""
    height, width = input_shape[:2]
    if height != width or height is None or height < 64 or height % 32:
        raise ValueError(
            "Argument `input_shape` must be square for MiT backbones, with a height that is a "
            f"multiple of 32 and at least 64. Received: input_shape={input_shape}. Use (224, 224, "
            "3)."
        )
