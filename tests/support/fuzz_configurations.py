"""Random whole configurations of a private training, compared with batches of one."""

import contextlib
import warnings

import engines
import keras
import numpy as np
import oracle
import seeds
import tensorflow as tf
from hypothesis import strategies as st

import tfdpx
from tfdpx.layers import GroupNorm, SkipInit, WSConv2D

L = keras.layers
CLASSES = 4


def twice(x):
    layer = L.Dense(6, "tanh")
    return layer(layer(x))


def residual(x):
    return L.Add()([x, SkipInit()(L.Conv2D(2, 3, padding="same", activation="relu")(x))])


IMAGE, SERIES = (6, 6, 2), (5, 4)
# From names to the shape of an example and the layers before the last one.
MODELS = {
    "dense": ((6,), lambda x: L.Dense(5, "relu")(x)),
    "twice": ((6,), twice),
    "convolution": (IMAGE, lambda x: L.MaxPooling2D()(GroupNorm(2)(L.Conv2D(4, 3)(x)))),
    "standardized": (IMAGE, lambda x: WSConv2D(4, 3, activation="relu")(x)),
    "separable": (IMAGE, lambda x: L.SeparableConv2D(4, 3, activation="relu")(x)),
    "residual": (IMAGE, residual),
    "lstm": (SERIES, lambda x: L.LSTM(3)(x)),
    "conv1d": (SERIES, lambda x: L.Conv1D(3, 2, activation="relu")(x)),
    "attention": (
        SERIES,
        lambda x: L.LayerNormalization()(L.MultiHeadAttention(2, 3)(x, x) + x),
    ),
    "einsum": (SERIES, lambda x: L.EinsumDense("abc,cd->abd", (5, 3), bias_axes="d")(x)),
    "tokens": ((5,), lambda x: L.GlobalAveragePooling1D()(L.Embedding(7, 3)(x))),
}

# From names to the loss and the kind of its targets.
LOSSES = {
    "sparse": (lambda: keras.losses.SparseCategoricalCrossentropy(from_logits=True), "labels"),
    "smoothed": (
        lambda: keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1),
        "one-hot",
    ),
    "squares": (keras.losses.MeanSquaredError, "numbers"),
}

OPTIMIZERS = {"sgd": tfdpx.DPSGD, "adam": tfdpx.DPAdam}

# The allowed distance of clipped sums from the oracle's, in units of C for each example.
TOLERANCES = {"float32": 2e-3, "float64": 2e-3, "mixed_bfloat16": 0.1, "mixed_float16": 0.03}
HOSTILE = {"infinite": np.inf, "not a number": np.nan, "huge": 1e25, "tiny": 1e-30, "zero": 0.0}

CONFIGURATIONS = st.fixed_dictionaries(
    {
        "model": st.sampled_from(sorted(MODELS)),
        "loss": st.sampled_from(sorted(LOSSES)),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "policy": st.sampled_from(["float32", *sorted(TOLERANCES)]),
        "examples": st.integers(1, 12),
        "batch_size": st.integers(1, 12),
        "augmult": st.sampled_from([0, 0, 1, 2, 3]),
        "microbatch_size": st.sampled_from([None, None, 1, 2, 3, 5, 12]),
        "l2_norm_clip": st.sampled_from([1e-4, 0.1, 1.0, 30.0, 1e5]),
        "weights": st.sampled_from([None, None, "random", "zeros", "some zeros", "extreme"]),
        "rows": st.sampled_from(["ordinary", "ordinary", "alike", *sorted(HOSTILE)]),
        "compile": st.sampled_from(["graph", "graph", "graph", "xla", "eager"]),
        "engine": st.sampled_from(["chosen", "chosen", "chosen", "mapped"]),
        "seed": st.integers(0, 2**31),
    }
)


def rows_of(config, rng):
    """Draws inputs, [n, K, ...] with views, in which one example may be hostile."""
    count, shape, views = config["examples"], MODELS[config["model"]][0], config["augmult"]
    shape = (count, *([views] * bool(views)), *shape)
    if config["model"] == "tokens":
        return rng.integers(0, 7, shape)
    x = rng.normal(size=shape).astype("float32")
    if config["rows"] == "alike":
        x[:] = x[:1]
    elif config["rows"] in HOSTILE:
        x[rng.integers(count)] *= HOSTILE[config["rows"]]
    return x


def targets_of(kind, count, rng):
    labels = rng.integers(0, CLASSES, count)
    if kind == "labels":
        return labels
    if kind == "one-hot":
        return np.eye(CLASSES, dtype="float32")[labels]
    return rng.normal(size=(count, CLASSES)).astype("float32")


