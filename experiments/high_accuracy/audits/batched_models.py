"""Many models trained privately side by side in one graph, each with batches and noise of its own.

Weights have a first axis of models. Convolutions are products of patches, so that all models take
them in one batched product, and each layer's gradients of examples are there to be clipped. What
the guarantee rests on is not written anew: the draws are those of
`tfdpx.sampling.sampled_batches`, clip factors and noise those of `tfdpx.mechanism`. So an attack
on these models is one on that code.
"""

import keras
import tensorflow as tf

from tfdpx import mechanism, noise
from tfdpx.sampling import sampled_batches
from tfdpx.train.config.errors import UserError

# Set draws and noise of a seed apart.
_DRAWS, _NOISE = 1, 2


class BatchedModels:
    """Trains copies of a model from the same weights, by DP-SGD on one small data set.

    Every update equals the one of `tfdpx.DPSGD(learning_rate, plan=plan, l2_norm_clip=...)` on
    Poisson samples of the plan, without momentum.

    Args:
        model: `keras.Sequential` of Conv2D, AveragePooling2D, Flatten and Dense, ending in logits.
        plan: `PrivacyPlan`; its `num_examples` counts the target.
        models: Int, models side by side.

    Raises:
        UserError: If the model has another kind of layer.
    """

    def __init__(self, model, plan, models):
        self._layers, self._plan, self._models = list(model.layers), plan, models
        for layer in self._layers:
            _check(layer)
        self._start = [
            tf.repeat(_kernel_rows(v.value)[tf.newaxis], models, axis=0)
            for v in model.trainable_variables
        ]
        # Not by XLA: its batches of small products are no faster, and take longer to compile.
        self._train = tf.function(self._train, autograph=False)

    def train(self, seed, examples, with_target, learning_rate, l2_norm_clip):
        """The logits of the target by each trained model, float32 [models, classes].

        Args:
            seed: List of two ints or int64 tensor [2], as of `tfdpx.noise.make_seed`.
            examples: Pair of float32 [n, height, width, channels] and int64 [n]; the target last.
            with_target: Bool, whether the target is there.
            learning_rate: Float.
            l2_norm_clip: Float.
        """
        x, y = (tf.constant(part) for part in examples)
        numbers = [tf.constant(value, "float32") for value in (learning_rate, l2_norm_clip)]
        seed = tf.convert_to_tensor(seed, tf.int64)
        return self._train(seed, x, y, tf.constant(bool(with_target)), *numbers)

    def _train(self, seed, x, y, with_target, learning_rate, l2_norm_clip):
        plan, weights = self._plan, self._start
        there = tf.concat([tf.ones([plan.num_examples - 1], tf.bool), with_target[None]], 0)

        def step(number, weights):
            key = noise.fold_in(seed, _DRAWS)
            present = self.draw(key, number) & there
            key = noise.fold_in(seed, _NOISE, number)
            rates = learning_rate, l2_norm_clip
            return number + 1, update(self._layers, weights, (x, y), present, key, *rates, plan)

        _, weights = tf.while_loop(
            lambda number, _: number < plan.steps,
            step,
            (tf.constant(0, tf.int64), weights),
            parallel_iterations=1,
        )
        return forward(self._layers, weights, x[-1:])[0][:, 0]

    def draw(self, key, step):
        """Bool [models, n]: which examples each model draws at a step."""
        shape = [self._models, self._plan.num_examples]
        count = shape[0] * shape[1]
        rows = sampled_batches.poisson_rows(key, step, count, self._plan.sampling_probability)
        drawn = tf.scatter_nd(rows[:, tf.newaxis], tf.ones_like(rows), [count])
        return tf.reshape(drawn > 0, shape)


def update(layers, weights, examples, present, seed, learning_rate, l2_norm_clip, plan):
    """The weights after one private update of each model.

    Args:
        layers: List of Keras layers.
        weights: List of float32 [models, ...], kernels as [models, inputs, outputs].
        examples: Pair `(x, y)`, [n, ...] and [n].
        present: Bool [models, n].
        seed: int64 tensor [2], of the noise.
        learning_rate: Scalar float32 tensor.
        l2_norm_clip: Scalar float32 tensor.
        plan: `PrivacyPlan`.
    """
    x, y = examples
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        logits, calls = forward(layers, weights, x, tape)
        labels = tf.repeat(y[tf.newaxis], logits.shape[0], axis=0)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    gradients = tape.gradient(losses, [outputs for _, outputs in calls])
    parts = [_Layer(inputs, g) for (inputs, _), g in zip(calls, gradients, strict=True)]
    squared = tf.add_n([part.squared_norms for part in parts])
    factors = mechanism.clip_factors(
        tf.reshape(squared, [-1]), tf.reshape(present, [-1]), l2_norm_clip, plan.batch_size
    )
    factors = tf.reshape(factors, squared.shape)
    sums = [each for part in parts for each in part.sums(factors)]
    noisy = mechanism.privatize(sums, plan.noise_multiplier, plan.batch_size, seed)
    return [w - learning_rate * g.tensor for w, g in zip(weights, noisy, strict=True)]


