"""Which layers, models and losses are proved, and what a training says of it."""

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from cases import slow_but

import tfdpx
from experiments.benchmark import independence_table as table
from tfdpx.independence import independence_of

layers = keras.layers

# A frozen BatchNormalization is proved. Some of these work on the whole batch; some have operations
# without a rule.
NOT_PROVED = {
    *("ActivityRegularization", "BatchNormalization", "CategoryEncoding"),
    *("ContrastLimitedAdaptiveHistogramEqualization", "RandomElasticTransform"),
    *("AugMix", "CutMix", "MelSpectrogram", "MixUp", "RandAugment", "RandomPerspective"),
    # They draw once for all examples of a pass.
    *("RandomCrop", "RandomGaussianBlur"),
}


@pytest.mark.slow
def test_the_layers_of_keras_are_proved():
    made = table.layers_of_keras()
    alone = {name for name, make in made.items() if independence_of(make()).verdict == "alone"}
    assert alone == NOT_PROVED & set(made)
    assert len(made) > 80


def test_every_layer_of_keras_is_looked_at():
    named = {name.split(",")[0] for name in table.layers_of_keras()}
    classes = {
        name
        for name, value in vars(keras.layers).items()
        if isinstance(value, type) and issubclass(value, keras.layers.Layer)
    }
    # Another name of a class that is in the list, one cell of a loop, no layer by itself, or one
    # that changes images in a data pipeline.
    aliases = {n for n in classes if getattr(keras.layers, n).__name__ != n}
    assert not {n for n in classes - named - aliases - table.LEFT_OUT if n in vars(keras.layers)}


SMALL = ["bidirectional LSTM with a mask", "tfdpx LeNet", "tfdpx SmallCNN", "vision transformer"]


@pytest.mark.parametrize("name", slow_but(SMALL, "tfdpx LeNet", "tfdpx SmallCNN"))
def test_small_models_are_proved(name):
    model = table.models_of_all()[name]()
    assert independence_of(model).verdict == "proved"
    assert independence_of(model, rows=7).verdict == "proved"


@pytest.mark.slow
def test_all_models_of_the_table_are_proved():
    for name, make in table.models_of_all().items():
        if name in SMALL:
            continue  # See above.
        model = make()
        rows = table.FEW if name in table.IN_PARTS else None
        found = independence_of(model, rows=rows)
        assert found.verdict == "proved", (name, found)


def crossentropy(**arguments):
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, **arguments)


def own(y, p):
    return keras.losses.sparse_categorical_crossentropy(y, p, from_logits=True)


LOSSES = {
    "mean": (crossentropy(), True),
    "sum": (crossentropy(reduction="sum"), True),
    "none": (crossentropy(reduction=None), True),
    "by weight": (crossentropy(reduction="mean_with_sample_weight"), False),
    "a function": (own, True),
    "squares": (lambda y, p: tf.square(tf.cast(y, p.dtype)[:, tf.newaxis] - p), True),
    "scaled": (lambda y, p: 3.0 * own(y, p), True),
    "centred": (lambda y, p: own(y, p - tf.reduce_mean(p, axis=0)), False),
    "by the largest": (lambda y, p: own(y, p) / tf.stop_gradient(tf.reduce_max(own(y, p))), False),
    "counted": (lambda y, p: own(y, p) * tf.reduce_sum(tf.cast(y, "float32")), False),
    "contrastive": (
        lambda y, p: -tf.linalg.diag_part(tf.nn.log_softmax(p @ tf.transpose(p))),
        False,
    ),
    "squared sum": (lambda y, p: tf.square(tf.reduce_mean(own(y, p))), False),
    "reversed": (lambda y, p: own(y, p[::-1]), False),
    "sorted": (lambda y, p: tf.sort(own(y, p)) * tf.range(16.0), False),
    "log of the mean": (lambda y, p: tf.math.log(tf.reduce_mean(tf.exp(own(y, p)))), False),
    "focal": (lambda y, p: tf.square(1.0 - tf.exp(-own(y, p))) * own(y, p), True),
}


def test_losses():
    x, y = small.data()
    for name, (loss, proved) in LOSSES.items():
        model = small.model(loss=loss)
        model.build((None, 6))
        weights = np.ones(16, "float32") if name == "by weight" else None
        found = independence_of(model, x, y, weights, rows=16)
        assert (found.verdict == "proved") == proved, (name, found)
        if proved:
            assert independence_of(model, x, y).verdict == "proved", name
        if proved and name != "squares":  # Keras cannot weigh a loss of several numbers a row.
            found = independence_of(model, x, y, np.ones(16, "float32"))
            assert str(found).startswith("proved"), name


