"""The models that the benchmark times, and made-up batches for them."""

import keras
import numpy as np

from tfdpx.train.config.errors import UserError
from tfdpx.train.run import classifiers

IMAGE_SIZE = 32

NUM_IMAGE_CLASSES = 10
TOKENS, WIDTH = 64, 256
VOCABULARY = 30_522


def check(name, image_size):
    """Raises UserError unless there is a model of that name for inputs of that size.

    Args:
        name: Name of the model.
        image_size: Height and width of an image, or None for 32; None where inputs are no images.
    """
    if name in _OF_VECTORS:
        if image_size is not None:
            raise UserError(
                f"Flag --image_size does not belong to --model={name}, which sees no images. "
                f"Received: --image_size={image_size}. Leave it out."
            )
        return
    try:
        classifiers.check_name(name)
    except UserError as error:
        raise UserError(f"{error} Or of: {', '.join(_OF_VECTORS)}.") from error


def build(name, image_size):
    """Returns an uncompiled model that ends in logits.

    Image models are those of `tfdpx.train.classify`, from bytes to ten classes. `dense_head` is
    one layer of 1,000 classes on feature vectors [2048]; `transformer` four pre-norm encoder blocks
    (width 256, 4 heads of 64, MLP of 1,024) on float tokens [64, 256], averaged to ten classes;
    `vit_base` and `bert_base` twelve (width 768, 12 heads, MLP of 3,072) on 196 patches of images
    and on 128 tokens of 30,522; `billion` 19 of width 2048, a billion weights in bfloat16, on 64.

    Args:
        name: Name of the model.
        image_size: As for `check`.

    Raises:
        UserError: If the model does not fit images of that size.
    """
    if name in _OF_VECTORS:
        return _OF_VECTORS[name][0]()
    return classifiers.build(name, _image_shape(image_size), NUM_IMAGE_CLASSES, centre=127.5)


def batch(name, image_size, rows):
    """Made-up inputs [rows, ...] and labels [rows], as numpy arrays; the same on each call.

    Args:
        name: Name of the model.
        image_size: As for `check`.
        rows: Int.
    """
    generator = np.random.default_rng(0)
    if name in _OF_VECTORS:
        _, shape, classes = _OF_VECTORS[name]
        if name in _OF_TOKENS:
            x = generator.integers(0, VOCABULARY, size=(rows, *shape), dtype="int32")
        else:
            x = generator.normal(size=(rows, *shape)).astype("float32")
    else:
        shape, classes = _image_shape(image_size), NUM_IMAGE_CLASSES
        x = generator.integers(0, 256, size=(rows, *shape), dtype="uint8")
    return x, generator.integers(0, classes, size=rows)


def _image_shape(image_size):
    size = IMAGE_SIZE if image_size is None else image_size
    return (size, size, 3)


def _dense_head():
    return keras.Sequential(
        [keras.Input([2048]), keras.layers.Dense(1000, name="logits")], name="dense_head"
    )


def _blocks(x, blocks, heads, width, dtype=None):
    layers, each = keras.layers, {"dtype": dtype}
    for _ in range(blocks):
        normed = layers.LayerNormalization(**each)(x)
        x = x + layers.MultiHeadAttention(heads, width // heads, **each)(normed, normed)
        normed = layers.LayerNormalization(**each)(x)
        hidden = layers.Dense(4 * width, activation="gelu", **each)(normed)
        x = x + layers.Dense(width, **each)(hidden)
    return x


def _transformer():
    inputs = keras.Input([TOKENS, WIDTH])
    pooled = keras.layers.GlobalAveragePooling1D()(_blocks(inputs, 4, 4, WIDTH))
    return keras.Model(inputs, keras.layers.Dense(10)(pooled), name="transformer")


def _base(inputs, embedded, name):
    """Twelve blocks as of ViT-Base and BERT-Base, and a head on what they make of the first row."""
    layers = keras.layers
    positions = layers.Embedding(embedded.shape[1], 768)(keras.ops.arange(embedded.shape[1]))
    x = layers.LayerNormalization()(_blocks(embedded + positions, 12, 12, 768))
    return keras.Model(inputs, layers.Dense(10)(x[:, 0]), name=name)


def _vit_base():
    inputs = keras.Input([224, 224, 3])
    patches = keras.layers.Conv2D(768, 16, 16)(inputs)
    return _base(inputs, keras.layers.Reshape([196, 768])(patches), "vit_base")


def _bert_base():
    inputs = keras.Input([128], dtype="int32")
    return _base(inputs, keras.layers.Embedding(VOCABULARY, 768)(inputs), "bert_base")


def _billion():
    inputs = keras.Input([64], dtype="int32")
    x = keras.layers.Embedding(VOCABULARY, 2048, dtype="bfloat16")(inputs)
    x = _blocks(x, 19, 16, 2048, "bfloat16")
    return keras.Model(inputs, keras.layers.Dense(10)(x[:, 0]), name="billion")


# Name: function that builds it, shape of an input, number of classes.
_OF_VECTORS = {
    "dense_head": (_dense_head, (2048,), 1000),
    "transformer": (_transformer, (TOKENS, WIDTH), 10),
    "vit_base": (_vit_base, (224, 224, 3), 10),
    "bert_base": (_bert_base, (128,), 10),
    "billion": (_billion, (64,), 10),
}
_OF_TOKENS = ("bert_base", "billion")
