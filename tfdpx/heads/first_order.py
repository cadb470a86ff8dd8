"""Full-batch DP-SGD or DP-Adam on the sigmoid cross-entropy (Algorithm 4)."""

import dataclasses

import keras
import numpy as np
import tensorflow as tf

from tfdpx._arguments import check_positive_integer
from tfdpx.heads._fields import argument, boolean, finite, not_negative, one_of, optional, positive
from tfdpx.heads._gradients import Gradients
from tfdpx.heads.head import Head

_OPTIMIZERS = {"adam": keras.optimizers.Adam, "sgd": keras.optimizers.SGD}


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class FirstOrder(Head):
    """Logistic regression by a Keras optimizer on `steps` noisy full-batch gradients.

    Algorithm 4 of "Differentially Private Image Classification from Features", the baseline there.
    Each step releases the sum of the gradients of kernel and bias together, clipped to C =
    `l2_norm_clip`, with noise of standard deviation sigma C on the sum (Eq. 3; line 4 prints it on
    the mean). The optimizer sees that over n.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example: `steps`
    Gaussians of sensitivity C.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int.
        optimizer: "adam" or "sgd".
        learning_rate: Float.
        l2_regularization: Float, lambda, whose `lambda / 2 |kernel|^2` is added to the mean loss.
        initial_bias: Float.
        average: Bool, whether the result is the mean of all iterates and not the last.
        noise_multiplier: Float, in place of epsilon.
        l2_norm_clip: Float, C.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.

    Raises:
        ValueError: If an argument does not fit.
    """

    steps: int = argument(100, check_positive_integer)
    _: dataclasses.KW_ONLY
    optimizer: str = argument("adam", one_of(*_OPTIMIZERS))
    learning_rate: float = argument(1.0, positive)
    l2_regularization: float | None = argument(0.0, optional(not_negative))
    initial_bias: float = argument(-10.0, finite)
    average: bool = argument(False, boolean)

    def _releases(self):
        return {"gradient": self.steps}

    def _sizes(self, dimension):
        return {"gradient": (dimension + 1) * self.num_classes}

    def _fit(self, examples, released):
        width, classes = examples.dimension, self.num_classes
        kernel = keras.Variable(np.zeros([width, classes], "float32"))
        bias = keras.Variable(np.full([classes], self.initial_bias, "float32"))
        optimizer = _OPTIMIZERS[self.optimizer](self.learning_rate)
        optimizer.build([kernel, bias])
        gradients = Gradients(examples, classes, self.l2_norm_clip, use_bias=True)
        strategy = tf.distribute.get_strategy()
        replicas = strategy.num_replicas_in_sync
        totals = [0.0, 0.0]

        def apply(slopes):  # Of which Keras adds up all replicas' own.
            optimizer.apply([slopes[:-1], slopes[-1]])

        @tf.function(autograph=False)
        def update(slopes):
            strategy.run(apply, args=(slopes,))

        for _ in range(self.steps):
            both = released.gaussian(
                "gradient",
                lambda: np.vstack(gradients.sums(kernel.numpy(), bias.numpy())),
                self.l2_norm_clip,
            )
            mean = both / examples.count
            mean[:-1] += (self.l2_regularization or 0.0) * kernel.numpy()
            update(tf.constant(mean / replicas, "float32"))
            totals = [t + v.numpy() for t, v in zip(totals, (kernel, bias), strict=True)]
        if self.average:
            return [total / self.steps for total in totals]
        return kernel.numpy(), bias.numpy()
