"""`plan.batches` accepts the inputs of `fit`, and draws the same examples from each form."""

import keras
import numpy as np
import pytest
import seeds
import tensorflow as tf

import tfdpx

ROWS = 24
X = np.arange(2 * ROWS, dtype="float32").reshape(ROWS, 2)
Y = np.arange(ROWS, dtype="float32")
PLAN = tfdpx.PrivacyPlan(
    ROWS, batch_size=6, steps=2, noise_multiplier=1.0, delta=1e-3, accountant="rdp"
)


class Frame:
    """A stand-in for a pandas.DataFrame or Series: pandas is not installed here."""

    def __init__(self, values):
        self._values = np.asarray(values)
        self.shape, self.columns = self._values.shape, ["a", "b"]

    def __array__(self, dtype=None, copy=None):
        return self._values if dtype is None else self._values.astype(dtype)

    def __len__(self):
        return len(self._values)

    def __getitem__(self, key):  # By column, not by row, so tfdpx must not index it.
        raise KeyError(key)


def drawn(*arguments, **named):
    return [
        tf.nest.map_structure(lambda t: t.numpy(), batch)
        for batch in PLAN.batches(*arguments, **named, seed=5)
    ]


def same(a, b):
    tf.nest.map_structure(np.testing.assert_array_equal, a, b)


def dataset(*parts, batch=None):
    batches = tf.data.Dataset.from_tensor_slices(parts)
    return batches if batch is None else batches.batch(batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_inputs",
    [
        lambda: (X.tolist(), Y.tolist()),
        lambda: (tf.constant(X), tf.constant(Y)),
        lambda: (Frame(X), Frame(Y)),
        lambda: (dataset(X, Y),),
        lambda: (dataset(X, Y, batch=5),),  # The last is shorter.
        lambda: (dataset(X, Y, batch=ROWS),),
    ],
    ids=["lists", "tensors", "pandas", "examples", "batches", "one batch"],
)
def test_every_form_gives_the_same_draws(make_inputs, capsys):
    same(drawn(*make_inputs()), drawn(X, Y))
    has_warning = "has read a tf.data.Dataset of 24 examples" in capsys.readouterr().out
    assert has_warning == isinstance(make_inputs()[0], tf.data.Dataset)


def test_several_inputs_are_a_list_a_tuple_or_a_dict():
    two = drawn((X, -X), Y)
    same(drawn([X, -X], Y), two)
    same(drawn([Frame(X), Frame(-X)], Y), two)
    named = drawn({"a": X, "b": -X}, {"out": Y})
    same([batch[0]["b"] for batch in named], [batch[0][1] for batch in two])
    same([batch[1]["out"] for batch in named], [batch[1] for batch in two])
    by_name = tf.data.Dataset.from_tensor_slices(({"a": X, "b": -X}, {"out": Y}))
    same(drawn(by_name), named)


def test_weights_of_a_data_set_count():
    weights = np.linspace(0.5, 2.0, ROWS).astype("float32")
    same(drawn(dataset(X, Y, weights, batch=7)), drawn(X, Y, weights))
    same(drawn(dataset(X, Y), class_weight={3: 4.0}), drawn(X, Y, class_weight={3: 4.0}))


@pytest.mark.parametrize(
    "make_inputs, message",
    [
        (lambda: dataset(X, Y).repeat(), "known size.*infinite size.*repeat"),
        (lambda: dataset(X, Y).filter(lambda x, y: True), "unknown size.*assert_cardinality"),
        (lambda: dataset(X, Y).take(0), "must hold examples"),
        (lambda: dataset(X, Y).take(20), "20 examples, num_examples=24"),
        (lambda: [X[0], X[1]], r"same length.*list of arrays means several inputs.*np\.stack"),
    ],
)
def test_data_of_another_size_than_the_plans_are_refused(make_inputs, message):
    arguments = make_inputs()
    y = () if isinstance(arguments, tf.data.Dataset) else (Y,)
    with pytest.raises(ValueError, match=message):
        PLAN.batches(arguments, *y)


def test_a_data_set_holds_its_targets():
    with pytest.raises(ValueError, match="neither `y` nor `sample_weight`"):
        PLAN.batches(dataset(X, Y), Y)


def test_the_last_part_is_held_out_and_validated_on():
    more_x, more_y = np.concatenate([X, X[:6] + 100]), np.concatenate([Y, Y[:6] + 100])
    same(drawn(more_x, more_y, validation_split=0.2), drawn(X, Y))
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    optimizer = tfdpx.DPSGD(1e-9, plan=PLAN)
    model.compile(optimizer, "mse", run_eagerly=True)
    history = model.fit(PLAN.batches(more_x, more_y, validation_split=0.2), verbose=0).history
    wanted = model.evaluate(more_x[24:], more_y[24:], verbose=0)
    assert history["val_loss"] == pytest.approx([wanted], rel=1e-4)


def test_shares_out_of_range():
    for share in (-0.1, 1.0, 1, "0.5", True):
        with pytest.raises(ValueError, match="`validation_split` must be a number in"):
            PLAN.batches(X, Y, validation_split=share)
    with pytest.raises(ValueError, match="19 examples with validation_split=0.2, num_ex"):
        PLAN.batches(X, Y, validation_split=0.2)


def trained(fit, **arguments):
    """Fits a small regression with a seed by `fit(model, plan)`; returns weights and optimizer."""
    seeds.fix(3)
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(tfdpx.DPSGD(0.01, plan=PLAN, seed=4, **arguments), "mse", jit_compile=False)
    fit(model)
    return [w.copy() for w in model.get_weights()], model.optimizer


def test_fit_on_arrays_is_fit_on_the_batches_of_the_plan():
    by_arrays, optimizer = trained(lambda model: model.fit(X, Y, verbose=0))
    by_batches, _ = trained(lambda model: model.fit(PLAN.batches(X, Y), verbose=0))
    same(by_arrays, by_batches)
    assert optimizer.ledger.steps == 2 and not optimizer.epsilon_is_approximate


def test_class_weights_are_those_of_any_form_of_the_data():
    weights = {3: 4.0, 7: 0.5}
    source, rows = tfdpx.RandomAccess(list(zip(X, Y, strict=True))), PLAN.batches
    by_arrays, _ = trained(lambda model: model.fit(X, Y, class_weight=weights, verbose=0))
    for fit in (
        lambda model: model.fit(source, class_weight=weights, verbose=0),
        lambda model: model.fit(rows(dataset(X, Y), class_weight=weights), verbose=0),
        lambda model: tfdpx.distributed.fit(model, PLAN, X, Y, class_weight=weights, verbose=0),
    ):
        same(trained(fit)[0], by_arrays)
    assert np.abs(by_arrays[0] - trained(lambda m: m.fit(X, Y, verbose=0))[0][0]).max() > 1e-4


def test_random_access_needs_a_plan():
    model = keras.Sequential([keras.Input([2]), keras.layers.Dense(1)])
    model.compile(tfdpx.DPSGD(0.1, batch_size=6, noise_multiplier=1.0), "mse")
    with pytest.raises(ValueError, match="drawn from by the optimizer's plan.*plan=None"):
        model.fit(tfdpx.RandomAccess(list(zip(X, Y, strict=True))), verbose=0)
