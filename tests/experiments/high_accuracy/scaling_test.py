"""The scaling figures: against a hand count of a small model, at the limits, and as printed."""

import json
import math

import keras
import pytest

import tfdpx
from experiments.high_accuracy import scaling, scaling_model

UTILIZATION, DECODE_RATE, DRAW_RATE = 0.5, 100.0, 1e7


@pytest.fixture(scope="module")
def plan():
    return tfdpx.PrivacyPlan(
        num_examples=10_000, batch_size=1024, steps=10, noise_multiplier=2.0, delta=1e-5
    )


@pytest.fixture(scope="module")
def workload(plan):
    model = keras.Sequential(
        [
            keras.Input([8, 8, 3], dtype="uint8"),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.Flatten(),
            keras.layers.Dense(10),
        ]
    )
    return scaling_model.workload_of(model, plan, augmult=2, image_shape=(8, 8, 3))


def per_update(workload, chips):
    return scaling_model.per_update(
        workload, chips, scaling_model.V4, UTILIZATION, DECODE_RATE, DRAW_RATE
    )


def test_the_workload_is_what_counting_by_hand_gives(workload, plan):
    convolution, dense = 2 * 64 * 27 * 4, 2 * 256 * 10
    assert workload.parameters == 27 * 4 + 4 + 256 * 10 + 10
    assert workload.image_bytes == 8 * 8 * 3
    # Biases, the rescaling and the kernels' own bookkeeping are all that the sum leaves out.
    assert convolution + dense <= workload.forward_flops <= 1.1 * (convolution + dense)
    assert workload.capture_bytes == 2 * ((192 + 256) + (256 + 10))
    assert (workload.capacity, workload.views) == (plan.capacity, 2)
    # Norm and clipped sum take at least a weight gradient, and no more than a few.
    assert 0.9 < workload.clipping_flops / (2 * (convolution + dense)) < 10


def test_the_parts_of_an_update(workload):
    row = per_update(workload, 16)
    assert row["hosts"] == 4
    assert row["rows_per_replica"] == math.ceil(workload.capacity / 16)
    assert row["all_reduced_bytes"] == 4 * workload.parameters
    flops = row["rows_per_replica"] * (
        4 * workload.forward_flops + workload.clipping_flops
    )  # Two views, forward and backward.
    assert row["compute"] == pytest.approx(flops / (275e12 * UTILIZATION))
    assert row["update"] == pytest.approx(row["compute"] + row["all_reduce"] + row["noise"])
    assert row["examples_per_second"] == pytest.approx(1024 / row["update"])
    assert row["host_bytes_per_second"] == pytest.approx(256 * 192 / row["update"])
    assert row["host_cores_decoding"] == pytest.approx(256 / row["update"] / DECODE_RATE)
    assert row["drawing"] == pytest.approx(4 * 10_000 / DRAW_RATE)


def test_a_single_chip_reduces_nothing_and_more_chips_pay_the_same_noise(workload):
    one, many = per_update(workload, 1), per_update(workload, 256)
    assert one["all_reduce"] == 0 < many["all_reduce"]
    assert one["noise"] == many["noise"] > 0
    assert one["efficiency"] > many["efficiency"]
    assert one["uneven_rows"] == pytest.approx(0, abs=1e-12)


def big(**changes):
    fields = dict(
        parameters=25_000_000,
        batch_size=16_384,
        capacity=16_384,
        views=4,
        image_bytes=150_528,
        forward_flops=8e9,
        clipping_flops=3.2e10,
        capture_bytes=66_000_000,
        num_examples=1_000_000,
    )
    return scaling_model.Workload(**{**fields, **changes})


def limits(workload, chips, decode_rate=400.0, draw_rate=1e9):
    row = scaling_model.per_update(workload, chips, scaling_model.V4, 0.3, decode_rate, draw_rate)
    return scaling_model.limits(row, scaling_model.V4)


def test_arithmetic_limits_few_chips_and_the_noise_many():
    assert limits(big(), 64) == []
    (found,) = limits(big(), 2048)
    assert found.endswith(": noise.")


@pytest.mark.parametrize(
    ("workload", "options", "what"),
    [
        (big(capture_bytes=10**10), {}, "does not fit"),
        (big(), dict(draw_rate=1e6), "Drawing"),
        (big(), dict(decode_rate=1.0), "decode"),
        (big(capacity=65, batch_size=64, forward_flops=1e12), {}, "uneven_rows"),
    ],
)
def test_other_limits_are_named(workload, options, what):
    (found,) = limits(workload, 64, **options)
    assert what in found


def test_the_last_line_is_json(capsys):
    scaling.main(
        "--model=lenet --image_size=28 --num_classes=10 --num_examples=60000 --batch_size=512 "
        "--steps=100 --delta=1e-5 --chips=8,2".split()
    )
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["chips"] for row in record["spread"]] == [2, 8]
    assert record["parameters"] == 61_706 + 2 * 25 * 6  # LeNet-5 with three channels for one.
    assert record["epsilon"] > 0 and record["padding"] > 0
    assert all("limits" in row for row in record["spread"])
    with pytest.raises(SystemExit, match="scaling: There is no model"):
        scaling.main(["--model=no_such_model"])
