r"""Times exported training steps on the accelerator that JAX finds; runs in an environment of jax.

    make tpu-check ARGS="--cores=1 --batch_per_core=256 --model=wrn_16_4 --image_shape=32,32,3"
    .venv-tpu/bin/python -m experiments.benchmark.accelerator_timing \
        build/tpu/wrn_16_4_{ordinary,private}_1.pb

TensorFlow need not see the accelerator. Each module is compiled and run on made-up arguments, in
turn with the others. Prints a line for each, and last one JSON object: by name the median seconds
of a step and the bytes that it holds at its peak, and `step_ratio`, of the last module's seconds to
the first's.
"""

import json
import pathlib
import statistics
import sys
import time

import jax
import numpy as np
from jax._src.interpreters import mlir
from jaxlib import _jax, xla_client

from tools import stablehlo_module

REPEATS = 20
# Seeds and counters have 64 bits.
jax.config.update("jax_enable_x64", True)


def compile_module(module):
    """The executable for the first device, and made-up arguments, arrays of NumPy.

    Args:
        module: Bytes of a serialized `xla.HloModuleProto`.
    """
    device = jax.devices()[0]
    shapes = xla_client.XlaComputation(module).program_shape().parameter_shapes()
    with mlir.make_ir_context():
        executable = device.client.compile_and_load(
            stablehlo_module.read(module), _jax.DeviceList((device,)), xla_client.CompileOptions()
        )
    return executable, [_made_up(shape) for shape in shapes]


def _made_up(shape):
    """Small numbers for weights and images; ones for what is counted, so that rows are present."""
    dtype, size = shape.numpy_dtype(), shape.dimensions()
    if np.issubdtype(dtype, np.floating) and len(size) > 1:
        return np.random.default_rng(0).normal(scale=0.05, size=size).astype(dtype)
    return np.ones(size, dtype)


def main(paths):
    """Compiles all, then times them in turn."""
    made = {pathlib.Path(p).stem: compile_module(pathlib.Path(p).read_bytes()) for p in paths}
    seconds = {name: [] for name in made}
    for repeat in range(REPEATS + 2):
        for name, (executable, arguments) in made.items():
            # A step overwrites the weights: its arguments are gone afterwards.
            fresh = jax.block_until_ready([jax.device_put(a, jax.devices()[0]) for a in arguments])
            began = time.perf_counter()
            jax.block_until_ready(executable.execute(fresh))
            if repeat > 1:  # The first two are not timed.
                seconds[name].append(time.perf_counter() - began)
    record = {"device": jax.devices()[0].device_kind}
    for name, (executable, _) in made.items():
        memory = executable.get_compiled_memory_stats()
        held = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        record[name] = {"seconds": statistics.median(seconds[name]), "peak_bytes": held}
        print(name, record[name], flush=True)
    first, *_, last = (record[name]["seconds"] for name in made)
    print(json.dumps({**record, "step_ratio": last / first}))


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit("Give two or more modules, the ordinary step's first.")
    main(sys.argv[1:])