def forward(layers, weights, x, tape=None):
    """Logits [models, n, classes], and for each layer with weights its inputs and outputs.

    These are [models, n, places, values]; inputs of the first layer have 1 in place of models.

    Args:
        layers: List of Keras layers.
        weights: List of float32 [models, ...].
        x: float32 [n, height, width, channels].
        tape: Optional `tf.GradientTape` that watches outputs.
    """
    left, h, calls = list(weights), x[tf.newaxis], []
    for layer in layers:
        if isinstance(layer, keras.layers.Flatten):
            h = tf.reshape(h, [*h.shape[:2], -1])
        elif isinstance(layer, keras.layers.AveragePooling2D):
            h = _pooled(h, layer.pool_size)
        else:
            kernel, bias = left.pop(0), left.pop(0)
            if isinstance(layer, keras.layers.Conv2D):
                h = _patches(h, layer.kernel_size, layer.padding)
            places, count = h.shape[2:-1], h.shape[1]
            inputs = tf.reshape(h, [h.shape[0], count, -1, h.shape[-1]])
            flat = tf.reshape(inputs, [h.shape[0], -1, h.shape[-1]])
            if h.shape[0] == 1:
                outputs = tf.einsum("pk,gko->gpo", flat[0], kernel)
            else:
                outputs = tf.matmul(flat, kernel)
            outputs += bias[:, tf.newaxis]
            outputs = tf.reshape(outputs, [-1, count, inputs.shape[2], kernel.shape[-1]])
            if tape is not None:
                tape.watch(outputs)
            calls.append((inputs, outputs))
            h = layer.activation(outputs)
            h = tf.reshape(h, [h.shape[0], count, *places, kernel.shape[-1]])
    return h, calls


class _Layer:
    """What each example's gradient is, for one layer: its norm, and the clipped sum.

    Args:
        inputs: float32 [models or 1, n, places, in].
        gradient: float32 [models, n, places, out], of the losses by the layer's outputs.
    """

    def __init__(self, inputs, gradient):
        self._inputs, self._gradient = inputs, gradient
        self._bias = tf.reduce_sum(gradient, 2)
        self.squared_norms = tf.reduce_sum(self._bias**2, -1)
        if gradient.shape[2] == 1:
            # An outer product: its norm is a product of norms.
            self.squared_norms *= 1 + tf.reduce_sum(inputs**2, [2, 3])
            return
        if inputs.shape[0] == 1:
            self._kernel = tf.einsum("npk,gnpo->gnko", inputs[0], gradient)
        else:
            self._kernel = tf.matmul(inputs, gradient, transpose_a=True)
        self.squared_norms += tf.reduce_sum(self._kernel**2, [2, 3])

    def sums(self, factors):
        """The sums of kernel and bias, [models, in, out] and [models, out].

        Args:
            factors: float32 [models, n].
        """
        bias = tf.einsum("gno,gn->go", self._bias, factors)
        if self._gradient.shape[2] > 1:
            return tf.einsum("gnko,gn->gko", self._kernel, factors), bias
        scaled = self._bias * factors[..., tf.newaxis]
        if self._inputs.shape[0] == 1:
            return tf.einsum("nk,gno->gko", self._inputs[0, :, 0], scaled), bias
        return tf.matmul(self._inputs[:, :, 0], scaled, transpose_a=True), bias


def _patches(h, size, padding):
    """[models, n, height, width, size * channels]: what each output of a convolution sees."""
    rows, columns = size
    if padding == "same":
        before = [(rows - 1) // 2, (columns - 1) // 2]
        after = [rows - 1 - before[0], columns - 1 - before[1]]
        middle = [[b, a] for b, a in zip(before, after, strict=True)]
        h = tf.pad(h, [[0, 0], [0, 0], *middle, [0, 0]])
    height, width = h.shape[2] - rows + 1, h.shape[3] - columns + 1
    return tf.concat(
        [h[:, :, i : i + height, j : j + width] for i in range(rows) for j in range(columns)], -1
    )


def _pooled(h, size):
    rows, columns = size
    height, width = h.shape[2] // rows, h.shape[3] // columns
    h = h[:, :, : height * rows, : width * columns]
    shape = [h.shape[0], h.shape[1], height, rows, width, columns, h.shape[-1]]
    return tf.reduce_mean(tf.reshape(h, shape), [3, 5])


def _kernel_rows(value):
    """A kernel as [inputs, outputs], a bias as it is."""
    return value if value.shape.rank < 3 else tf.reshape(value, [-1, value.shape[-1]])


def _check(layer):
    known = (
        keras.layers.Conv2D,
        keras.layers.AveragePooling2D,
        keras.layers.Flatten,
        keras.layers.Dense,
    )
    plain = type(layer) in known
    if isinstance(layer, keras.layers.Conv2D):
        plain = plain and layer.strides == layer.dilation_rate == (1, 1) and layer.groups == 1
    if isinstance(layer, keras.layers.AveragePooling2D):
        plain = plain and layer.strides == layer.pool_size and layer.padding == "valid"
    if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense)):
        plain = plain and layer.use_bias
    if not plain:
        raise UserError(
            f"Layer '{layer.name}' ({type(layer).__name__}) cannot be trained in many models at "
            "once: only plain Conv2D, AveragePooling2D, Flatten and Dense can."
        )
