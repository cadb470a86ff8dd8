"""What a replica and a host do for one update, on paper, when a plan is spread over many chips."""

import dataclasses
import math

import keras
import numpy as np
import tensorflow as tf

import tfdpx
from tfdpx import per_example


@dataclasses.dataclass(frozen=True)
class Hardware:
    """A kind of TPU chip and its host, by what Google publishes of them.

    Attributes:
        flops: bfloat16 operations a second of a chip.
        memory: Bytes of a chip's memory.
        memory_bandwidth: Bytes a second.
        all_reduce_bandwidth: Bytes a second of a chip: a pod's over its chips.
        vector_flops: Vector operations a second of a chip.
        chips_per_host: Chips of a host.
        host_cores: Virtual CPUs of a host.
    """

    flops: float
    memory: float
    memory_bandwidth: float
    all_reduce_bandwidth: float
    vector_flops: float
    chips_per_host: int
    host_cores: int


# https://cloud.google.com/tpu/docs/v4: 275 Tflop/s in bfloat16, 32 GiB at 1,200 GB/s, and 1.1 PB/s
# of all-reduce for a pod of 4,096 chips. arXiv:2304.01433: two cores of 128 lanes by 16 vector
# units at 1.05 GHz, four chips a host. The virtual CPUs are those of Google's v4 machine type.
V4 = Hardware(
    flops=275e12,
    memory=32 * 2**30,
    memory_bandwidth=1.2e12,
    all_reduce_bandwidth=1.1e15 / 4096,
    vector_flops=2 * 128 * 16 * 1.05e9,
    chips_per_host=4,
    host_cores=240,
)

# What noise costs a parameter, as XLA counts it in the program it compiles for a v4
# (`make tpu-check` prints both for a model): Philox in 32-bit integers, then Box-Muller.
NOISE_OPERATIONS = 322
NOISE_BYTES = 316
_NOISE_TEMPORARY_BYTES = 64

# float32 copies of the weights in an update: weights, momentum, average, clipped sums.
_COPIES = 4


@dataclasses.dataclass(frozen=True)
class Workload:
    """What a model and a plan ask for, before it is spread over chips.

    Attributes:
        parameters: Trainable parameters.
        batch_size: Expected examples an update.
        capacity: Rows of a padded batch, as `tfdpx.PrivacyPlan.capacity`.
        views: Images the step differentiates for each example.
        image_bytes: Bytes of an example as it travels to the device, of uint8.
        forward_flops: Floating point operations of the forward pass of an image.
        clipping_flops: Of norms and clipped sums, for an example with all its views.
        capture_bytes: Bytes that an image keeps alive until it is clipped, in bfloat16: the inputs
            of the layers with weights, and the gradients at their outputs.
        num_examples: Training examples, each of which every draw of a batch looks at.
    """

    parameters: int
    batch_size: int
    capacity: int
    views: int
    image_bytes: int
    forward_flops: float
    clipping_flops: float
    capture_bytes: int
    num_examples: int

    @property
    def example_flops(self):
        """Of the private step, for an example: forward, backward over activations, clipping."""
        return 2 * self.views * self.forward_flops + self.clipping_flops

    @property
    def ordinary_flops(self):
        """Of an ordinary step, for as many images."""
        return 3 * self.views * self.forward_flops


