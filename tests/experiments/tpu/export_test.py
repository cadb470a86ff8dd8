"""The step that is exported for a TPU's compiler is the step that tfdpx trains with."""

import dataclasses

import pytest
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from experiments.tpu import export

STEP = export.Step(model="lenet", image_shape=(28, 28, 1), batch_per_core=4, cores=4, private=True)
pytestmark = pytest.mark.slow


def reductions(module):
    """Yields the computation of each all-reduce, and the number of values that it reduces."""
    pairs = [
        (computation.name, tf.TensorShape(i.shape.dimensions).num_elements())
        for computation in module.computations
        for i in computation.instructions
        if i.opcode == "all-reduce"
    ]
    return [name for name, _ in pairs], sum(size for _, size in pairs)


def export_step(*train, **changes):
    module, parameters = export.export(dataclasses.replace(STEP, **changes), *train)
    return hlo_pb2.HloModuleProto.FromString(module), parameters


def opcodes(module):
    return {i.opcode for computation in module.computations for i in computation.instructions}


# Two counts are reduced too: of examples, and of those that are not finite.
@pytest.mark.parametrize(
    ("changes", "count", "more"),
    [
        ({}, 1, 2),
        (dict(microbatch_size=2), 1, 2),
        (dict(augmult=2), 1, 2),
        (dict(cores=1), 0, None),
    ],
)
def test_four_cores_reduce_the_clipped_sums_once_and_outside_of_loops(changes, count, more):
    module, parameters = export_step(**changes)
    names, size = reductions(module)
    assert names == [module.entry_computation_name] * count
    assert size == (0 if more is None else parameters + more)
    assert ("while" in opcodes(module)) >= ("microbatch_size" in changes)


def test_keras_reduces_the_gradients_of_the_ordinary_step_and_a_second_reduction_is_seen():
    module, parameters = export_step(private=False)
    assert reductions(module)[1] == parameters

    def train(model, data):
        logs = model.train_step(data)
        context = tf.distribute.get_replica_context()
        again = [context.all_reduce("SUM", v.value) for v in model.trainable_variables]
        return logs, again

    assert reductions(export_step(train)[0])[1] == 2 * parameters + 2


def test_steps_that_need_the_batch_at_compile_time_or_call_python_are_refused():
    def reads_labels(model, data):
        x, y, sample_weight = data
        return tf.zeros([y[0]]), model.train_step((x, y, sample_weight))

    def calls_python(model, data):
        x, y, sample_weight = data
        y = tf.ensure_shape(tf.numpy_function(lambda labels: labels, [y], tf.int64), y.shape)
        return model.train_step((x, y, sample_weight))

    with pytest.raises(RuntimeError, match="compile the step anew for every batch"):
        export.export(STEP, reads_labels)
    with pytest.raises(ValueError, match="PyFunc"):
        export.export(STEP, calls_python)


def test_the_strategy_is_a_tpus_and_the_noise_is_tfdpxs():
    strategy = export.CompileOnlyTPUStrategy(4)
    assert isinstance(strategy, tf.distribute.TPUStrategy)
    assert (strategy.num_replicas_in_sync, strategy.extended.num_hosts) == (4, 1)
    with pytest.raises(NotImplementedError, match="Only sums"):
        strategy.trace(
            lambda: tf.distribute.get_replica_context().all_reduce("MEAN", tf.zeros([])), (), 0
        )
    module = hlo_pb2.HloModuleProto.FromString(export.export_noise(10))
    inputs = [list(shape.dimensions) for shape in module.host_program_shape.parameters]
    assert inputs == [[2], [10]]
    assert {"rng-bit-generator", "log", "sine", "cosine"} <= opcodes(module)
