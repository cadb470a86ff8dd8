r"""Compiles the private and the ordinary training step for a TPU, without one, and compares them.

    make tpu-check ARGS="--augmult=4 --topology=v4:2x2x1"

Each step is traced by TensorFlow as one core of a TPUStrategy runs it (`export.py`) and compiled by
libtpu in a virtual environment of its own (`compile.py`), for one core and for four. The private
step must hold exactly one all-reduce of gradients on four cores, outside of any loop, none on one,
and nothing that waits for the host. Prints a table and one line of JSON; exits with 1 if a step has
a fault. Nothing is run: this says nothing of speed.
"""

import dataclasses
import json
import pathlib
import subprocess
import sys

import keras
from absl import app, flags

from experiments.tpu import compiled, export

_PYTHON = flags.DEFINE_string("python", ".venv-tpu/bin/python", "Interpreter with jax and libtpu.")
_OUT = flags.DEFINE_string("out", "build/tpu", "Folder for the modules.")
_TOPOLOGY = flags.DEFINE_string("topology", "v5e:2x2", "Four or more devices of a TPU.")
_CORES = flags.DEFINE_multi_integer("cores", [1, 4], "Cores to compile for.")
_MODEL = flags.DEFINE_string("model", "small_cnn", "A model of tfdpx.train.run.classifiers.")
_IMAGE_SHAPE = flags.DEFINE_list("image_shape", ["8", "8", "1"], "Height, width, channels.")
_BATCH = flags.DEFINE_integer("batch_per_core", 64, "Examples a core.")
_AUGMULT = flags.DEFINE_integer("augmult", 0, "Views of each example.")
_PRECISION = flags.DEFINE_string("precision", "float32", "Keras dtype policy.")


def main(argv):
    """Exports, compiles, judges and prints."""
    del argv
    keras.config.set_dtype_policy(_PRECISION.value)
    out = pathlib.Path(_OUT.value)
    out.mkdir(parents=True, exist_ok=True)
    results = []
    for name, step in steps():
        module, parameters = export.export(step)
        figures, text = compile_for_tpu(module, out / f"{step.model}_{name}", step.cores)
        reductions = compiled.all_reduces(text)
        results.append(
            {
                "step": name,
                "cores": step.cores,
                "total_bytes": sum(figures[key] for key in figures if key in _MEMORY),
                **figures,
                "gradient_all_reduces": sum(r.is_gradient for r in reductions),
                "all_reduced_bytes": sum(r.bytes for r in reductions),
                "faults": compiled.faults(text, step.cores, parameters),
            }
        )
        print(f"{name}, {step.cores} core(s): {figures['compile_seconds']:.0f} s", flush=True)
    noise, _ = compile_for_tpu(export.export_noise(parameters), out / "noise", cores=1)
    print_table(results)
    faults = [f"{r['step']}, {r['cores']} cores: {f}" for r in results for f in r["faults"]]
    print(*faults, sep="\n", end="\n" if faults else "")
    record = {
        "model": _MODEL.value,
        "image_shape": list(map(int, _IMAGE_SHAPE.value)),
        "parameters": parameters,
        "batch_per_core": _BATCH.value,
        "augmult": _AUGMULT.value,
        "precision": _PRECISION.value,
        "topology": _TOPOLOGY.value,
        "ok": not faults,
        "noise": noise,
        "steps": results,
    }
    print(json.dumps(record))
    sys.exit(1 if faults else 0)


_MEMORY = ("state_and_batch_bytes", "temporary_bytes", "program_bytes")


def steps():
    """Yields the name and the `Step` of everything to compile."""
    shape = tuple(map(int, _IMAGE_SHAPE.value))
    for cores in _CORES.value:
        private = export.Step(
            _MODEL.value, shape, _BATCH.value, cores, private=True, augmult=_AUGMULT.value
        )
        yield "ordinary", dataclasses.replace(private, private=False)
        yield "private", private
        if cores > 1:
            # The gradients of several passes are to be reduced once.
            yield (
                "private_2_passes",
                dataclasses.replace(private, microbatch_size=-(-_BATCH.value // 2)),
            )


def compile_for_tpu(module, path, cores):
    """Compiles in the other virtual environment.

    Args:
        module: Bytes of an `xla.HloModuleProto`.
        path: Where to write it and the compiled text; the number of cores and a suffix are added.
        cores: Int.

    Returns:
        Dict of figures, and the compiled module as text.
    """
    source, listing = (path.with_name(f"{path.name}_{cores}{end}") for end in (".pb", ".txt"))
    source.write_bytes(module)
    program = pathlib.Path(__file__).with_name("compile.py")
    command = [_PYTHON.value, program, source, _TOPOLOGY.value, str(cores), listing]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"The compiler refused {source}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1]), listing.read_text()


def print_table(results):
    """Prints a row for each compiled step."""
    print(
        "step, cores: MB of state, temporary, program; Gflop; GB read and written; all-reduces; MB"
    )
    for r in results:
        memory = " ".join(f"{r[key] / 1e6:.2f}" for key in _MEMORY)
        cost = f"{r['flops'] / 1e9:.3f}; {r['bytes_accessed'] / 1e9:.3f}"
        reduced = f"{r['gradient_all_reduces']}; {r['all_reduced_bytes'] / 1e6:.3f}"
        print(f"{r['step']}, {r['cores']}: {memory}; {cost}; {reduced}")


if __name__ == "__main__":
    app.run(main)
