"""Each type of operation that is vectorized gives the results of separate examples."""

import functools
import itertools
import os

import numpy as np
import pytest
import tensorflow as tf
from cases import slow_but
from tensorflow.python.ops.parallel_for import pfor

from tfdpx._keras import tensorflow_internals
from tfdpx.per_example.vectorize import SAFE_TO_VECTORIZE, TakesBatch, vectorized_map

raw = tf.raw_ops
ROWS = 9
SIZES = [1, ROWS]
# The values of an argument, by the first letter of its name; the other letters are lengths.
DRAWS = {
    "f": lambda rng, shape: rng.normal(size=shape).astype("float32"),
    "p": lambda rng, shape: rng.uniform(0.2, 3.0, shape).astype("float32"),  # positive
    "u": lambda rng, shape: rng.uniform(-0.9, 0.9, shape).astype("float32"),
    "i": lambda rng, shape: rng.integers(0, 3, shape).astype("int32"),  # an index
    "b": lambda rng, shape: rng.integers(0, 2, shape).astype("bool"),
    "l": lambda rng, shape: np.asarray(rng.integers(3, 5, shape), "int32"),  # a length
}


def case(function, *arguments):
    """Returns a function of one example, with kinds and shapes of arguments, such as "f:ab3"."""
    return function, arguments


def of(name, *arguments, **attributes):
    """Returns a case of the raw operation `name`, by the names of its arguments: "x=f:ab"."""
    names, kinds = zip(*(argument.split("=") for argument in arguments), strict=True)
    return case(
        lambda *tensors: getattr(raw, name)(**dict(zip(names, tensors, strict=True)), **attributes),
        *kinds,
    )


def unary(names, kind="f", name="x"):
    return [of(operation, f"{name}={kind}:ab") for operation in names.split()]


def binary(names, x="f", y="f", names_of="xy"):
    """Returns cases with two shapes of different ranks, which broadcast."""
    one, other = names_of
    return [of(operation, f"{one}={x}:b", f"{other}={y}:a1") for operation in names.split()]


def grad(name, x="f", **attributes):
    """Returns a case of a gradient's operation, with arguments of equal shapes."""
    return of(name, f"{attributes.pop('one', 'y')}={x}:ab", f"{attributes.pop('g', 'dy')}=f:ab",
              **attributes)  # fmt: skip


def looped(x, w):
    """Loops a fixed number of rounds, with lists in the gradient."""
    w = tf.reshape(w[:1], [1, 1])
    return tf.while_loop(
        lambda i, y, _: i < 3,
        lambda i, y, z: (i + 1, tf.tanh(y * w) + x, z + tf.reduce_sum(y)),
        (0, x, tf.constant(0.0)),
        maximum_iterations=4,
    )[1:]


def listed(x):
    """Reads and writes lists as a recurrent layer does."""
    inputs = tf.TensorArray(tf.float32, tf.shape(x)[0], element_shape=[x.shape[1]]).unstack(x)
    states = tf.TensorArray(tf.float32, tf.shape(x)[0], element_shape=[x.shape[1]])

    def body(i, state, states):
        state = tf.tanh(state + inputs.read(i))
        return i + 1, state, states.write(i, state)

    loop = tf.while_loop(lambda i, *_: i < tf.shape(x)[0], body, (0, x[0], states))
    return loop[1], loop[2].stack()


def still(function):
    """Stops the gradient of `function`: it does not exist."""
    return lambda *tensors, **kwargs: tf.nest.map_structure(
        tf.stop_gradient, function(*tf.nest.map_structure(tf.stop_gradient, tensors), **kwargs)
    )


def called(function):
    return lambda *tensors: tf.function(function, autograph=False)(*tensors)


