"""What is exported for a TPU's compiler is the step that tfdpx trains with, on every core."""

import dataclasses

import keras
import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from experiments.tpu import export

STEP = export.Step(model="lenet", image_shape=(28, 28, 1), batch_per_core=4, cores=4, private=True)


def instructions(module):
    """(opcode, computation) of every instruction."""
    proto = hlo_pb2.HloModuleProto.FromString(module)
    return [(i.opcode, c.name) for c in proto.computations for i in c.instructions]


def all_reduces(module):
    return [where for opcode, where in instructions(module) if opcode == "all-reduce"]


def reduced_elements(module):
    proto = hlo_pb2.HloModuleProto.FromString(module)
    sizes = [
        tf.TensorShape(i.shape.dimensions).num_elements()
        for c in proto.computations
        for i in c.instructions
        if i.opcode == "all-reduce"
    ]
    return sum(sizes)


def altered(**changes):
    return dataclasses.replace(STEP, **changes)


@pytest.mark.slow
def test_four_cores_reduce_the_clipped_sums_once():
    module, parameters = export.export(STEP)
    assert len(all_reduces(module)) == 1
    # The counts of examples, and of those that are not finite, go along.
    assert reduced_elements(module) == parameters + 2


@pytest.mark.slow
def test_one_core_reduces_nothing():
    module, _ = export.export(altered(cores=1))
    assert all_reduces(module) == []


@pytest.mark.slow
def test_several_passes_reduce_once_and_outside_of_the_loop():
    module, _ = export.export(altered(microbatch_size=2))
    assert "while" in [opcode for opcode, _ in instructions(module)]
    (where,) = all_reduces(module)
    assert where == hlo_pb2.HloModuleProto.FromString(module).entry_computation_name


@pytest.mark.slow
def test_views_are_made_in_the_step():
    module, _ = export.export(altered(augmult=2))
    assert len(all_reduces(module)) == 1


@pytest.mark.slow
def test_keras_reduces_the_gradients_of_the_ordinary_step():
    module, parameters = export.export(altered(private=False))
    assert reduced_elements(module) == parameters


@pytest.mark.slow
def test_a_step_that_reduces_twice_is_seen():
    def train(model, data):
        logs = model.train_step(data)
        context = tf.distribute.get_replica_context()
        again = [context.all_reduce("SUM", v.value) for v in model.trainable_variables]
        return logs, again

    module, parameters = export.export(STEP, train)
    assert reduced_elements(module) == 2 * parameters + 2


@pytest.mark.slow
def test_a_batch_that_xla_needs_at_compile_time_is_refused():
    def train(model, data):
        x, y, sample_weight = data
        return tf.zeros([y[0]]), model.train_step((x, y, sample_weight))

    with pytest.raises(RuntimeError, match="compile the step anew for every batch"):
        export.export(STEP, train)


@pytest.mark.slow
def test_a_step_that_calls_python_cannot_be_exported():
    def train(model, data):
        x, y, sample_weight = data
        y = tf.ensure_shape(tf.numpy_function(lambda labels: labels, [y], tf.int64), y.shape)
        return model.train_step((x, y, sample_weight))

    with pytest.raises(ValueError, match="PyFunc"):
        export.export(STEP, train)


@pytest.mark.slow
def test_the_strategy_is_a_tpus_to_whoever_asks():
    strategy = export.CompileOnlyTPUStrategy(4)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert (strategy.num_replicas_in_sync, strategy.extended.num_hosts) == (4, 1)
    with strategy.scope():
        assert keras.Variable(1.0).value.shape == ()
    with pytest.raises(NotImplementedError, match="Only sums"):
        strategy.trace(
            lambda: tf.distribute.get_replica_context().all_reduce("MEAN", tf.zeros([])), (), 0
        )


@pytest.mark.slow
def test_the_noise_that_is_exported_is_tfdpxs():
    parameters = 10
    module = hlo_pb2.HloModuleProto.FromString(export.export_noise(parameters))
    inputs = [list(shape.dimensions) for shape in module.host_program_shape.parameters]
    assert inputs == [[2], [parameters]]
    opcodes = {i.opcode for c in module.computations for i in c.instructions}
    assert {"rng-bit-generator", "log", "sine", "cosine"} <= opcodes
