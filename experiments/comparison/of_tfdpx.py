"""Trains with tfdpx: compiles a Keras model with a private optimizer, and calls `fit`."""

import sys

import keras
import tensorflow as tf

import tfdpx
from experiments.benchmark import steps
from experiments.comparison import cases, worker
from tfdpx.layers import trainable
from tfdpx.train import startup

# The plan has updates for this number of epochs, more than the comparison requests.
EPOCHS = 100


def versions():
    """Returns the versions of the libraries."""
    return {package.__name__: package.__version__ for package in (tfdpx, keras, tf)}


def build(case):
    """Returns the network of a case."""
    if case == "digits":
        return tfdpx.models.SmallCNN(10, (8, 8, 1), weight_standardization=False)
    if case == "wrn_16_4":
        return tfdpx.models.WideResNet(16, 4, 10, weight_standardization=False)
    if case == "depthwise":
        return keras.Model(*cases.depthwise(keras))
    model = steps.build_model("transformer", None)
    if case == "transformer_lora":
        trainable(model, "lora", cases.RANK)
    return model


def digits(seed, rate=cases.DIGITS_RATE):
    """Trains the digits by `fit` and returns a dict of results."""
    x, y, test_x, test_y = cases.digits()
    watch = worker.stopwatch(keras)
    keras.utils.set_random_seed(seed)
    plan = tfdpx.PrivacyPlan(
        num_examples=len(x),
        batch_size=cases.DIGITS_BATCH,
        steps=cases.DIGITS_UPDATES,
        epsilon=cases.EPSILON,
        delta=cases.DELTA,
    )
    model = build("digits")
    model.compile(
        tfdpx.DPSGD(rate, plan=plan, l2_norm_clip=cases.CLIP),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.fit(x, y, epochs=plan.steps, callbacks=[watch], verbose=0)
    ledger = model.optimizer.ledger
    return {
        "accuracy": float((model.predict(test_x, verbose=0).argmax(1) == test_y).mean()),
        "epsilon": ledger.epsilon(cases.DELTA),
        "accountant": "PLD",
        "sampling": "Poisson",
        "noise_multiplier": plan.noise_multiplier,
        "sampling_probability": plan.sampling_probability,
        "updates": ledger.steps,
        "first_seconds": watch.first,
        "seconds": watch.epoch,
    }


class training:  # noqa: N801
    """Makes updates of a case. `mode` is a mode of this library or "ordinary" (without privacy)."""

    def __init__(self, case, mode):
        self._x, self._y = cases.examples(case)
        self._model = build(case)
        optimizer = keras.optimizers.SGD(cases.RATE)
        if mode != "ordinary":
            startup.keep_freed_memory()  # The programs of tfdpx do the same.
            plan = tfdpx.PrivacyPlan(
                num_examples=cases.EXAMPLES,
                batch_size=cases.BATCH,
                steps=EPOCHS * cases.EPOCH_UPDATES,
                noise_multiplier=cases.SIGMA,
                delta=cases.DELTA,
            )
            optimizer = tfdpx.DPSGD(cases.RATE, plan=plan, l2_norm_clip=cases.CLIP)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self._model.compile(optimizer, loss)
        batch = tf.constant(self._x[: cases.BATCH]), tf.constant(self._y[: cases.BATCH])
        update = tf.function(self._model.train_step, autograph=False)
        self._update = lambda: update(batch)

    def step(self):
        """Makes an update on one batch."""
        self._update()

    def epoch(self):
        """Makes an update on every batch and returns the seconds of the epoch."""
        watch = worker.stopwatch(keras)
        self._model.fit(self._x, self._y, cases.BATCH, verbose=0, callbacks=[watch])
        return watch.epoch


if __name__ == "__main__":
    worker.main(sys.modules[__name__])