UNARY = [
    *unary("Abs Atan Asinh Ceil Cos Cosh Erf Erfc Exp Expm1 Floor IsFinite IsInf IsNan Neg"),
    *unary("OnesLike Rint Round Sigmoid Sign Sin Sinh Square Tan Tanh ZerosLike"),
    *unary("Relu Relu6 Elu Selu Softplus Softsign LeakyRelu", name="features"),
    *unary("Acos Asin Atanh Erfinv", "u"),
    *unary("Digamma Inv Lgamma Log Log1p Ndtri Reciprocal Rsqrt Sqrt", "p"),
    *unary("Identity StopGradient", name="input"),
    *unary("LogicalNot", "b"),
    *unary("Invert", "i"),
]
BINARY = [
    of("AddV2", "x=f:ab", "y=f:b"),
    of("Mul", "x=f:ab", "y=f:ab"),
    *binary("Add AddV2 Maximum Minimum Mul MulNoNan SquaredDifference Sub"),
    *binary("Equal NotEqual Greater GreaterEqual Less LessEqual", "i", "i"),
    *binary("Div DivNoNan FloorDiv FloorMod RealDiv Xdivy", "f", "p"),
    *binary("Atan2", "f", "p", "yx"),
    *binary("Pow Xlogy Xlog1py", "p", "p"),
    *binary("Mod TruncateDiv TruncateMod", "i", "l"),
    *binary("Igamma Igammac", "p", "p", "ax"),
    *binary("LogicalAnd LogicalOr", "b", "b"),
    *binary("BitwiseAnd BitwiseOr BitwiseXor LeftShift RightShift", "i", "i"),
    of("Equal", "x=f:ab", "y=f:ab"),
    case(lambda x, y: tf.add_n([x, y, x]), "f:ab", "f:ab"),
    case(lambda x, low: raw.ClipByValue(t=x, clip_value_min=low, clip_value_max=low + 1),
         "f:ab", "f:"),
    *(case(functools.partial(tf.cast, dtype=d), "f:ab") for d in ("int32", "float16", "bool")),
    case(lambda x: tf.cast(x, "float32"), "i:ab"),
    case(lambda x: tf.debugging.check_numerics(x, "no"), "f:ab"),
    case(lambda x: tf.ensure_shape(x, [None, None]), "f:ab"),
    case(lambda c, x, y: tf.where(c, x, y), "b:ab", "f:ab", "f:ab"),
    case(lambda c, x, y: tf.where(c, x, y), "b:b", "f:ab", "f:"),
    case(lambda c, x, y: raw.Select(condition=c, x=x, y=y), "b:ab", "f:ab", "f:ab"),
    case(lambda c, x, y: raw.Select(condition=c, x=x, y=y), "b:", "f:ab", "f:ab"),
    case(lambda c, x, y: raw.Select(condition=c, x=x, y=y), "b:a", "f:ab", "f:ab"),
    case(lambda x: raw.IdentityN(input=[x, x * 2])[1], "f:ab"),
    case(lambda x: raw.Bucketize(input=x, boundaries=[-1.0, 0.0, 0.5]), "f:ab"),
    case(lambda x, y: tf.abs(tf.complex(x, y)), "f:ab", "f:ab"),
    case(lambda x, y: tf.math.angle(tf.complex(x, y)), "f:ab", "f:ab"),
    case(lambda x, y: tf.math.real(tf.math.conj(tf.complex(x, y))), "f:ab", "f:ab"),
    case(lambda x, y: tf.math.imag(tf.complex(x, y)), "f:ab", "f:ab"),
    case(tf.linalg.cross, "f:a3", "f:a3"),
]  # fmt: skip
GRADIENTS = [
    *(grad(f"{n}Grad", "u") for n in ("Reciprocal", "Sigmoid", "Tanh")),
    *(grad(f"{n}Grad", "p") for n in ("Rsqrt", "Sqrt")),
    *(grad(f"{n}Grad", one="features", g="gradients")
      for n in ("LeakyRelu", "Relu", "Relu6", "Softplus")),
    *(grad(f"{n}Grad", one="outputs", g="gradients") for n in ("Elu", "Selu")),
    of("BiasAddGrad", "out_backprop=f:abc"),
    of("BiasAddGrad", "out_backprop=f:abcd", data_format="NCHW"),
]  # fmt: skip
PLACES = [
    case(lambda x: tf.reshape(x, [-1]), "f:abc"),
    case(lambda x: tf.reshape(x, [x.shape[1], -1, 1]), "f:abc"),
    case(lambda x: tf.reshape(x, tf.reverse(tf.shape(x), [0])), "f:abc"),
    case(lambda x: raw.ConjugateTranspose(x=x, perm=[1, 2, 0]), "f:abc"),
    case(lambda x: tf.transpose(x, [2, 0, 1]), "f:abc"),
    case(lambda x: (tf.expand_dims(x, 1), tf.expand_dims(x, -1), tf.expand_dims(x, 0)), "f:ab"),
    case(lambda x: (tf.squeeze(x), tf.squeeze(x, [1]), tf.squeeze(x, [-2])), "f:a1b"),
    case(lambda x, y: (tf.concat([x, y], 0), tf.concat([y, x], -1)), "f:ab", "f:ab"),
    case(lambda x, y: (tf.stack([x, y]), tf.stack([y, x], -1), tf.stack([x, y], 1)),
         "f:ab", "f:ab"),
    case(lambda x: (tf.unstack(x, axis=0)[-1], tf.unstack(x, axis=-1)[0]), "f:ab"),
    case(lambda x: tf.split(x, 2, axis=-1)[1], "f:a4"),
    case(lambda x: tf.split(x, [1, 3], axis=0)[1], "f:4b"),
    case(lambda x: tf.slice(x, [0, 1], [-1, 2]), "f:a4"),
    case(lambda x, at: tf.slice(x, [at, 0], [1, 1]), "f:4b", "i:"),
    case(lambda x: (x[..., 1:], x[0], x[:, tf.newaxis, ::-1], x[-1:, :2]), "f:a4"),
    case(lambda x, at: (x[at], x[:, at : at + 2]), "f:55", "i:"),
    case(lambda x: tf.pad(x, [[1, 0], [0, 2]]), "f:ab"),
    case(lambda x, v: tf.pad(x, [[1, 0], [0, 2]], constant_values=v), "f:ab", "f:"),
    case(lambda x: tf.tile(x, [2, 3]), "f:ab"),
    case(lambda x: tf.broadcast_to(x, [2, x.shape[0], 3]), "f:a1"),
    case(lambda x, v: tf.fill(tf.shape(x), v), "f:ab", "f:"),
    case(lambda x: (tf.reverse(x, [0]), tf.reverse(x, [-1, 0])), "f:ab"),
    case(lambda x: (tf.roll(x, 1, 0), tf.roll(x, [1, 2], [0, 1])), "f:ab"),
    case(lambda x, s: tf.roll(x, s, 1), "f:ab", "i:"),
    case(lambda x: (tf.shape(x), raw.Size(input=x), raw.Rank(input=x)), "f:ab"),
    case(lambda x, y: tf.shape_n([x, y])[1], "f:ab", "f:bc"),
    case(lambda x: tf.one_hot(x, 4, axis=0), "i:ab"),
    case(lambda x, on: tf.one_hot(x, 4, on, 0.5), "i:ab", "f:"),
    case(lambda x, at: (tf.gather(x, at), tf.gather(x, at, axis=-1)), "f:4b3", "i:a"),
    case(lambda x, at: (tf.gather(x, at), tf.gather(x, at, axis=1)), "f:33", "i:"),
    case(lambda x, at: tf.gather(x, at, batch_dims=1), "f:a4b", "i:ac"),
    case(lambda x, at: tf.gather(x, at, axis=2, batch_dims=1), "f:ab4", "i:ac"),
    case(lambda x, at: tf.gather_nd(x, at), "f:44b", "i:a2"),
    case(lambda x, at, v: tf.tensor_scatter_nd_update(x, at[:, None] * 0 + [[0], [2]], v),
         "f:4b", "i:2", "f:2b"),
    case(lambda x: (tf.linalg.diag(x), tf.linalg.diag_part(x)), "f:33"),
    case(lambda x, d: tf.linalg.set_diag(x, d), "f:a33", "f:a3"),
    case(lambda x: tf.linalg.band_part(x, 1, 0), "f:a44"),
    case(lambda x: (raw.MatrixDiag(diagonal=x), raw.MatrixDiagPart(input=x)), "f:a33"),
    case(lambda x, d: raw.MatrixSetDiag(input=x, diagonal=d), "f:a33", "f:a3"),
    case(lambda x: tf.nn.space_to_depth(x, 2), "f:a44b"),
    case(lambda x: tf.nn.depth_to_space(x, 2), "f:ab24"),
    case(lambda x: tf.space_to_batch(x, [2, 2], [[0, 0], [1, 1]]), "f:a44b"),
    case(lambda x: tf.batch_to_space(x, [2, 2], [[0, 1], [0, 0]]), "f:4bab"),
    case(lambda x, v: (tf.searchsorted(x, v), tf.searchsorted(x, v, "right")), "f:a4", "f:ab"),
]  # fmt: skip
REDUCTIONS = [
    *(case(lambda x, f=f, a=axis, k=keep: f(x, axis=a, keepdims=k), kind)
      for f, kind in (
          *((f, "f:abc") for f in (tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min,
                                   still(tf.reduce_prod))),
          (tf.reduce_all, "b:abc"), (tf.reduce_any, "b:abc"))
      for axis, keep in ((None, False), (0, True), (-1, False), ([0, 2], False))),
    *(case(lambda x, f=f: (f(x), f(x, axis=-1), f(x, axis=1)), "f:abc")
      for f in (tf.argmax, tf.argmin)),
    *(case(lambda x, f=f: (f(x), f(x, axis=-1, reverse=True), f(x, axis=1, exclusive=True)),
           "f:abc") for f in (tf.cumsum, tf.math.cumprod)),
    case(lambda x: (tf.nn.softmax(x), tf.nn.softmax(x, 0), tf.nn.log_softmax(x)), "f:abc"),
    case(lambda x: tf.math.top_k(x, 2), "f:a4"),
    case(lambda y, x: tf.nn.softmax_cross_entropy_with_logits(tf.nn.softmax(y), x), "f:ab", "f:ab"),
    case(lambda y, x: tf.nn.sparse_softmax_cross_entropy_with_logits(y, x), "i:a", "f:a4"),
    *(case(lambda x, s, f=f: f(x, s, 4), "f:ab", "i:a")
      for f in (tf.math.unsorted_segment_sum, tf.math.unsorted_segment_max,
                tf.math.unsorted_segment_min, tf.math.unsorted_segment_prod)),
    case(lambda x, s: tf.math.unsorted_segment_sum(x, s, 4), "f:abc", "i:ab"),
]  # fmt: skip
PRODUCTS = [
    *(case(lambda x, y, a=a, b=b: raw.MatMul(a=x, b=y, transpose_a=a, transpose_b=b),
           "f:ba" if a else "f:ab", "f:cb" if b else "f:bc")
      for a in (False, True) for b in (False, True)),
    *(case(lambda x, y, a=a, b=b: tf.matmul(x, y, transpose_a=a, transpose_b=b),
           "f:dba" if a else "f:dab", "f:dcb" if b else "f:dbc")
      for a in (False, True) for b in (False, True)),
    case(tf.matmul, "f:1ab", "f:dbc"),
    case(lambda x, y: raw.BatchMatMul(x=x, y=y), "f:dab", "f:dbc"),
    *(case(lambda *t, e=e: tf.einsum(e, *t), *kinds) for e, *kinds in (
        ("ab,bc->ac", "f:ab", "f:bc"), ("abc,cd->adb", "f:abc", "f:cd"),
        ("ab,ab->", "f:ab", "f:ab"), ("abc,bcd->abd", "f:abc", "f:bcd"),
        ("abc,adc->abd", "f:abc", "f:adc"),
        ("abcd,acbe->dbe", "f:abcd", "f:acb3"), ("...a,a->...", "f:bca", "f:a"))),
    case(lambda x, b: tf.nn.bias_add(x, b), "f:abc", "f:c"),
    case(lambda x, b: tf.nn.bias_add(x, b, "NCHW"), "f:abcd", "f:b"),
    case(lambda x: tf.linalg.cholesky(x @ tf.transpose(x) + tf.eye(3)), "f:33"),
    case(lambda x, y: tf.linalg.solve(x @ tf.transpose(x) + tf.eye(3), y), "f:33", "f:3a"),
    case(lambda x, y: tf.linalg.triangular_solve(x + 3 * tf.eye(3), y), "f:33", "f:3a"),
    case(lambda x: tf.linalg.inv(x @ tf.transpose(x) + tf.eye(3)), "f:33"),
    case(lambda x: tf.linalg.slogdet(x @ tf.transpose(x) + tf.eye(3)), "f:33"),
    case(lambda x: tf.abs(tf.signal.fft(tf.cast(x, "complex64"))), "f:ab"),
    case(lambda x: tf.abs(tf.signal.fft2d(tf.cast(x, "complex64"))), "f:ab"),
    case(lambda x: tf.abs(tf.signal.ifft(tf.cast(x, "complex64"))), "f:ab"),
    case(lambda x: tf.abs(tf.signal.ifft2d(tf.cast(x, "complex64"))), "f:ab"),
    case(lambda x: (tf.signal.irfft(tf.signal.rfft(x)), tf.signal.irfft2d(tf.signal.rfft2d(x))),
         "f:a44"),
]  # fmt: skip
IMAGES = [
    *(case(lambda x, w, s=s, p=p: tf.nn.conv2d(x, w, s, p), "f:b56c", "f:23cd")
      for s, p in ((1, "SAME"), (2, "VALID"))),
    # Not every CPU has its gradient.
    case(still(lambda x, w: tf.nn.conv2d(x, w, 1, "VALID", dilations=2)), "f:b56c", "f:23cd"),
    case(lambda x, w: tf.nn.conv2d_transpose(x, w, [1, 6, 8, w.shape[2]], 2, "SAME"),
         "f:134c", "f:23dc"),
    *(case(lambda x, w, s=s, p=p: tf.nn.depthwise_conv2d(x, w, s, p), "f:b56c", "f:23cd")
      for s, p in (([1, 1, 1, 1], "SAME"), ([1, 2, 2, 1], "VALID"))),
    case(lambda x, w: tf.nn.conv3d(x, w, [1] * 5, "SAME"), "f:1345c", "f:222cd"),
    *(case(lambda x, f=f, s=s, p=p: f(x, 2, s, p), "f:b56c")
      for f in (tf.nn.max_pool2d, tf.nn.avg_pool2d) for s, p in ((1, "SAME"), (2, "VALID"))),
    *(case(lambda x, f=f: f(x, 2, 2, "SAME"), "f:b345c")
      for f in (tf.nn.max_pool3d, tf.nn.avg_pool3d)),
    case(still(tf.image.adjust_contrast), "p:a56c", "p:"),
    case(still(tf.image.adjust_hue), "p:b563", "u:"),
    case(still(tf.image.adjust_saturation), "p:b563", "p:"),
    case(lambda x, m, v: raw.FusedBatchNormV3(
        x=x, scale=m, offset=v, mean=v, variance=m, is_training=False)[0],
        "f:b56c", "p:c", "f:c"),
    case(lambda x, m, v: raw.FusedBatchNormV3(
        x=x, scale=m, offset=v, mean=[], variance=[], is_training=True)[0],
        "f:b56c", "p:c", "f:c"),
]  # fmt: skip
STRUCTURES = [
    case(looped, "f:ab", "f:c"),
    case(still(listed), "f:3b"),
    case(called(lambda x, y: tf.tanh(x) * y), "f:ab", "f:ab"),
]
# TensorFlow fails to vectorize these, some only if one argument is the same for all examples.
ONE_BY_ONE = [
    case(lambda x, y: raw.ApproximateEqual(x=x, y=y, tolerance=0.5), "f:ab", "f:ab"),
    case(lambda x, at: raw.Gather(params=x, indices=at), "f:4b", "i:ac"),
    case(tf.reduce_prod, "f:abc"),
    case(listed, "f:3b"),
    case(lambda c, x, y: tf.cond(c, lambda: tf.tanh(x), lambda: x * y), "b:", "f:ab", "f:ab"),
]
GROUPS = {
    "unary": UNARY,
    "binary": BINARY,
    "gradients": GRADIENTS,
    "places": PLACES,
    "reductions": REDUCTIONS,
    "products": PRODUCTS,
    "images": IMAGES,
    "structures": STRUCTURES,
}


