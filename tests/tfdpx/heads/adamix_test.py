"""AdaMix against its algorithm written out, the parts that can be switched off, and refusals."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf
from scipy.special import softmax

import tfdpx
from tfdpx.heads.membership_auc import membership_auc
from tfdpx.heads.releases import Releases

CLASSES, WIDTH = 4, 6


def data(count, seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, CLASSES, count)
    x = 0.5 * rng.normal(size=(count, WIDTH)) + np.eye(WIDTH)[labels]
    return x.astype("float32"), labels


PRIVATE, PUBLIC = data(60, 0), data(8, 1)


def fitted(head):
    return head.fit(*PRIVATE, public_data=PUBLIC)


@pytest.mark.parametrize(("epsilon", "steps"), [(1.0, 28), (3.0, 206)])
def test_steps_are_those_of_the_exact_gaussian_mechanism(epsilon, steps):
    head = tfdpx.AdaMix(10, epsilon, delta=1e-5, noise_multiplier=20)
    assert head.steps == steps

    def delta(steps):  # Balle and Wang 2018, Theorem 8, at mu = sqrt(T) / sigma.
        mu = math.sqrt(steps) / 20

        def tail(z):
            return math.erfc(-z / math.sqrt(2)) / 2

        return tail(mu / 2 - epsilon / mu) - math.exp(epsilon) * tail(-mu / 2 - epsilon / mu)

    assert delta(steps) <= 1e-5 < delta(steps + 1)


def written_out(head):
    """Algorithm 2 without noise, in NumPy and as the paper prints it: sums, not means."""
    (x, y), (px, py) = PRIVATE, PUBLIC
    y, py, w = np.eye(CLASSES)[y], np.eye(CLASSES)[py], head.initial_weights.copy()
    eta, everyone = head.learning_rate, len(x) + len(px)
    for _ in range(head.steps):
        each = [np.outer(a, r) for a, r in zip(px, softmax(px @ w, axis=1) - py, strict=True)]
        public, clip = np.sum(each, axis=0), 0.3
        if head.clip == "public_quantile":
            clip = np.quantile([np.linalg.norm(g) for g in each], 0.9)
        left = np.linalg.svd(public)[0][:, : head.projection or WIDTH]
        total = 0.0
        for a, r in zip(x, softmax(x @ w, axis=1) - y, strict=True):
            g = np.outer(a, r)
            total = total + left.T @ (g * min(1, clip / np.linalg.norm(g)))
        w = w - eta / everyone * (public + left @ total + 0.1 * (w - head.initial_weights))
    return w


@pytest.mark.parametrize("clip", ["public_quantile", "fixed"])
@pytest.mark.parametrize("projection", [None, 2])
def test_the_algorithm_written_out(monkeypatch, clip, projection):
    monkeypatch.setattr(Releases, "_noise", lambda self, shape, deviation: np.zeros(shape))
    start = np.random.default_rng(2).normal(size=(WIDTH, CLASSES))
    switches = dict(clip=clip, l2_norm_clip=0.3, projection=projection)
    head = tfdpx.AdaMix(
        CLASSES, steps=5, start="initial", initial_weights=start, learning_rate=3.0, **switches
    )
    # The clip leaves 0.2% to rounding.
    np.testing.assert_allclose(fitted(head).kernel, written_out(head), atol=0.01)
    assert not head.bias.any()


def test_noise_is_that_of_the_clip_and_lies_in_the_subspace(monkeypatch):
    deviations = []
    draw = Releases._noise

    def noise(self, shape, deviation):
        deviations.append((shape, deviation))
        return draw(self, shape, deviation)

    monkeypatch.setattr(Releases, "_noise", noise)
    head = fitted(tfdpx.AdaMix(CLASSES, steps=3, projection=2, keep_steps=True, seed=1))
    found = [(shape, deviation / 20.0) for shape, deviation in deviations]
    assert found == [((2, CLASSES), pytest.approx(s.l2_norm_clip)) for s in head._kept]


def test_it_starts_at_the_minimum_over_the_public_examples():
    head = tfdpx.AdaMix.only_public(CLASSES, l2_regularization=0.1).fit(public_data=PUBLIC)
    x, y = PUBLIC[0].astype("float64"), np.eye(CLASSES)[PUBLIC[1]]
    slope = x.T @ (softmax(x @ head.kernel, axis=1) - y) + 0.1 * head.kernel
    np.testing.assert_allclose(slope, 0.0, atol=1e-4)
    head = fitted(tfdpx.AdaMix(CLASSES, steps=1, l2_regularization=0.1, keep_steps=True))
    only = tfdpx.AdaMix.only_public(CLASSES, l2_regularization=0.1).fit(public_data=PUBLIC)
    np.testing.assert_array_equal(head._kept[0].kernel, only.kernel)


def test_the_average_is_theorem_3s():
    head = tfdpx.AdaMix(
        CLASSES, steps=6, average=True, learning_rate=None, l2_regularization=5.0,
        keep_steps=True, seed=1,
    )  # fmt: skip
    fitted(head)
    mean = sum(t * step.kernel for t, step in enumerate(head._kept, 1)) * 2 / (6 * 7)
    np.testing.assert_allclose(head.kernel, mean, rtol=1e-5, atol=1e-6)


def test_what_the_ablations_spend():
    spent = {
        name: fitted(getattr(tfdpx.AdaMix, name)(CLASSES, 1.0, seed=1)).epsilon_spent()
        for name in ("fully_private", "ngd", "ppgd")
    }
    exact = tfdpx.accounting.epsilon(20.0, 1.0, 28, 1e-5, "gdp")
    assert all(epsilon == exact for epsilon in spent.values())
    assert fitted(tfdpx.AdaMix.only_public(CLASSES)).epsilon_spent() == 0.0
    assert fitted(tfdpx.AdaMix.paragon(CLASSES)).epsilon_spent() == math.inf


def test_only_public_reads_no_private_example():
    first = tfdpx.AdaMix.only_public(CLASSES).fit(*data(3, 5), public_data=PUBLIC)
    second = tfdpx.AdaMix.only_public(CLASSES).fit(public_data=PUBLIC)
    np.testing.assert_array_equal(first.kernel, second.kernel)


def test_the_paragon_is_the_minimum_over_all():
    head = fitted(tfdpx.AdaMix.paragon(CLASSES, l2_regularization=0.5))
    x = np.vstack([PRIVATE[0], PUBLIC[0]]).astype("float64")
    y = np.eye(CLASSES)[np.concatenate([PRIVATE[1], PUBLIC[1]])]
    slope = x.T @ (softmax(x @ head.kernel, axis=1) - y) + 0.5 * head.kernel
    np.testing.assert_allclose(slope, 0.0, atol=1e-3)


def test_ppgd_ends_at_the_public_minimum_near_the_private_weights():
    head = fitted(tfdpx.AdaMix.ppgd(CLASSES, steps=4, l2_regularization=1e4, seed=1))
    free = fitted(tfdpx.AdaMix.ppgd(CLASSES, steps=4, l2_regularization=0.1, seed=1))
    near = head.evaluate(*PRIVATE)["accuracy"], free.evaluate(*PRIVATE)["accuracy"]
    x, y = PUBLIC[0].astype("float64"), np.eye(CLASSES)[PUBLIC[1]]
    slope = np.linalg.norm(x.T @ (softmax(x @ free.kernel, axis=1) - y))
    assert slope < np.linalg.norm(x.T @ (softmax(x @ head.kernel, axis=1) - y))
    assert all(0 <= value <= 1 for value in near)


def test_a_dataset_gives_what_arrays_give():
    arrays = fitted(tfdpx.AdaMix(CLASSES, steps=3, seed=1))
    stream = tf.data.Dataset.from_tensor_slices(PRIVATE).batch(7)
    public = tf.data.Dataset.from_tensor_slices(PUBLIC).batch(3)
    dataset = tfdpx.AdaMix(CLASSES, steps=3, seed=1).fit(stream, public_data=public)
    np.testing.assert_allclose(arrays.kernel, dataset.kernel, atol=1e-5)


def test_it_is_a_head_like_the_others():
    head = tfdpx.AdaMix(CLASSES, 1.0, projection=2, initial_weights=np.ones([WIDTH, CLASSES]))
    copy = tfdpx.AdaMix.from_config(head.get_config())
    assert copy.get_config() == head.get_config()
    assert keras.saving.get_registered_object("tfdpx>AdaMix") is tfdpx.AdaMix
    with pytest.raises(ValueError, match="no weights yet"):
        head.predict(PRIVATE[0])
    layer = fitted(head).to_layer()
    np.testing.assert_allclose(layer(PRIVATE[0]), head.predict(PRIVATE[0]), atol=1e-5)
    assert head.ledger.steps == head.plan(60).steps == 28
    losses = keras.losses.sparse_categorical_crossentropy(
        PRIVATE[1], head.predict(PRIVATE[0]), from_logits=True
    )
    np.testing.assert_allclose(head.losses(*PRIVATE), losses, atol=1e-5)


def test_the_statement_says_whom_it_leaves_out():
    said = tfdpx.AdaMix(CLASSES, 1.0).statement(60, 8)
    assert "(0.9858, 1e-05)-differentially private for the 60 private examples" in said
    assert "The 8 public examples get no guarantee" in said
    private = tfdpx.AdaMix.fully_private(CLASSES, 1.0, seed=3).statement(60, 8)
    assert "68 private examples" in private and "public" not in private
    assert "do not release the weights" in private
    assert "epsilon is infinite" in tfdpx.AdaMix.paragon(CLASSES).statement(60, 8)
    assert "No private example was read" in tfdpx.AdaMix.only_public(CLASSES).statement(0, 8)


UNFIT = PUBLIC[0].copy()
UNFIT[3, 2] = np.nan


@pytest.mark.parametrize(
    ("public", "message"),
    [
        (None, '`public_data` is missing.*start="public".*clip="public_quantile"'),
        ((UNFIT, PUBLIC[1]), "Received: 1 rows that are not finite"),
        ((PUBLIC[0][:0], PUBLIC[1][:0]), "takes 1 to"),
        ((PUBLIC[0], PUBLIC[1], None), "Received: 3 parts"),
        ((PUBLIC[0], None), "`labels` must be given"),
        ((PUBLIC[0], np.zeros([8, CLASSES])), "8 examples with none or several"),
        ((PUBLIC[0][:, :3], PUBLIC[1]), "must have one width. Received: 6 and 3"),
        ((PRIVATE[0][3:5], PRIVATE[1][3:5]), "holds 2 of the 60 private examples"),
    ],
)
def test_public_data_that_are_refused(public, message):
    head = tfdpx.AdaMix(CLASSES, 1.0)
    with pytest.raises(ValueError, match=message):
        head.fit(*PRIVATE, public_data=public)
    assert head.ledger.steps == 0 and head.kernel is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "Exactly one of `epsilon` and `steps`"),
        ({"epsilon": 1.0, "steps": 3}, "Exactly one of `epsilon` and `steps`"),
        ({"epsilon": math.inf}, "AdaMix.paragon"),
        ({"epsilon": 1.0, "noise_multiplier": 0.0}, "`noise_multiplier` must be a positive"),
        ({"epsilon": 1e-3}, "No `steps` keeps within the target"),
        ({"epsilon": 1.0, "quantile": 0.0}, "`quantile` must lie in"),
        ({"epsilon": 1.0, "quantile": 90}, "`quantile` must lie in"),
        ({"epsilon": 1.0, "projection": 0}, "`projection`"),
        ({"epsilon": 1.0, "clip": "private"}, "`clip` must be one of"),
        ({"epsilon": 1.0, "use": "private"}, "protects the public examples too"),
        (
            {
                "epsilon": 1.0,
                "use": "private",
                "start": "initial",
                "clip": "fixed",
                "projection": 1,
            },
            "protects the public examples too",
        ),
        ({"epsilon": 1.0, "use": "all"}, "`use` must be one of"),
        ({"epsilon": 1.0, "clip": "fixed", "l2_norm_clip": math.inf}, "must be finite"),
        ({"epsilon": 1.0, "initial_weights": np.ones([3, 2])}, "`initial_weights`"),
        ({"epsilon": 1.0, "l2_regularization": 0.0}, "`l2_regularization`"),
    ],
)
def test_arguments_that_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tfdpx.AdaMix(CLASSES, **arguments)


def test_membership_auc_is_that_of_scikit_learn():
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    members, others = rng.integers(0, 9, 50) / 10, rng.integers(2, 12, 40) / 10
    scores, truth = -np.concatenate([members, others]), np.repeat([1, 0], [50, 40])
    assert membership_auc(members, others) == pytest.approx(roc_auc_score(truth, scores))
    with pytest.raises(ValueError, match="`other_losses`"):
        membership_auc(members, [])
