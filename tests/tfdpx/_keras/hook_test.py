"""The hook: idempotent, removable, and without effect on models that are not private."""

import keras
import numpy as np
import pytest
import small

from tfdpx._keras import hook


@pytest.fixture
def installed():
    yield
    hook.install()


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
