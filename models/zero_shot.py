"""Weights of a linear classifier from the names of its classes, by a text encoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfdpx._arguments import is_number, require


def zero_shot_head(
    text_encoder: Callable[[Any], Any],
    class_names: Sequence[str],
    scale: float = 100.0,
    template: str = "{}",
    preprocessor: Callable[[list[str]], Any] | None = None,
) -> np.ndarray:
    """The kernel whose columns are the encoded names of the classes, at norm `scale`.

    On image features at norm one, from an encoder that was trained together with the text encoder
    (CLIP), this is a classifier that has seen no image of its task. The names are public, and so
    are the weights: `heads.AdaMix(initial_weights=..., l2_norm_clip=1.0)` starts from them and
    needs no public image.

    Args:
        text_encoder: A `keras.Model`, layer or other function from texts to embeddings `[n, d]`.
        class_names: Sequence of different strings, one for each class, in the order of the labels.
        scale: Float > 0, the norm of each column.
        template: String with `{}` in place of the name, such as "a photo of a {}.".
        preprocessor: Optional function of a list of strings to what `text_encoder` takes, such as a
            tokenizer. By default that is a tensor of strings `[n]`.

    Returns:
        float32 array `[d, num_classes]`.

    Raises:
        ValueError: If an argument does not fit, or the encoder gives no finite embeddings `[n, d]`,
            or one of zeros.

    References:
        - [Golatkar et al., 2022](https://arxiv.org/abs/2203.11481), section 3.3.
        - [Radford et al., 2021](https://arxiv.org/abs/2103.00020), for such classifiers.
    """
    names = list(class_names) if not isinstance(class_names, str) else None
    fits = names and all(isinstance(name, str) and name for name in names)
    must = "be a sequence of strings that are not empty and all different"
    fits = fits and len(names) >= 2 and len(set(names)) == len(names)
    require(fits, "class_names", class_names, must)
    require(is_number(scale) and 0 < scale < np.inf, "scale", scale, "be a positive, finite number")
    require("{}" in template, "template", template, "hold {}, in place of the name")
    texts = [template.replace("{}", name) for name in names]
    inputs = keras.ops.convert_to_tensor(texts) if preprocessor is None else preprocessor(texts)
    encoded = text_encoder(inputs)
    shape = tuple(getattr(encoded, "shape", ()))
    if len(shape) != 2 or shape[0] != len(names):
        raise ValueError(
            f"Argument `text_encoder` must give embeddings [{len(names)}, d] of as many texts. "
            f"Received: shape {shape}. Take the pooled output of an encoder."
        )
    rows = np.asarray(keras.ops.convert_to_numpy(encoded), "float64")
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    unfit = [name for name, norm in zip(names, norms[:, 0], strict=True) if not 0 < norm < np.inf]
    if unfit:
        raise ValueError(
            "Argument `text_encoder` must give finite embeddings other than zero. Received: none "
            f"such for {unfit[:5]}."
        )
    return (scale * rows / norms).T.astype("float32")