def weights_of(kind, count, rng):
    if kind is None:
        return None
    weights = rng.uniform(0.1, 2.0, count).astype("float32")
    if kind == "zeros":
        weights[:] = 0.0
    elif kind == "some zeros":
        weights[rng.random(count) < 0.5] = 0.0
    elif kind == "extreme":
        weights *= 10.0 ** rng.integers(-20, 20, count)
    return weights


@contextlib.contextmanager
def policy(name):
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy("float32")


def ends_of(name):
    """Returns the inputs and the outputs of one of `MODELS`, as Keras's tensors."""
    shape, body = MODELS[name]
    inputs = keras.Input(shape, dtype="int64" if name == "tokens" else None)
    return inputs, L.Dense(CLASSES)(L.Flatten()(body(inputs)))


def make(config, plan):
    seeds.fix(config["seed"] % 1000)
    model = keras.Model(*ends_of(config["model"]))
    optimizer = OPTIMIZERS[config["optimizer"]](
        1.0, plan=plan, l2_norm_clip=config["l2_norm_clip"], augmult=config["augmult"],
        microbatch_size=config["microbatch_size"],
    )  # fmt: skip
    how = config["compile"]
    model.compile(
        optimizer,
        LOSSES[config["loss"]][0](),
        jit_compile=how == "xla",
        run_eagerly=how == "eager",
    )
    return model


def wanted_gradient(model, config, drawn):
    """Returns the oracle, float64 [P]: the clipped sum over the drawn examples, divided by B C."""
    x, y, weights = drawn
    views = max(config["augmult"], 1)
    if not len(x):
        return np.zeros(sum(int(np.prod(v.shape)) for v in model.trainable_variables))
    if config["augmult"]:
        x = x.reshape(-1, *x.shape[2:])
    repeated = [tf.convert_to_tensor(np.repeat(part, views, axis=0)) for part in (y, weights)]
    with np.errstate(all="ignore"):
        gradients = oracle.batch_of_one_gradients(model, tf.convert_to_tensor(x), *repeated, views)
        norms = np.linalg.norm(gradients, axis=1)
        gradients[~np.isfinite(norms)], norms[~np.isfinite(norms)] = 0.0, 0.0
        factors = 1.0 / np.maximum(norms, config["l2_norm_clip"])
    batch_size = min(config["batch_size"], config["examples"])
    return factors @ gradients / batch_size


def flat(model):
    return np.concatenate([np.ravel(v.numpy()) for v in model.trainable_variables]).astype(float)


def check(config):
    """Trains one update and compares it with the oracle.

    Raises AssertionError if the update is wrong, and any error of the training.
    """
    rng = np.random.default_rng(config["seed"])
    count = config["examples"]
    x, y = rows_of(config, rng), targets_of(LOSSES[config["loss"]][1], count, rng)
    weights = weights_of(config["weights"], count, rng)
    mapped = engines.mapping() if config["engine"] == "mapped" else contextlib.nullcontext()
    with warnings.catch_warnings(), policy(config["policy"]), mapped:
        warnings.simplefilter("ignore")
        plan = tfdpx.PrivacyPlan(
            count, batch_size=min(config["batch_size"], count), steps=1, noise_multiplier=0.0,
            delta=1e-6,
        )  # fmt: skip
        model = make(config, plan)
        [batch] = plan.batches(x, y, weights, seed=config["seed"])
        batch = [part.numpy() for part in batch]
        present = batch[2] != 0
        wanted = wanted_gradient(model, config, [part[present] for part in batch])
        before = flat(model)
        model.fit(plan.batches(x, y, weights, seed=config["seed"]), verbose=0)
        optimizer = model.optimizer
        optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        after, norm = flat(model), optimizer.privatized_gradient_norm
    assert optimizer.ledger.steps == 1
    assert np.isfinite(after).all(), "Weights that are not finite."
    batch_size = plan.batch_size
    assert norm * batch_size <= present.sum() * (1 + 1e-5) + 1e-30, "More than n C was added."
    if config["rows"] in ("huge", "infinite", "not a number") or config["weights"] == "extreme":
        return  # Intermediate overflows depend on the order, so only the bound above holds.
    most = TOLERANCES[config["policy"]] * max(present.sum(), 1)
    assert abs(norm - np.linalg.norm(wanted)) * batch_size <= most, "Another norm than wanted."
    if config["optimizer"] == "sgd":
        off = np.linalg.norm(before - after - wanted) * batch_size
        rounding = 1e-6 * np.linalg.norm(before) * batch_size
        assert off <= most + rounding, f"The update is off by {off:.3g} C."
