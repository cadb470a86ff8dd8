"""A linear classifier on whitened scattering features, which cost no privacy."""

from __future__ import annotations

from typing import Any

import keras

from tfdpx._arguments import check_positive_integer
from tfdpx.models.linear_on_features import linear
from tfdpx.models.scattering_features import scattering_features


def ScatterLinear(
    num_classes: int,
    input_shape: Any,
    scales: int | None = None,
    directions: int = 8,
    padding: str = "zeros",
    generator: Any = None,
    name: str = "scatter_linear",
) -> keras.Model:
    """Builds a linear classifier on fixed features, of which nothing but the last layer is trained.

    The features are a Morlet scattering transform of the image, its square root, whitened by the
    statistics of *generated* images (`tfdpx.synthetic`), and scaled to norm one. They know no data,
    so they spend no privacy, and at small budgets and on small sets they beat what a private
    training could learn: the noise of private training has as many dimensions as there are trained
    weights, while with features of norm one its effect on a logit does not depend on their number.

    Train it with full batches (`batch_size=num_examples`), plain `tfdpx.DPSGD` without momentum, a
    small clip such as 0.02 and a large learning rate; `tfdpx.train.classify --model=auto` chooses
    them.

    Args:
        num_classes: Positive integer, number of outputs.
        input_shape: `(height, width, channels)` of one image, each known.
        scales: Positive integer, J of the transform, which leaves `2**J` times fewer positions an
            axis. Default: 2 for images of up to 45 pixels, one more for each doubling.
        directions: Positive integer, L of the transform.
        padding: "zeros" or "reflect", as of `tfdpx.layers.Scattering2D`.
        generator: The `tfdpx.synthetic` generator of the images that whiten; by default
            `DeadLeaves` of the size and channels of `input_shape`.
        name: String, name of the model.

    Returns:
        A functional `keras.Model` from images `[batch, height, width, channels]` with values from 0
        to 1 to logits `[batch, num_classes]`, without softmax and in float32 under mixed precision.
        Only its dense layer, which starts at zero, is trainable.

    Raises:
        ValueError: If an argument does not fit, or the image is smaller than `2**scales`.

    References:
        - [Tramer & Boneh, 2021](https://arxiv.org/abs/2011.11660), for linear models on scattering
          features.
        - [Bruna & Mallat, 2013](https://arxiv.org/abs/1203.1513), for the transform.
    """
    check_positive_integer("num_classes", num_classes)
    inputs, features = scattering_features(input_shape, scales, directions, padding, generator)
    outputs = linear(features, num_classes)
    return keras.Model(inputs, outputs, name=name)