def drawn(arguments, rng):
    """Draws arrays [ROWS, ...] for the arguments of a case; letters are lengths from 1 to 4."""
    lengths = dict(zip("abcd", rng.integers(1, 5, 4), strict=True))
    shapes = [[int(lengths.get(c, c)) for c in argument[2:]] for argument in arguments]
    return [
        DRAWS[argument[0]](rng, [ROWS, *shape])
        for argument, shape in zip(arguments, shapes, strict=True)
    ]


def with_gradients(function):
    """Returns a function's outputs, and the gradients of their sum of sines at the inputs."""

    def apply(*tensors):
        sources = [t for t in tensors if t.dtype.is_floating]
        with tf.GradientTape() as tape:
            tape.watch(sources)
            outputs = tf.nest.flatten(function(*tensors))
            real = [tf.reduce_sum(tf.sin(t)) for t in outputs if t.dtype.is_floating]
            total = tf.add_n(real) if real else tf.zeros([])
        gradients = tape.gradient(total, sources, unconnected_gradients="zero") if real else []
        return outputs, [tf.convert_to_tensor(g) for g in gradients]

    return apply


def each_of(cases, examples):
    """Returns a list of outputs and gradients for each case, each with its arguments."""
    return [
        sum(with_gradients(function)(*arguments), [])
        for (function, _), arguments in zip(cases, examples, strict=True)
    ]


