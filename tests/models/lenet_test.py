"""LeNet: size, shapes, errors."""

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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 0}, "`num_classes` must be a positive integer. Received: num_classes=0"),
        ({"input_shape": (28, 28)}, r"height, width, channels.*Received: input_shape=\(28, 28\)"),
        ({"input_shape": (11, 28, 1)}, r"at least 12.*\(11, 28, 1\).*Resizing"),
    ],
)
def test_errors_name_argument_value_and_mend(arguments, message):
    with pytest.raises(ValueError, match=message):
        LeNet(**arguments)
