"""The hook: idempotent, removable, and without effect on models that are not private."""

import logging

import keras
import numpy as np
import pytest
import small
import tensorflow as tf
from tensorflow.core.protobuf import config_pb2, rewriter_config_pb2
from tensorflow.python.eager import context

from tfdpx._keras import hook, tensorflow_internals


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


def test_what_a_user_sets_while_graphs_are_optimized_less_stays():
    def arithmetic():
        config = context.context().function_call_options.config_proto_serialized
        options = config_pb2.ConfigProto.FromString(config).graph_options.rewrite_options
        return options.arithmetic_optimization

    before = arithmetic()
    with tensorflow_internals.sparing_graph_optimizer():
        pass
    assert arithmetic() == before
    try:
        with tensorflow_internals.sparing_graph_optimizer():
            tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
        assert arithmetic() == rewriter_config_pb2.RewriterConfig.OFF
    finally:
        tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})


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


def test_a_graph_of_the_private_step_holds_equal_small_integers_once():
    shapes = [[2, 3], np.array([2, 3], "int32"), np.array([2, 3]), [3, 2], np.array([[2, 3]])]

    @tf.function(autograph=False)
    def trace(x):
        with tensorflow_internals.sharing_constants():
            pairs = [(tf.constant(shape), tf.constant(shape)) for shape in shapes]
            floats = tf.constant(1.0), tf.constant(1.0)
            with tf.control_dependencies([x]):
                late = tf.constant([9])
            early = tf.constant([9])
        assert late.op.control_inputs and not early.op.control_inputs
        assert floats[0].op is not floats[1].op
        assert all(first.op is second.op for first, second in pairs)
        assert len({first.op for first, _ in pairs}) == len(shapes)
        assert tf.constant([2, 3]).op is not pairs[0][0].op
        pairs[0][0].mark = True
        assert not hasattr(pairs[0][1], "mark")
        return pairs

    for shape, pair in zip(shapes, trace(tf.zeros([])), strict=True):
        for constant in pair:
            assert constant.dtype == tf.constant(shape).dtype
            np.testing.assert_array_equal(constant, shape)