def alone(cases, arguments):
    """Returns a traced function of nests of int32, the example for each argument."""

    @tf.function(autograph=False)
    def one(rows):
        return each_of(
            cases, tf.nest.map_structure(lambda t, i: tf.constant(t)[i], arguments, rows)
        )

    return one.get_concrete_function(
        tf.nest.map_structure(lambda _: tf.TensorSpec([], "int32"), arguments)
    )


def vectorized(cases, arguments, stacked, rows, loop):
    """Returns a traced function that runs all cases of `alone` on several examples, vectorized."""

    def one(elements):
        elements = iter(elements)
        return each_of(
            cases,
            tf.nest.map_structure(
                lambda t, s: next(elements) if s else tf.constant(t[0]), arguments, stacked
            ),
        )

    @tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.int32)])
    def run(n):
        flat = zip(tf.nest.flatten(arguments), tf.nest.flatten(stacked), strict=True)
        elements = [tf.constant(t)[: rows or n] for t, s in flat if s]
        return vectorized_map(one, elements, loop=loop)

    return run


def assert_held(cases, rng, places=(None, 0, 1, 2), known=(), loop=False):
    """Fails unless all vectorized cases equal the results of separate examples.

    First all arguments differ between examples, also with sizes `known` to the trace; then one
    argument at a time. A case that TensorFlow does not vectorize fails, unless `loop` is None.
    """
    tensors = [drawn(arguments, rng) for _, arguments in cases]
    one = alone(cases, tensors)
    for place in places:
        stacked = [[place in (None, i) for i in range(len(kinds))] for _, kinds in cases]
        chosen = [
            k for k, flags in enumerate(stacked) if place is None or len(flags) > max(1, place)
        ]
        if not chosen:
            continue
        examples = [
            one(tf.nest.map_structure(lambda s, row=row: tf.constant(row if s else 0), stacked))
            for row in range(ROWS)
        ]
        rows = [tf.nest.flatten([outputs[k] for k in chosen]) for outputs in examples]
        expected = [np.stack(parts) for parts in zip(*rows, strict=True)]
        arguments = [[nest[k] for k in chosen] for nest in (cases, tensors, stacked)]
        any_size = vectorized(*arguments, None, loop)
        for n in SIZES:
            run = any_size
            if place is None and n in known:
                run = vectorized(*arguments, n, loop)
            for output, wanted in zip(tf.nest.flatten(run(tf.constant(n))), expected, strict=True):
                np.testing.assert_allclose(output, wanted[:n], rtol=2e-4, atol=2e-4)