@pytest.mark.slow
def test_several_outputs_with_losses_of_their_own(recwarn):
    inputs = keras.Input([6])
    outputs = [layers.Dense(1, name="a")(inputs), layers.Dense(1, name="b")(inputs)]
    model = keras.Model(inputs, outputs)
    model.compile(
        tfdpx.DPSGD(0.1, batch_size=16, noise_multiplier=1.0), ["mse", "mae"], loss_weights=[1, 2]
    )
    x, y = small.data(), np.zeros((16, 1), "float32")
    assert independence_of(model, x[0], [y, y]).verdict == "proved"
    for rows in (16, 9):  # From the second trace on, Keras has a counter for each loss.
        model.train_on_batch(x[0][:rows], [y[:rows], y[:rows]])
    assert not any("computed alone" in str(each.message) for each in recwarn)


@pytest.mark.slow
def test_a_training_says_what_is_proved():
    model = small.model(layers=[layers.Dense(5, "silu"), layers.Dropout(0.5), layers.Dense(3)])
    assert model.optimizer.independence == ()
    x, y = small.data()
    model.fit(x, y, verbose=0)
    [found] = model.optimizer.independence
    assert (found.verdict, found.rows) == ("proved", None)
    assert str(found) == "proved, for any number of rows"
    model.train_on_batch(x, y)  # Every example of it is present, so that it is one pass of 16.
    found = model.optimizer.independence[1]
    assert (found.rows, str(found)) == (16, "proved, for microbatches of 16 rows")


class Turned(layers.Layer):
    """Turns the entries of a row round, by an operation that no rule knows."""

    def call(self, x):
        return tf.reverse_sequence(x, tf.fill([tf.shape(x)[0]], x.shape[1]), seq_axis=1)

    def compute_output_shape(self, shape):
        return shape


@pytest.mark.slow
def test_what_is_not_proved_is_computed_alone_and_says_why():
    model = small.model(layers=[Turned(name="turned"), layers.Dense(3)])
    with pytest.warns(UserWarning, match="turned"):
        model.fit(*small.data(), verbose=0)
    [found] = model.optimizer.independence
    assert found.verdict == "alone" and "turned" in str(found)


@pytest.mark.slow
def test_eager_mode_traces_the_microbatch_all_the_same():
    x, y = small.data()
    eager, graph = (
        small.model(layers=lambda: [tfdpx.layers.GroupNorm(3), layers.Dense(3)],
                    compile_arguments={"run_eagerly": flag})
        for flag in (True, False)
    )  # fmt: skip
    for _ in range(3):
        steps = [small.step(model, x, y) for model in (eager, graph)]
        np.testing.assert_allclose(*steps, rtol=1e-4, atol=1e-6)
    assert str(eager.optimizer.independence[0]) == "proved, for microbatches of 16 rows"


@pytest.mark.slow
def test_views_and_the_other_engine_are_walked_too():
    x, y = small.data()
    model = small.model(layers=[layers.Dense(3)], augmult=2, per_example_engine="vmap")
    model.build((None, 6))
    model.train_on_batch(np.stack([x, x], axis=1), y)
    [found] = model.optimizer.independence
    assert found.verdict == "alone" and "vmap" in str(found)


class Copies(layers.Layer):
    """A trained vector for every row and position, as position embeddings are."""

    def build(self, input_shape):
        self.vector = self.add_weight(shape=input_shape[-1:], name="vector")

    def call(self, x):
        return keras.ops.broadcast_to(self.vector, keras.ops.shape(x))


def swapped(copies):
    return keras.ops.transpose(copies, [1, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize("change, verdict", [(lambda copies: copies, "proved"), (swapped, "alone")])
@pytest.mark.filterwarnings("ignore:Each example of model")
def test_what_a_layer_gives_every_row_is_read_by_rows(change, verdict):
    # As many positions as rows: swapped, the gradient of an example lies on the axis of positions.
    inputs = keras.Input((8, 3))
    outputs = layers.Dense(2)(inputs + layers.Lambda(change)(Copies()(inputs)))
    model = keras.Model(inputs, outputs)
    optimizer = tfdpx.DPSGD(1.0, batch_size=8, noise_multiplier=1.0, microbatch_size=8)
    model.compile(optimizer, "mse", jit_compile=False)
    model.train_on_batch(np.ones([8, 8, 3]), np.ones([8, 8, 2]))
    assert {found.verdict for found in optimizer.independence} == {verdict}
