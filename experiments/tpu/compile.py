"""Compiles a module for a TPU that need not be present. Runs in an environment with jax and libtpu.

    python experiments/tpu/compile.py MODULE.pb TOPOLOGY CORES COMPILED.txt

reads a serialized `xla.HloModuleProto` from MODULE.pb, and compiles the module for the first CORES
devices of TOPOLOGY, for example v5e:2x2. It writes the compiled module as text to COMPILED.txt, and
prints the compiler's figures as JSON.
"""

import json
import os
import pathlib
import sys
import time

# Settings of libtpu. No TPU is used, so libtpu need not ask the metadata server of a cloud machine,
# and several processes may load it.
os.environ.update(TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1", JAX_PLATFORMS="cpu")

import numpy as np
from jax._src.interpreters import mlir
from jax.experimental import topologies
from jaxlib import _jax, xla_client
from jaxlib.mlir import ir


def compile_module(module, topology, cores):
    """Compiles a module for the first `cores` devices of a TPU topology.

    Args:
        module: Bytes of an `xla.HloModuleProto`.
        topology: Name, for example `"v5e:2x2"` or `"v4:2x2x1"`.
        cores: Number of replicas, one per device.

    Returns:
        The executable. Without a TPU it cannot be run.
    """
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices[:cores]
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = cores, 1
    options.device_assignment = xla_client.DeviceAssignment.create(
        np.array([[device.id] for device in devices])
    )
    with mlir.make_ir_context():
        return devices[0].client.compile(
            read(module),
            executable_devices=_jax.DeviceList(tuple(devices)),
            compile_options=options,
        )


def read(module):
    """Returns the StableHLO module of a serialized `xla.HloModuleProto`.

    Call this function in a context of MLIR.

    Args:
        module: Bytes of the `xla.HloModuleProto`.
    """
    stablehlo = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(module))
    _drop_copies(stablehlo)
    return stablehlo


def _drop_copies(module):
    """Removes the copy operations that TensorFlow adds to results, as StableHLO lacks them."""
    copies = []

    def visit(operation):
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for copy in copies:
        copy.results[0].replace_all_uses_with(copy.operands[0])
        copy.erase()


def main(module, topology, cores, compiled):
    """Compiles the module, writes its text and prints the figures; see the module's docstring."""
    began = time.perf_counter()
    executable = compile_module(pathlib.Path(module).read_bytes(), topology, int(cores))
    seconds = time.perf_counter() - began
    pathlib.Path(compiled).write_text(executable.hlo_modules()[0].to_string())
    memory, cost = executable.get_compiled_memory_stats(), executable.cost_analysis()
    figures = {
        # Weights are updated in place, so their outputs need no extra memory.
        "state_and_batch_bytes": memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "program_bytes": memory.generated_code_size_in_bytes,
        "host_bytes": memory.host_temp_size_in_bytes + memory.host_argument_size_in_bytes,
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "compile_seconds": seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
