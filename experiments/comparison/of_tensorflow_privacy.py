"""tensorflow-privacy on Keras 2: its vectorized optimizer, and its private model.

It has no Poisson sampling, so batches are shuffled and all have one size.
"""

import importlib.metadata
import sys

import tensorflow as tf
import tensorflow_privacy
from tensorflow import keras
from tensorflow_privacy.privacy.analysis import compute_noise_from_budget_lib as noise_lib
from tensorflow_privacy.privacy.fast_gradient_clipping import (
    gradient_clipping_utils,
    layer_registry,
)
from tensorflow_privacy.privacy.fast_gradient_clipping.registry_functions import (
    layer_normalization,
    multi_head_attention,
)

from experiments.comparison import cases, worker

layers = keras.layers


def versions():
    """Returns the versions of the libraries."""
    names = ("tensorflow-privacy", "tensorflow", "keras", "dp-accounting")
    return {name: importlib.metadata.version(name) for name in names}


def _digits():
    inputs = x = keras.Input([8, 8, 1])
    for channels, strides in ((32, 1), (32, 2), (64, 2)):
        x = layers.Conv2D(channels, 3, strides, "same")(x)
        x = layers.Activation("gelu")(layers.GroupNormalization(4)(x))
    return inputs, layers.Dense(10)(layers.Flatten()(x))


def _wrn():
    def conv(x, channels, size, strides=1):
        return layers.Conv2D(channels, size, strides, "same", use_bias=False)(x)

    def norm(x):
        return layers.ReLU()(layers.GroupNormalization(16)(x))

    inputs = keras.Input([32, 32, 3])
    x = conv(inputs, 16, 3)
    for channels, strides in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
        same = strides == 1 and x.shape[-1] == channels
        skip = x if same else conv(x, channels, 1, strides)
        x = layers.Add()([skip, conv(norm(conv(norm(x), channels, 3, strides)), channels, 3)])
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling2D()(norm(x)))


def _transformer():
    inputs = x = keras.Input([cases.TOKENS, cases.WIDTH])
    for _ in range(cases.BLOCKS):
        y = layers.LayerNormalization()(x)
        y = layers.MultiHeadAttention(cases.HEADS, cases.WIDTH // cases.HEADS)(y, y)
        x = layers.Add()([x, y])
        y = layers.Dense(4 * cases.WIDTH, "gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(cases.WIDTH)(y)])
    return inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x))


def compiled(case, mode, noise_multiplier, rate):
    """Returns a compiled model of a case."""
    if case == "depthwise":
        inputs, outputs = cases.depthwise(keras)
    else:
        inputs, outputs = {"digits": _digits, "wrn_16_4": _wrn}.get(case, _transformer)()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if mode == "ordinary":
        model, optimizer = keras.Model(inputs, outputs), keras.optimizers.SGD(rate)
    elif mode == "vectorized":
        model = keras.Model(inputs, outputs)
        optimizer = tensorflow_privacy.VectorizedDPKerasSGDOptimizer(
            l2_norm_clip=cases.CLIP, noise_multiplier=noise_multiplier, learning_rate=rate
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    else:
        registry = layer_registry.make_default_layer_registry()
        registry.insert(
            layers.LayerNormalization, layer_normalization.layer_normalization_computation
        )
        registry.insert(
            layers.MultiHeadAttention, multi_head_attention.multi_head_attention_layer_computation
        )
        model = tensorflow_privacy.DPModel(
            cases.CLIP,
            noise_multiplier,
            use_xla=mode == "model",
            layer_registry=registry if mode == "fast clipping" else None,
            inputs=inputs,
            outputs=outputs,
        )
        optimizer = keras.optimizers.SGD(rate)
        has_rules = gradient_clipping_utils.all_trainable_layers_are_registered(model, registry)
        if mode == "fast clipping" and not has_rules:  # The library itself raises no error.
            raise NotImplementedError("no convolution rule")
    model.compile(optimizer, loss)
    return model


def digits(seed, rate=cases.DIGITS_RATE, mode="model"):
    """Trains the digits. The epsilon assumes Poisson sampling, but the batches are shuffled."""
    x, y, test_x, test_y = cases.digits()
    watch = worker.stopwatch(keras)
    keras.utils.set_random_seed(seed)
    epochs = cases.DIGITS_UPDATES * cases.DIGITS_BATCH // len(x)
    sigma = noise_lib.compute_noise(
        len(x), cases.DIGITS_BATCH, cases.EPSILON, epochs, cases.DELTA, 0.1
    )
    model = compiled("digits", mode, sigma, rate)
    model.fit(x, y, cases.DIGITS_BATCH, epochs, callbacks=[watch], verbose=0)
    return {
        "accuracy": float((model.predict(test_x, verbose=0).argmax(1) == test_y).mean()),
        "epsilon": cases.EPSILON,
        "accountant": "RDP",
        "sampling": "shuffled",
        "noise_multiplier": float(sigma),
        "sampling_probability": cases.DIGITS_BATCH / len(x),
        "updates": model.optimizer.iterations.numpy().item(),
        "first_seconds": watch.first,
        "seconds": watch.epoch,
    }


class training:  # noqa: N801
    """Makes updates of a case. `mode` is a mode of this library or "ordinary" (without privacy)."""

    def __init__(self, case, mode):
        if case == "transformer_lora":
            raise NotImplementedError("Keras 2: no LoRA")
        x, y = cases.examples(case)
        self._model = compiled(case, mode, cases.SIGMA, cases.RATE)
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(cases.EXAMPLES)
        self._data = data.batch(cases.BATCH, drop_remainder=True)
        batch = tf.constant(x[: cases.BATCH]), tf.constant(y[: cases.BATCH])
        update = tf.function(self._model.train_step)
        self._update = lambda: update(batch)

    def step(self):
        """Makes an update on one batch."""
        self._update()

    def epoch(self):
        """Makes an update on every batch and returns the seconds of the epoch."""
        watch = worker.stopwatch(keras)
        self._model.fit(self._data, verbose=0, callbacks=[watch])
        return watch.epoch


if __name__ == "__main__":
    worker.main(sys.modules[__name__])
