"""Fixed oriented derivatives, a linear head, and nothing else to train."""

import keras
import numpy as np
import pytest

from tfdpx.models import EdgeLinear
from tfdpx.models.edge_linear import steered_sobel


def test_only_the_head_is_trainable():
    model = EdgeLinear(10, (8, 8, 1))
    assert [v.path for v in model.trainable_variables] == ["logits/kernel", "logits/bias"]
    assert model.count_params() == 8 * 9 + 8 * 64 * 10 + 10


def test_filters_measure_the_slope_along_their_direction():
    kernel = steered_sobel(1, 8)[:, :, 0]
    rows, columns = np.mgrid[-1:2, -1:2].astype("float32")
    for k, angle in enumerate(2 * np.pi * np.arange(8) / 8):
        # Of the plane a * column + b * row the derivative along (cos, sin) is a cos + b sin.
        response = np.sum(kernel[..., k] * (3.0 * columns + 5.0 * rows))
        assert response == pytest.approx(3 * np.cos(angle) + 5 * np.sin(angle), abs=1e-5)


def test_saves_and_loads(tmp_path):
    model = EdgeLinear(3, (5, 6, 2), directions=4)
    model.layers[-1].kernel.assign(np.random.default_rng(0).normal(size=(5 * 6 * 8, 3)))
    model.save(tmp_path / "model.keras")
    images = np.random.default_rng(1).normal(size=(2, 5, 6, 2)).astype("float32")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded(images), model(images), atol=1e-6)


@pytest.mark.parametrize(
    "arguments",
    [{"directions": 0}, {"num_classes": 0}, {"input_shape": (None, 8, 1)}, {"input_shape": (8, 8)}],
)
def test_refuses_by_name(arguments):
    with pytest.raises(ValueError, match=next(iter(arguments))):
        EdgeLinear(**{"num_classes": 10, "input_shape": (8, 8, 1), **arguments})
