"""The hook: idempotent, removable, and without effect on anything that is not private."""

import keras
import numpy as np
import pytest
import small

from tfdpx._keras import hook, layer_internals, step_context


@pytest.fixture
def installed():
    yield
    hook.install()


def test_install_is_idempotent_and_removable(installed):
    ours = keras.Model.train_step, keras.Operation.__call__
    hook.install()
    assert (keras.Model.train_step, keras.Operation.__call__) == ours
    hook.uninstall()
    assert not hook.is_installed()
    assert keras.Model.train_step is not ours[0] and keras.Operation.__call__ is not ours[1]
    assert not {"train_step", "fit"} & set(vars(keras.Model))
    hook.uninstall()
    hook.install()
    assert hook.is_installed()


def test_without_the_hook_a_private_optimizer_refuses_to_train(installed):
    hook.uninstall()
    with pytest.raises(ValueError, match="did not come from the private step"):
        small.step(small.model(), *small.data())


def test_ordinary_training_is_untouched(installed):
    x, y = small.data()
    with_hook = small.step(small.model(keras.optimizers.SGD(0.1)), x, y)
    hook.uninstall()
    without = small.step(small.model(keras.optimizers.SGD(0.1)), x, y)
    np.testing.assert_array_equal(with_hook, without)


def test_a_copy_without_an_attribute_leaves_the_layer_alone():
    layer = keras.layers.Dense(3, "relu")
    layer.build((None, 2))
    twin = layer_internals.without(layer, activation=None)
    assert twin.activation is None and twin.kernel is layer.kernel
    assert layer.activation is keras.activations.relu


def test_eagerly_takes_gradients_inside_a_graph():
    import tensorflow as tf

    def gradient():
        x = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x * x
        return float(tape.gradient(y, x))

    seen = []
    tf.function(lambda: seen.append(step_context.eagerly(gradient)))()
    assert seen == [6.0]