def types_of(cases):
    """Returns the types of operations in the functions of cases, including loops and branches."""
    types = set()

    def look(graph):
        for operation in graph.get_operations():
            types.add(operation.type)
            for _, body in tensorflow_internals.called(operation):
                look(body)

    examples = [drawn(arguments, np.random.default_rng(0)) for _, arguments in cases]
    specs = tf.nest.map_structure(lambda t: tf.TensorSpec(t.shape[1:], t.dtype), examples)
    traced = tf.function(functools.partial(each_of, cases), autograph=False)
    look(traced.get_concrete_function(specs).graph)
    return types


def rng():
    """Returns a generator with another seed in each run, except in continuous integration."""
    return np.random.default_rng(0 if "CI" in os.environ else None)


@pytest.mark.parametrize("group", slow_but(GROUPS, "unary"))
def test_examples_are_as_alone(group):
    places = (None, 0) if group == "structures" else (None, 0, 1, 2)  # Loops take long to trace.
    assert_held(GROUPS[group], rng(), places, known=(ROWS,) if group == "places" else ())


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ONE_BY_ONE)))
def test_examples_that_run_one_by_one_are_as_alone(number):
    assert_held(ONE_BY_ONE[number : number + 1], rng(), loop=None)


def test_loops_that_an_example_ends():
    """TensorFlow cannot vectorize the gradient of these loops, but can vectorize their function."""

    def grown(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda y: tf.reduce_sum(y) < 9.0, lambda y: [y * (1.5 + x)], [x])[0]
        return tape.gradient(y, x)

    x = tf.random.uniform([5, 2], 0.5, 3.0, seed=1)
    grown_alone = [tf.function(grown, autograph=False)(row) for row in x]
    np.testing.assert_allclose(vectorized_map(grown, x), grown_alone, rtol=1e-5)


