"""Trains a network privately many times with one traced step, for studies of many settings."""

import keras
import numpy as np
import tensorflow as tf


class Trainer:
    """Trains a model several times; before each training, weights and slots are reset.

    Batches are Poisson samples according to the plan, and every training has fresh noise. Do not
    read epsilon from the optimizer: its account adds up all trainings.

    Args:
        model: `keras.Model` that ends in logits.
        optimizer: Optimizer of tfdpx, made without a plan.
        plan: `tfdpx.PrivacyPlan`, the source of the sampling, the largest batch size and the number
            of updates.
        data: Pair of arrays `(x, y)`, with `plan.num_examples` examples.
    """

    def __init__(self, model, optimizer, plan, data):
        self.model, self._optimizer, self._plan, self._data = model, optimizer, plan, data
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, jit_compile=False)
        optimizer.build(model.trainable_variables)
        self._start = model.get_weights()
        self._slots = [variable.numpy() for variable in optimizer.variables]
        self._step = tf.function(
            lambda *batch: model.train_step(batch), autograph=False, reduce_retracing=True
        )
        self._logits = tf.function(lambda x: model(x, training=False), autograph=False)

    def train(self, seed, rate, weights=None, absent=()):
        """Trains once.

        Args:
            seed: Int, the seed of the batches.
            rate: Float, the learning rate.
            weights: List of arrays, the initial weights. Defaults to the weights of the model that
                was passed to the constructor.
            absent: Indices of the examples to leave out of all updates.
        """
        pairs = zip(self._optimizer.variables, self._slots, strict=True)
        for variable, value in (
            *pairs,
            *zip(self.model.weights, weights or self._start, strict=True),
        ):
            variable.assign(value)
        self._optimizer.learning_rate.assign(rate)
        rng, plan = np.random.default_rng(seed), self._plan
        for _ in range(plan.steps):
            chosen = rng.random(plan.num_examples) < plan.sampling_probability
            chosen[list(absent)] = False
            drawn = np.flatnonzero(chosen)
            rows = np.pad(drawn, (0, plan.capacity - len(drawn)))
            present = (np.arange(plan.capacity) < len(drawn)).astype("float32")
            self._step(*(tf.constant(part[rows]) for part in self._data), tf.constant(present))
        if self._optimizer.use_ema:
            self._optimizer.finalize_variable_values(self.model.trainable_variables)

    def logits(self, x):
        """Returns the logits of the trained model on `x`, float32 `[count, classes]`."""
        return self._logits(tf.constant(x)).numpy()

    def accuracy(self, x, y):
        """Returns the accuracy of the trained model, a float."""
        return float(np.mean(self.logits(x).argmax(1) == y))
