r"""Trains a classifier with differential privacy and reports accuracy and epsilon.

    tfdpx classify --preset=digits --epsilon=3
    tfdpx classify --dataset=folder:PATH --epsilon=3       images as PATH/CLASS/NAME.jpg
    tfdpx classify --dataset=csv:PATH --target=COLUMN --epsilon=3
    tfdpx classify --head=least_squares --init_from=MODEL.keras --dataset=NAME --epsilon=1

A preset sets every option, and flags override it. Leave out one of --epsilon, --noise_multiplier,
--steps and --batch_size: the program computes it from the other three. The program writes the
model, its record, a statement to cite, and a page (report.html) to the working folder. The last
line that it prints is one JSON object. Ctrl-C saves the run and ends the program; --workdir=PATH
--resume continues the run. Do not publish the log, because progress bars show private metrics. For
all flags see --helpfull and docs/flags.md.
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import time

from absl import flags

from tfdpx.train import devices, output, presets, resume, run, settings
from tfdpx.train.errors import UserError, in_one_line, start_program

_PRESET = flags.DEFINE_string(
    "preset",
    None,
    "Settings to start from: digits, folder, table12/eps8 and others (docs/presets.md). Default: "
    "folder for --dataset=folder:PATH, else digits.",
)
# The flags that --help lists. --helpfull lists all flags.
COMMON = (
    *("dataset", "epsilon", "right_guesses", "delta", "model", "init_from", "trainable"),
    *("head", "target", "user", "steps", "learning_rate", "workdir", "download", "resume"),
    "dry_run",
)
for _name in COMMON:
    flags.declare_key_flag(_name)
# Flags that are not fields of `Settings`. Only trainings on images accept them, not tables or
# heads.
_OF_UPDATES = ("resume", "dry_run", "strategy", "tpu", "cpu_devices")


def main(argv):
    """Runs the training that the flags describe. A `UserError` is printed as one line."""
    with in_one_line("tfdpx.train.classify", argv):
        values = settings.flag_values()
        kind = settings.kind_of(values["dataset"], values["head"])
        foreign = [flags.FLAGS[name] for name in _OF_UPDATES if kind != settings.IMAGES]
        for flag in foreign:
            if flag.value != flag.default:
                raise UserError(
                    f"Flag --{flag.name} belongs to {settings.IMAGES}, not to {kind}. Received: "
                    f"--{flag.name}={flag.value}. Leave it out."
                )
        preset = _PRESET.value or presets.default_for(kind, values["dataset"])
        # The strategy comes first. Reading the settings creates tensors, and after its first tensor
        # TensorFlow cannot split the CPU into logical devices.
        strategy = None if settings.DRY_RUN.value else devices.from_flags()
        asked = resume.resumed(_PRESET.value, values) or settings.resolve(_PRESET.value, values)
        if settings.DRY_RUN.value:
            record = run.describe(asked)
            output.print_table(record, title=f"{preset}: nothing was trained")
        else:
            path = settings.WORKDIR.value or time.strftime(f"runs/{preset}-%Y%m%d-%H%M%S")
            with resume.working_folder(path, devices.is_chief(strategy)) as workdir:
                record = run.run(asked, preset, workdir, strategy)
    if record is not None:
        print(output.to_json(record), flush=True)


if __name__ == "__main__":
    start_program(main)
