"""The data, sizes and settings that all libraries share. Imports only NumPy and scikit-learn."""

import numpy as np
from sklearn import datasets, model_selection

EPSILON, DELTA, CLIP = 3.0, 1e-5, 1.0
# The digits. The batch size divides the examples into six batches, because Opacus computes the
# sampling probability from the number of batches, and the others from the number of examples.
DIGITS_BATCH, DIGITS_UPDATES, DIGITS_RATE = 240, 60, 2.0

# The timed models. With this small rate the noise of many updates does not lead to NaN.
BATCH, EPOCH_UPDATES, SIGMA, RATE, RANK = 32, 8, 1.0, 1e-3, 8
EXAMPLES = BATCH * EPOCH_UPDATES
TOKENS, WIDTH, HEADS, BLOCKS = 64, 256, 4, 4
CASES = {
    "transformer": "transformer, 4 blocks of width 256 on 64 tokens",
    "transformer_lora": "LoRA of rank 8 and head of this transformer",
    "wrn_16_4": "WRN-16-4 on 32x32 images",
    "depthwise": "depthwise convolutions on 32x32 images",
}
# Channels and strides of the blocks of "depthwise", which begins with a convolution of 32 channels.
# Each block has a depthwise 3x3 convolution and a 1x1 convolution, each followed by a GroupNorm of
# 16 groups and a ReLU.
DEPTHWISE = ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1))


def digits():
    """Returns x, y, test_x and test_y: images [n, 8, 8, 1] in [-1, 1], and labels [n]."""
    data = datasets.load_digits()
    images = (data.images[..., None] / 8 - 1).astype("float32")
    x, test_x, y, test_y = model_selection.train_test_split(
        images, data.target, test_size=360, stratify=data.target, random_state=0
    )
    return x, y, test_x, test_y


def examples(case, rows=EXAMPLES):
    """Returns generated inputs, float32 [rows, ...], and labels of ten classes.

    Every call returns the same arrays.
    """
    generator = np.random.default_rng(0)
    shape = (32, 32, 3) if case in ("wrn_16_4", "depthwise") else (TOKENS, WIDTH)
    return generator.normal(size=(rows, *shape)).astype("float32"), generator.integers(0, 10, rows)


def depthwise(keras):
    """Returns the inputs and outputs of the "depthwise" network, for Keras 2 or 3."""
    layers = keras.layers

    def block(x, layer):
        return layers.ReLU()(layers.GroupNormalization(16)(layer(x)))

    inputs = keras.Input([32, 32, 3])
    x = block(inputs, layers.Conv2D(32, 3, padding="same", use_bias=False))
    for channels, strides in DEPTHWISE:
        x = block(x, layers.DepthwiseConv2D(3, strides, "same", use_bias=False))
        x = block(x, layers.Conv2D(channels, 1, use_bias=False))
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(x))
