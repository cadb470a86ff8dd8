"""Individual accounting replayed in NumPy, from the changes of a linear classifier's weights."""

import functools

import keras
import numpy as np
import seeds

import tfdpx
from tfdpx.accounting.individual import individual_epsilon

COUNT, FEATURES, CLASSES, STEPS, RATE, CLIP = 40, 5, 3, 8, 0.5, 1.5
SEED = 5


def data(views=0):
    """Draws vectors [40, 5], or [40, views, 5], of very different lengths, and labels [40]."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(COUNT, views or 1, FEATURES)) * rng.uniform(0.02, 1.5, (COUNT, 1, 1))
    return (x if views else x[:, 0]).astype("float32"), rng.integers(0, CLASSES, COUNT)


def make_plan(**arguments):
    defaults = dict(batch_size=15, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
    return tfdpx.PrivacyPlan(COUNT, **{**defaults, **arguments})


class Weights(keras.callbacks.Callback):
    """Records the kernel before every update, and at the end."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(self.model.weights[0].numpy())

    def on_train_end(self, logs=None):
        self.seen.append(self.model.weights[0].numpy())


def make_model(plan, accountant=None, views=0, compile_arguments=None, **arguments):
    seeds.fix(3)
    model = keras.Sequential(
        [keras.Input((FEATURES,)), keras.layers.Dense(CLASSES, use_bias=False)]
    )
    optimizer = tfdpx.DPSGD(
        RATE, plan=plan, l2_norm_clip=CLIP, seed=1, individual=accountant, augmult=views,
        **arguments,
    )  # fmt: skip
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **(compile_arguments or {}))
    return model


def train(
    plan,
    accountant=None,
    views=0,
    weight=None,
    callbacks=(),
    xy=None,
    class_weight=None,
    **arguments,
):
    """Trains on draws of `SEED`; returns the model, and all kernels from start to end."""
    model, weights = make_model(plan, accountant, views, **arguments), Weights()
    batches = plan.batches(
        *(xy or data(views)),
        weight,
        class_weight=class_weight,
        optimizer=model.optimizer,
        seed=SEED,
    )
    model.fit(batches, verbose=0, callbacks=[weights, *callbacks])
    return model, np.array(weights.seen, float)


def draws(plan):
    """Returns the ids that each step draws."""
    batches = plan.batches(np.arange(1, COUNT + 1), seed=SEED)
    return [ids.numpy()[weights.numpy() > 0] - 1 for ids, _, weights in batches]


def gradients(x, y, kernel):
    """Returns each example's mean gradient over its views, float64 [n, features, classes]."""
    x = x.astype(float).reshape(len(x), -1, FEATURES)
    logits = x @ kernel
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True) - np.eye(CLASSES)[y][:, np.newaxis]
    return np.einsum("nvf,nvc->nfc", x, p) / x.shape[1]


@functools.cache
def kernels_of_noise(plan, views):
    """Returns the kernels of a training without examples, which show only the noise of `SEED`."""
    return train(plan, views=views, weight=np.zeros(COUNT))[1]


def check(plan, accountant, views=0, class_weight=None, **arguments):
    """Trains, and raises AssertionError if a clip differs from the accounted one."""
    x, y = data(views)
    model, kernels = train(plan, accountant, views, class_weight=class_weight, **arguments)
    weights = np.array([(class_weight or {}).get(label, 1.0) for label in range(CLASSES)])
    weights = (weights / weights.max())[y]
    noise_alone = kernels_of_noise(plan, views)
    level, charged = np.ones(COUNT), []
    drawn = draws(plan)
    assert len(drawn) == plan.steps == len(kernels) - 1
    for step, ids in enumerate(drawn):
        per_example = gradients(x, y, kernels[step])
        norms = np.sqrt((per_example**2).sum((1, 2))) / CLIP
        charged.append(level.copy())
        weighted = np.minimum(norms, 1) * weights
        factors = np.minimum(weighted, level)[ids] / norms[ids] / CLIP
        expected = -RATE / plan.batch_size * np.einsum("n,nfc->fc", factors, per_example[ids])
        moved = (kernels[step + 1] - kernels[step]) - (noise_alone[step + 1] - noise_alone[step])
        np.testing.assert_allclose(moved, expected, atol=2e-6)
        for i in ids:
            level[i] = next((f for f in accountant.fractions if f >= weighted[i]), 1.0)
    np.testing.assert_allclose(accountant.norms(), level)
    counts = accountant._record.counts()
    assert (counts.sum(axis=1) == plan.steps).all()
    np.testing.assert_allclose(counts @ accountant.fractions, np.sum(charged, axis=0))
    expected = individual_epsilon(charged, plan, conversion=accountant.conversion)
    epsilons = accountant.epsilon()
    np.testing.assert_allclose(epsilons, np.minimum(expected, plan.epsilon), rtol=1e-9)
    assert (epsilons <= plan.epsilon).all() and np.ptp(epsilons) > 0.1 * plan.epsilon
    return model
