"""TensorFlow's warning of retracing: hidden for functions of tfdpx, shown for the user's."""

import logging

import pytest
import tensorflow as tf

MESSAGE = "5 out of the last 5 calls to {} triggered tf.function retracing. Tracing is expensive"


@pytest.mark.parametrize(
    "function, is_shown",
    [
        ("<function pfor.<locals>.f at 0x7f099a48d080>", False),
        ("<function my_step at 0x7f099a48d080>", True),
        ("<function TensorFlowTrainer._make_function.<locals>.multi_step_on_iterator>", True),
    ],
)
def test_only_what_the_user_can_change_is_shown(function, is_shown):
    record = logging.makeLogRecord({"msg": MESSAGE.format(function), "levelno": logging.WARNING})
    assert bool(tf.get_logger().filter(record)) is is_shown