def per_update(workload, chips, hardware, utilization, decode_rate, draw_rate):
    """What each replica and each host does for one update on `chips` chips.

    Args:
        workload: `Workload`.
        chips: Int, replicas.
        hardware: `Hardware`.
        utilization: Float in (0, 1], share of the peak arithmetic that is reached.
        decode_rate: Float, JPEG images a second that one core of a host decodes.
        draw_rate: Float, examples a second that one core of a host decides about, when it draws.

    Returns:
        Dict of figures; times in seconds. `efficiency` is the share of a replica's time that goes
        into its even part of the padded batch.
    """
    rows = math.ceil(workload.capacity / chips)
    hosts = math.ceil(chips / hardware.chips_per_host)
    gradient_bytes = 4 * workload.parameters
    compute = rows * workload.example_flops / (hardware.flops * utilization)
    # A ring, or a torus of rings, sends and receives nearly twice what it reduces.
    all_reduce = 2 * (chips - 1) / chips * gradient_bytes / hardware.all_reduce_bandwidth
    noise = max(
        NOISE_OPERATIONS * workload.parameters / hardware.vector_flops,
        NOISE_BYTES * workload.parameters / hardware.memory_bandwidth,
    )
    seconds = compute + all_reduce + noise
    even = compute / rows * workload.capacity / chips
    state = _COPIES * gradient_bytes + _NOISE_TEMPORARY_BYTES * workload.parameters
    fitting = int((hardware.memory - state) // (workload.views * workload.capture_bytes))
    rate = workload.batch_size / seconds
    return {
        "chips": chips,
        "hosts": hosts,
        "rows_per_replica": rows,
        "microbatch_size_that_fits": min(rows, fitting),
        "all_reduced_bytes": gradient_bytes,
        "compute": compute,
        "uneven_rows": compute - even,
        "all_reduce": all_reduce,
        "noise": noise,
        "update": seconds,
        "efficiency": even / seconds,
        "examples_per_second": rate,
        "host_bytes_per_second": rate / hosts * workload.image_bytes,
        "host_cores_decoding": rate / hosts / decode_rate,
        # Each replica's share is cut from a draw of its own.
        "drawing": min(chips, hardware.chips_per_host) * workload.num_examples / draw_rate,
    }


def limits(row, hardware, least_efficiency=0.9):
    """What other than arithmetic limits an update, as a list of sentences.

    Args:
        row: Dict of `per_update`.
        hardware: `Hardware`.
        least_efficiency: Float, what still counts as scaling.
    """
    found = []
    if row["microbatch_size_that_fits"] < 1:
        found.append("One example with its views does not fit in memory.")
    if row["drawing"] > row["update"]:
        found.append("Drawing the batches takes a host longer than the update.")
    if row["host_cores_decoding"] > hardware.host_cores:
        found.append("The hosts cannot decode the images in time.")
    if row["efficiency"] < least_efficiency:
        costs = {name: row[name] for name in ("noise", "all_reduce", "uneven_rows")}
        found.append(f"Efficiency falls below {least_efficiency:.0%}: {max(costs, key=costs.get)}.")
    return found


def workload_of(model, plan, augmult, image_shape):
    """The `Workload` of a model from uint8 images to logits.

    Args:
        model: `keras.Model`, uncompiled.
        plan: `tfdpx.PrivacyPlan`.
        augmult: Int, views of each example, 0 for none.
        image_shape: `(height, width, channels)`.
    """
    views = max(augmult, 1)
    model.compile(
        tfdpx.DPSGD(1.0, plan=plan),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=True,
    )
    choices = per_example.explain(model, np.zeros((views, *image_shape), "uint8"), views)
    return Workload(
        parameters=sum(v.value.shape.num_elements() for v in model.trainable_variables),
        batch_size=plan.batch_size,
        capacity=plan.capacity,
        views=views,
        image_bytes=math.prod(image_shape),
        forward_flops=_forward_flops(model, image_shape),
        clipping_flops=sum(choice.flops for choice in choices),
        capture_bytes=2 * _captured_elements(model),
        num_examples=plan.num_examples,
    )


def _forward_flops(model, image_shape):
    """Of one image, as TensorFlow's profiler counts the operations of the traced model."""
    traced = tf.function(lambda x: model(x, training=True), autograph=False).get_concrete_function(
        tf.TensorSpec([1, *image_shape], "uint8")
    )
    options = tf.compat.v1.profiler.ProfileOptionBuilder(
        tf.compat.v1.profiler.ProfileOptionBuilder.float_operation()
    ).with_empty_output()
    return tf.compat.v1.profiler.profile(traced.graph, options=options.build()).total_float_ops


def _leaves(layer):
    if not isinstance(layer, keras.Model):
        return [layer]
    return [leaf for inner in layer.layers for leaf in _leaves(inner)]


def _captured_elements(model):
    layers = [layer for layer in _leaves(model) if layer.trainable_weights]
    return sum(
        math.prod(tensor.shape[1:])
        for layer in layers
        for tensor in keras.tree.flatten((layer.input, layer.output))
    )
