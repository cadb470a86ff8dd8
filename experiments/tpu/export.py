"""Traces a training step as one core of a TPU would run it, and exports it for a compiler.

`tf.distribute.TPUStrategy` needs a TPU. On a machine without a TPU, `CompileOnlyTPUStrategy` takes
its place while a step is traced. The step is traced in a replica context as usual. Its sums over
replicas become an all-reduce of XLA, as on a TPU.
"""

import dataclasses

import keras
import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.distribute import one_device_strategy

import tfdpx
from tfdpx import noise
from tfdpx._keras import model_internals, step_context
from tfdpx.train import start_from

NUM_CLASSES = 10
_CENTRE = 127.5


@dataclasses.dataclass(frozen=True)
class Step:
    """The settings of a training step that is exported for one core.

    Attributes:
        model: Name of a model in `tfdpx.train.objects.MODELS`.
        image_shape: `(height, width, channels)`.
        batch_per_core: The number of examples on each core.
        cores: The number of replicas.
        private: Bool, whether the optimizer is `tfdpx.DPSGD`; otherwise it is
            `keras.optimizers.SGD`.
        augmult: The number of views of each example, 0 for none. The ordinary step gets a batch
            that is larger by this factor, so both steps differentiate the same number of images.
        microbatch_size: The number of examples per pass of the private step; None for one pass.
        noise_multiplier: Float, the noise multiplier of the private step.
    """

    model: str
    image_shape: tuple
    batch_per_core: int
    cores: int
    private: bool
    augmult: int = 0
    microbatch_size: int | None = None
    noise_multiplier: float = 1.0


class CompileOnlyTPUStrategy(tf.distribute.TPUStrategy):
    """A `TPUStrategy` that only traces functions and never runs them.

    Each variable has one copy, which belongs to the core that is traced.

    Args:
        cores: Int, the number of replicas.
    """

    def __init__(self, cores):
        # Skips TPUStrategy's constructor, which looks for a TPU.
        tf.distribute.Strategy.__init__(self, _Extended(self, cores))

    def trace(self, fn, args, replica):
        """Traces `fn(*args)` in the replica context of the core with the number `replica`.

        Args:
            fn: Function.
            args: Tuple of the arguments of `fn`.
            replica: Scalar int32 tensor. As on a TPU, all cores run one program, which reads it.
        """
        with self.scope(), tf.distribute.ReplicaContext(self, replica):
            return fn(*args)


class _Extended(one_device_strategy.OneDeviceExtended):
    num_hosts = 1

    def __init__(self, strategy, cores):
        super().__init__(strategy, "/cpu:0")
        self._cores = cores

    @property
    def _num_replicas_in_sync(self):
        return self._cores

    def _use_merge_call(self):
        return False

    def _get_local_replica_id(self, replica_id_in_sync_group):
        return replica_id_in_sync_group

    def _replica_ctx_all_reduce(self, reduce_op, value, options=None):
        if reduce_op != tf.distribute.ReduceOp.SUM:
            raise NotImplementedError(f"Only sums are reduced. Received: reduce_op={reduce_op}")
        group = [list(range(self._cores))]
        return tf.nest.map_structure(
            lambda tensor: gen_xla_ops.xla_all_reduce(tensor, group, "Add", "CrossReplica"), value
        )


def export(step, steps_through=None):
    """Traces one training step and exports it for a compiler.

    Args:
        step: A `Step`.
        steps_through: Optional function, for tests. It takes a model and data and makes a training
            step, in place of `model.train_step(data)`.

    Returns:
        Bytes of a serialized `xla.HloModuleProto`, and the number of trainable parameters.

    Raises:
        RuntimeError: If the module does not read every tensor of the batch and every variable. XLA
            has taken the missing ones for constants, and would compile again at every update.
    """
    strategy = CompileOnlyTPUStrategy(step.cores)
    with strategy.scope():
        model = start_from.classifier(step.model, step.image_shape, NUM_CLASSES, _CENTRE)
        model.compile(
            optimizer=_optimizer(step),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            jit_compile=True,
        )
        data = _batch(step)
        # Keras creates metrics and optimizer slots on the first batch. This must not happen in the
        # trace.
        model_internals.build(model, data)
        model.optimizer.build(model.trainable_variables)
    train = steps_through or (lambda model, data: model.train_step(data))

    @tf.function(jit_compile=True, autograph=False)
    def run(replica, *data):
        return strategy.trace(train, (model, data), replica)

    arguments = (tf.constant(0), *data)
    with step_context.driving(model, "tfdpx"):
        inputs = run.get_concrete_function(*arguments).inputs
        module = run.experimental_get_compiler_ir(*arguments)(stage="hlo_serialized")
    _check_parameters(module, inputs)
    return module, sum(v.value.shape.num_elements() for v in model.trainable_variables)


def export_noise(parameters):
    """Exports only the noise of one update. Its time does not depend on the number of cores.

    Args:
        parameters: Int, the number of trainable parameters.

    Returns:
        Bytes of a serialized `xla.HloModuleProto`. It maps a seed and sums to noisy sums.
    """

    @tf.function(jit_compile=True, autograph=False)
    def add_noise(seed, sums):
        return sums + noise.normal([parameters], seed)

    inputs = (tf.zeros([2], "int64"), tf.zeros([parameters]))
    return add_noise.experimental_get_compiler_ir(*inputs)(stage="hlo_serialized")


def _optimizer(step):
    momentum = dict(learning_rate=1.0, momentum=0.9, use_ema=True)
    if not step.private:
        return keras.optimizers.SGD(**momentum)
    return tfdpx.DPSGD(
        **momentum,
        batch_size=step.batch_per_core * step.cores,
        noise_multiplier=step.noise_multiplier,
        microbatch_size=step.microbatch_size,
        augment=tfdpx.augment.RandomCropFlip(padding=1) if step.augmult else None,
        augmult=step.augmult,
    )


def _batch(step):
    """Returns tensors like a batch from `plan.batches`; only their shapes and dtypes matter."""
    rows = step.batch_per_core * (1 if step.private else max(step.augmult, 1))
    arrays = (
        np.zeros((rows, *step.image_shape), "uint8"),
        np.zeros(rows, "int64"),
        np.ones(rows, "float32"),
    )
    return tuple(map(tf.constant, arrays))


def _check_parameters(module, inputs):
    proto = hlo_pb2.HloModuleProto.FromString(module)
    count = len(proto.host_program_shape.parameters)
    if count != len(inputs):
        raise RuntimeError(
            f"The exported step has {count} parameters for {len(inputs)} inputs: XLA needs the "
            "others as compile-time constants and would compile the step anew for every batch."
        )