@pytest.mark.slow
def test_every_type_is_compared():
    # The first three give no tensor, and the others have the converter of their stateless forms.
    assert "PadV2" not in SAFE_TO_VECTORIZE  # TensorFlow's own converter pads with zeros.
    untested = {"Assert", "Print", "PrintV2", "If", "StatefulPartitionedCall", "While"}
    compared = types_of([*itertools.chain(*GROUPS.values()), *ONE_BY_ONE])
    assert compared >= SAFE_TO_VECTORIZE - untested, sorted(SAFE_TO_VECTORIZE - untested - compared)


@pytest.mark.planted("a converter that is wrong")
def test_wrong_converters_are_found_and_others_not_used(monkeypatch):
    def wrong(operation):
        return pfor.wrap(tf.reverse(operation.stacked_input(0), [0]), True)

    cases = [case(lambda x: tf.reverse(x, [0]), "f:33"), case(lambda x: raw.BesselI1(x=x), "f:ab")]
    assert_held(cases, rng())
    for name in ("ReverseV2", "BesselI1"):
        monkeypatch.setitem(pfor._pfor_converter_registry, name, wrong)
    with pytest.raises(AssertionError, match="Mismatched elements"):
        assert_held(cases[:1], np.random.default_rng(0))
    assert_held(cases[1:], np.random.default_rng(0))


