"""Reads a module that TensorFlow exported, for JAX's compilers."""

from jaxlib import _jax
from jaxlib.mlir import ir


def read(module):
    """The StableHLO module of a serialized `xla.HloModuleProto`; call it in a context of MLIR.

    Args:
        module: Bytes.
    """
    stablehlo = ir.Module.parse(_jax.mlir.hlo_to_stablehlo(module))
    _drop_copies(stablehlo)
    return stablehlo


def _drop_copies(module):
    """Removes TensorFlow's copies of results, which StableHLO has no operation for."""
    copies = []

    def visit(operation):
        if operation.name == "mhlo.copy":
            copies.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    for copy in copies:
        copy.results[0].replace_all_uses_with(copy.operands[0])
        copy.erase()
