"""LeNet: size, shapes, errors."""

import numpy as np
import pytest

from tfdpx.models import LeNet


def test_layers_and_number_of_parameters():
    model = LeNet()
    shapes = {layer.name: layer.output.shape[1:] for layer in model.layers}
    assert shapes["conv1"] == (28, 28, 6)
    assert shapes["pool1"] == (14, 14, 6)
    assert shapes["conv2"] == (10, 10, 16)
    assert shapes["pool2"] == (5, 5, 16)
    assert shapes["logits"] == (10,)
    # LeCun et al.'s C1, F6 and C5, C3 with full connections, and ten outputs.
    by_layer = (25 + 1) * 6, (150 + 1) * 16, (400 + 1) * 120, (120 + 1) * 84, (84 + 1) * 10
    assert model.count_params() == sum(by_layer) == 61_706


def test_outputs_are_logits():
    model = LeNet(num_classes=3, input_shape=(20, 32, 3), name="tiny")
    outputs = model(np.random.default_rng(0).normal(size=(4, 20, 32, 3)))
    assert model.name == "tiny"
    assert outputs.shape == (4, 3)
    assert model.layers[-1].activation.__name__ == "linear"


def test_smallest_image():
    assert LeNet(input_shape=(12, 12, 1))(np.zeros((1, 12, 12, 1))).shape == (1, 10)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 0}, "`num_classes` must be a positive integer. Received: num_classes=0"),
        ({"input_shape": (28, 28)}, r"height, width, channels.*Received: input_shape=\(28, 28\)"),
        ({"input_shape": (11, 28, 1)}, r"at least 12.*\(11, 28, 1\).*Resizing"),
        ({"input_shape": (28, None, 1)}, "at least 12"),
    ],
)
def test_errors_name_argument_value_and_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        LeNet(**arguments)
