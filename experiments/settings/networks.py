"""Small networks in JAX, with the initial weights of Keras, and sums of clipped gradients.

A network is a function of a `Tape` and a batch. The tape records the input of each layer and adds
zeros to its output, so that one backward pass gives the gradients of all outputs. The norm of each
example's gradient, and the sum of clipped gradients, follow from both without further passes.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np


class Tape:
    """Hands out weights in order, and records layers.

    Args:
        params: List of trained weights, or None to collect their `specs`.
        taps: List of zeros to add to the outputs of layers, or None to collect their `shapes`.
        frozen: List of weights that do not train.
    """

    def __init__(self, params=None, taps=None, frozen=None):
        self._params, self._taps = params and iter(params), taps and iter(taps)
        self._frozen = frozen and iter(frozen)
        self.specs, self.shapes, self.kinds, self.records = [], [], [], []

    def weight(self, shape, limit=0.0, constant=0.0):
        """Returns a trained weight, initially uniform within `limit` or constant."""
        self.specs.append((shape, limit, constant))
        return next(self._params) if self._params else jnp.zeros(shape)

    def fixed(self, shape):
        """Returns a weight that does not train."""
        return next(self._frozen) if self._frozen else jnp.zeros(shape)

    def tap(self, y, kind, *record):
        """Returns the output `y` of a layer, and records it."""
        self.kinds.append(kind)
        self.records.append(record)
        self.shapes.append(y.shape)
        return y + next(self._taps) if self._taps else y

    def dense(self, x, units, bias=True, fans=None, standardize=False, limit=None):
        """Applies a matrix of Glorot's limits for `fans`."""
        if limit is None:
            limit = math.sqrt(6 / sum(fans or (x.shape[-1], units)))
        kernel = self.weight((x.shape[-1], units), limit)
        y = x @ (standardized(kernel) if standardize else kernel)
        if bias:
            y = y + self.weight((units,))
        return self.tap(y, ("standardized" if standardize else "dense", bias), x, kernel)

    def conv(self, x, filters, k, stride=1, same=True, standardize=False):
        """Applies a k x k convolution, a matrix on patches."""
        p = patches(x, k, stride, same)
        batch, height, width, size = p.shape
        y = self.dense(
            p.reshape(batch, height * width, size),
            filters,
            fans=(size, k * k * filters),
            standardize=standardize,
        )
        return y.reshape(batch, height, width, filters)

    def norm(self, x, groups=None):
        """Applies group normalization, or layer normalization of each place without `groups`."""
        z = x.reshape(x.shape[0], -1, x.shape[-1])
        axes = (1, 3) if groups else (3,)
        z = z.reshape(*z.shape[:2], groups or 1, -1)
        z = (z - z.mean(axes, keepdims=True)) * jax.lax.rsqrt(z.var(axes, keepdims=True) + 1e-3)
        z = z.reshape(x.shape[0], -1, x.shape[-1])
        y = z * self.weight(x.shape[-1:], constant=1.0) + self.weight(x.shape[-1:])
        return self.tap(y, ("norm", True), z).reshape(x.shape)


def standardized(kernel):
    """Returns a kernel [n, units] with columns of mean 0 and norm 1."""
    kernel = kernel - kernel.mean(0)
    return kernel * jax.lax.rsqrt((kernel * kernel).sum(0) + 1e-4)


