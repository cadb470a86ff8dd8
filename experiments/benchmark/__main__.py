"""Runs `experiments.benchmark.program`."""

from absl import app, flags

from experiments.benchmark import program

if __name__ == "__main__":
    __doc__ = program.__doc__  # What --help prints.
    program.define_flags(flags.FLAGS)
    flags.adopt_module_key_flags(program)
    app.run(program.main)