@pytest.mark.parametrize("how", ["sum", "max", "min", "prod"])
def test_segments_of_no_example_are_not_those_of_another(how):
    ids = tf.constant([[0, 1, 5], [2, 2**31 - 1, 4], [-7, 3, 1]])
    data = tf.random.uniform([3, 3], seed=2)
    function = getattr(tf.math, f"unsorted_segment_{how}")
    together = vectorized_map(lambda row: function(row[0], row[1], 4), (data, ids))
    alone = [function(d, tf.where(i < 4, i, -1), 4) for d, i in zip(data, ids, strict=True)]
    np.testing.assert_allclose(together, alone, rtol=1e-6)


@pytest.mark.parametrize("jit_compile", [False, True])
def test_values_computed_from_the_batch_are_refused(jit_compile):
    scale = tf.Variable(2.0)

    def mapped(x, function):
        @tf.function(jit_compile=jit_compile, autograph=False)
        def run(x):
            mean = tf.reduce_mean(x)
            return vectorized_map(lambda row: function(row, mean), x, "The layer")

        return run(x)

    x = tf.range(5.0)
    np.testing.assert_allclose(mapped(x, lambda row, _: row * scale), 2 * x)
    with pytest.raises(TakesBatch, match="The layer reads '.*Mean.*computed from other examples"):
        mapped(x, lambda row, mean: row - mean)
