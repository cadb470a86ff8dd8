"""SmallCNN: shapes, size, what it is made of and what it refuses."""

import pytest

from tfdpx.layers import GroupNorm, WSConv2D
from tfdpx.models.networks import SmallCNN


def test_number_of_parameters():
    convolutions = (9 * 1 * 32 + 32) + (9 * 32 * 32 + 32) + (9 * 32 * 64 + 64)
    norms = 2 * (32 + 32 + 64)
    dense = 2 * 2 * 64 * 10 + 10  # 8x8 halved twice
    assert SmallCNN(10, (8, 8, 1)).count_params() == convolutions + norms + dense


def test_one_normalised_standardised_convolution_for_each_entry_of_filters():
    model = SmallCNN(10, (8, 8, 1), filters=(8, 24), groups=4)
    convolutions = [layer for layer in model.layers if isinstance(layer, WSConv2D)]
    assert [layer.filters for layer in convolutions] == [8, 24]
    assert [layer.strides for layer in convolutions] == [(1, 1), (2, 2)]
    norms = [layer for layer in model.layers if isinstance(layer, GroupNorm)]
    assert [layer.groups for layer in norms] == [4, 4]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (dict(num_classes=0), "`num_classes`"),
        (dict(filters=()), "`filters`"),
        (dict(filters=(16, 18)), "`filters`"),
        (dict(groups=0), "`groups`"),
        (dict(input_shape=(None, 8, 1)), "`input_shape`"),
    ],
)
def test_refuses_by_name(arguments, named):
    with pytest.raises(ValueError, match=named):
        SmallCNN(**{"num_classes": 10, "input_shape": (8, 8, 1), **arguments})