def patches(x, k, stride, same):
    """Returns the k x k patches of images, [batch, height, width, k * k * channels]."""
    pads, sizes = [], []
    for size in x.shape[1:3]:
        out = -(-size // stride) if same else (size - k) // stride + 1
        pad = max((out - 1) * stride + k - size, 0) if same else 0
        pads.append((pad // 2, pad - pad // 2))
        sizes.append((out - 1) * stride + 1)
    x = jnp.pad(x, ((0, 0), *pads, (0, 0)))
    parts = [
        x[:, i : i + sizes[0] : stride, j : j + sizes[1] : stride]
        for i in range(k)
        for j in range(k)
    ]
    return jnp.concatenate(parts, -1)


def flat(x):
    """Returns [batch, n]."""
    return x.reshape(x.shape[0], -1)


def pooled(x, parts):
    """Returns the means of parts x parts regions of a map, flattened."""
    edges = [round(i * x.shape[1] / parts) for i in range(parts + 1)]
    ends = list(zip(edges, edges[1:], strict=False))
    return flat(jnp.stack([x[:, a:b, c:d].mean((1, 2)) for a, b in ends for c, d in ends], 1))


def linear(tape, x):
    """A linear classifier."""
    return tape.dense(flat(x), 10)


def dense(*units):
    """Returns a network of dense layers with ReLU."""

    def net(tape, x):
        x = flat(x)
        for count in units:
            x = jax.nn.relu(tape.dense(x, count))
        return tape.dense(x, 10)

    return net


def small(activation):
    """Returns the CNN of 26,010 weights for 28 x 28 pixels of Papernot et al. (2020)."""

    def pool(x):
        x = jnp.maximum(x[:, 1:], x[:, :-1])
        return jnp.maximum(x[:, :, 1:], x[:, :, :-1])

    def net(tape, x):
        x = pool(activation(tape.conv(x, 16, 8, 2)))
        x = pool(activation(tape.conv(x, 32, 4, 2, same=False)))
        return tape.dense(activation(tape.dense(flat(x), 32)), 10)

    return net


def cnn5k(tape, x):
    """The CNN of `experiments.high_accuracy.clips` for 8 x 8 pixels."""
    x = jax.nn.relu(tape.conv(x, 16, 3))
    batch, height, width, channels = x.shape
    x = x.reshape(batch, height // 2, 2, width // 2, 2, channels).max((2, 4))
    return tape.dense(flat(jax.nn.relu(tape.conv(x, 16, 3))), 10)


def resnet(head="gap", ws=False, widths=(16, 32, 64), stem_stride=1, groups=8):
    """Returns a residual CNN with a block of each width, and a global or a 3 x 3 average."""

    def net(tape, x):
        x = tape.conv(x, 16, 3, stem_stride, standardize=ws)
        for i, width in enumerate(widths):
            stride = 2 if i else 1
            y = jax.nn.relu(tape.norm(x, groups))
            is_same = x.shape[-1] == width
            skip = x if is_same else tape.conv(x, width, 1, stride, standardize=ws)
            y = tape.conv(y, width, 3, stride, standardize=ws)
            y = jax.nn.relu(tape.norm(y, groups))
            x = skip + tape.conv(y, width, 3, standardize=ws)
        x = jax.nn.relu(tape.norm(x, groups))
        return tape.dense(x.mean((1, 2)) if head == "gap" else pooled(x, 3), 10)

    return net


def transformer(width, heads, depth, lora=False, classes=4, words=1000):
    """Returns a transformer; with `lora`, updates of rank 4 and the last layer train."""

    def net(tape, tokens):
        batch, length = tokens.shape
        size = width // heads
        if lora:
            x = tape.fixed((words, width))[tokens] + tape.fixed((length, width))
        else:
            x = tape.tap(tape.weight((words, width), 0.05)[tokens], ("words", words), tokens)
            x = tape.tap(x + tape.weight((length, width), 0.05), ("places", None))

        def matrix(x, units, fans=None):
            if not lora:
                return tape.dense(x, units, fans=fans)
            y = x @ tape.fixed((x.shape[-1], units)) + tape.fixed((units,))
            low = tape.dense(x, 4, bias=False, limit=math.sqrt(3 / x.shape[-1]))
            return y + tape.dense(low, units, bias=False, limit=0.0)

        def norm(x):
            if not lora:
                return tape.norm(x)
            z = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-3)
            return z * tape.fixed((width,)) + tape.fixed((width,))

        for _ in range(depth):
            z, fans = norm(x), (width * heads, width * size)
            parts = (batch, length, heads, size)
            query, key, value = (matrix(z, width, fans).reshape(parts) for _ in range(3))
            scores = jnp.einsum("blhk,bmhk->bhlm", query, key) / math.sqrt(size)
            z = jnp.einsum("bhlm,bmhk->blhk", jax.nn.softmax(scores), value)
            x = x + matrix(z.reshape(batch, length, width), width, (width, heads * width))
            x = x + matrix(jax.nn.gelu(matrix(norm(x), 4 * width)), width)
        return tape.dense(norm(x).mean(1), classes)

    return net


def specs_of(net, shape):
    """Returns the shape, limit and constant of each trained weight."""
    tape = Tape()
    dtype = jnp.float32 if len(shape) == 3 else jnp.int32
    jax.eval_shape(lambda x: net(tape, x), jax.ShapeDtypeStruct((2, *shape), dtype))
    return tape.specs


def initial(specs, seed):
    """Returns initial weights, float32 arrays."""
    rng = np.random.default_rng(seed)
    return [
        (rng.uniform(-limit, limit, shape) + constant).astype("float32")
        for shape, limit, constant in specs
    ]


def clipped_sum(net, params, frozen, x, y, valid, is_automatic, clip=0.1):
    """Returns the sum of clipped gradients, divided by the clip, and the sum of norms.

    Args:
        net: A function of a tape and a batch.
        params: List of arrays.
        frozen: List of arrays.
        x: Array [B, ...].
        y: Int array [B].
        valid: Array [B], 1 or 0 to leave an example out.
        is_automatic: Bool; divides gradients by their norm plus 0.01 in place of clipping.
        clip: Float.
    """
    tape = Tape(params, None, frozen)
    jax.eval_shape(lambda x: net(tape, x), x)

    def loss(taps):
        record = Tape(params, taps, frozen)
        logs = jax.nn.log_softmax(net(record, x))
        return -jnp.take_along_axis(logs, y[:, None], 1).sum(), record.records

    grads, records = jax.grad(loss, has_aux=True)([jnp.zeros(shape) for shape in tape.shapes])
    layers = [
        (kind, extra, g.reshape(len(x), -1, g.shape[-1]), record)
        for (kind, extra), g, record in zip(tape.kinds, grads, records, strict=True)
    ]
    squares = sum(_squared_norms(*layer) for layer in layers)
    norms = jnp.sqrt(squares)
    clipped = jnp.minimum(1 / clip, 1 / jnp.maximum(norms, 1e-30))
    factors = jnp.where(is_automatic, 1 / (norms + 0.01), clipped) * valid
    sums = []
    for kind, extra, g, record in layers:
        sums += _sums(kind, extra, g * factors[:, None, None], record)
    return sums, (norms * valid).sum()


def _squared_norms(kind, extra, g, record):
    """Returns the squared norms [B] of a layer's gradients from those of its output [B, L, n]."""
    if kind == "norm":
        return (g.sum(1) ** 2).sum(1) + ((g * record[0]).sum(1) ** 2).sum(1)
    if kind == "words":
        same = record[0][:, :, None] == record[0][:, None, :]
        return (jnp.einsum("bld,bmd->blm", g, g) * same).sum((1, 2))
    if kind == "places":
        return (g * g).sum((1, 2))
    x, kernel = record
    x = x.reshape(len(x), -1, x.shape[-1])
    length, size, units = x.shape[1], x.shape[2], g.shape[2]
    biases = (g.sum(1) ** 2).sum(1) if extra else 0.0
    if kind == "dense" and length * (size + units) < size * units:
        products = jnp.einsum("bld,bmd->blm", x, x) * jnp.einsum("bld,bmd->blm", g, g)
        return products.sum((1, 2)) + biases
    each = jnp.einsum("bld,ble->bde", x, g)
    if kind == "standardized":
        _, back = jax.vjp(standardized, kernel)
        each = jax.vmap(lambda e: back(e)[0])(each)
    return (each * each).sum((1, 2)) + biases


def _sums(kind, extra, g, record):
    """Returns the sums of a layer's gradients, a list with an array for each weight."""
    if kind == "norm":
        return [(g * record[0]).sum((0, 1)), g.sum((0, 1))]
    if kind == "words":
        return [jnp.zeros((extra, g.shape[2])).at[record[0]].add(g)]
    if kind == "places":
        return [g.sum(0)]
    x, kernel = record
    total = x.reshape(-1, x.shape[-1]).T @ g.reshape(-1, g.shape[-1])
    if kind == "standardized":
        total = jax.vjp(standardized, kernel)[1](total)[0]
    return [total, g.sum((0, 1))] if extra else [total]
