r"""Compiles the private and the ordinary training step for a TPU that need not be present.

    make tpu-check ARGS="--augmult=4 --topology=v4:2x2x1"

TensorFlow traces each step as one core of a TPUStrategy would run it (`export.py`). libtpu compiles
the step in a separate virtual environment (`compile.py`), once for one core and once for four. The
private step must not wait for the host. On four cores it must have exactly one all-reduce of
gradients, outside of any loop; on one core, none. The program prints a table and one line of JSON,
and exits with 1 if a step has a fault. No step is run, so the speed remains unknown.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys

import keras

from experiments.tpu import compiled, export


def parse(arguments=None):
    """Returns the flags, a namespace."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--python", default=".venv-tpu/bin/python", help="Interpreter with jax and libtpu.")
    add("--out", type=pathlib.Path, default="build/tpu", help="Folder for the modules.")
    add("--topology", default="v5e:2x2", help="Four or more devices of a TPU.")
    add("--cores", type=int, action="append", help="Cores to compile for; default: 1 and 4.")
    add("--model", default="small_cnn", help="A model as in classify --model.")
    add("--image_shape", default="8,8,1", help="Height, width, channels.")
    add("--batch_per_core", type=int, default=64, help="Examples per core.")
    add("--augmult", type=int, default=0, help="Views of each example.")
    add("--precision", default="float32", help="Keras dtype policy.")
    return parser.parse_args(arguments)


def main(arguments=None):
    """Exports and compiles the steps, looks for faults, and prints the results."""
    values = parse(arguments)
    keras.config.set_dtype_policy(values.precision)
    values.out.mkdir(parents=True, exist_ok=True)
    results = []
    for name, step in steps(values):
        module, parameters = export.export(step)
        figures, text = compile_for_tpu(values, module, f"{step.model}_{name}", step.cores)
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
    noise, _ = compile_for_tpu(values, export.export_noise(parameters), "noise", 1)
    print_table(results)
    faults = [f"{r['step']}, {r['cores']} cores: {f}" for r in results for f in r["faults"]]
    print(*faults, sep="\n", end="\n" if faults else "")
    record = {
        "model": values.model,
        "image_shape": list(step.image_shape),
        "parameters": parameters,
        "batch_per_core": values.batch_per_core,
        "augmult": values.augmult,
        "precision": values.precision,
        "topology": values.topology,
        "ok": not faults,
        "noise": noise,
        "steps": results,
    }
    print(json.dumps(record))
    sys.exit(1 if faults else 0)


_MEMORY = ("state_and_batch_bytes", "temporary_bytes", "program_bytes")


def steps(values):
    """Yields pairs: the name of a step to compile, and its `Step`."""
    shape = tuple(map(int, values.image_shape.split(",")))
    for cores in values.cores or [1, 4]:
        private = export.Step(
            values.model, shape, values.batch_per_core, cores, True, augmult=values.augmult
        )
        yield "ordinary", dataclasses.replace(private, private=False)
        yield "private", private
        if cores > 1:
            # Even with several passes, the gradients must be reduced only once.
            half = -(-values.batch_per_core // 2)
            yield "private_2_passes", dataclasses.replace(private, microbatch_size=half)


def compile_for_tpu(values, module, name, cores):
    """Compiles a module in the other virtual environment, by `compile.py`.

    Args:
        values: The flags.
        module: Bytes of an `xla.HloModuleProto`.
        name: String, used for the files of the module and of the compiled text.
        cores: Int, the number of cores.

    Returns:
        Dict of the compiler's figures, and the compiled module as text.
    """
    source, listing = (values.out / f"{name}_{cores}{end}" for end in (".pb", ".txt"))
    source.write_bytes(module)
    program = pathlib.Path(__file__).with_name("compile.py")
    command = [values.python, program, source, values.topology, str(cores), listing]
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
    main()
