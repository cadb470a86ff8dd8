r"""Trains a classifier with differential privacy and reports accuracy and epsilon.

    tfdpx classify --preset=digits --epsilon=3
    tfdpx classify --dataset=folder:PATH --epsilon=8       images as PATH/CLASS/NAME.jpg
    tfdpx classify --dataset=csv:PATH --target=COLUMN --epsilon=3
    tfdpx classify --head=least_squares --init_from=MODEL.keras --dataset=NAME --epsilon=1

A preset has every setting, and flags override it. Leave out one of --epsilon, --noise_multiplier,
--steps and --batch_size: it is solved for. The working folder receives the model, its record, a
statement to cite and a page, report.html; the last line printed is one JSON object. Ctrl-C saves
and ends; --workdir=PATH --resume continues. Do not publish the log: progress bars show
private metrics. For all flags see --helpfull and docs/flags.md.
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import time

from absl import app, flags

from tfdpx.train import devices, dry_run, output, presets, resume, run_flags, settings
from tfdpx.train.errors import UserError, in_one_line, parse_flags
from tfdpx.train.run import run

_PRESET = flags.DEFINE_string(
    "preset",
    None,
    "Settings to start from: digits, folder, table12/eps8 and others (docs/presets.md). Default: "
    "folder for --dataset=folder:PATH, else digits.",
)
# The flags that --help lists; --helpfull lists all.
COMMON = (
    *("dataset", "epsilon", "right_guesses", "delta", "model", "init_from", "trainable"),
    *("head", "target", "user", "steps", "learning_rate", "workdir", "download", "resume"),
    "dry_run",
)
for _name in COMMON:
    flags.declare_key_flag(_name)
# Flags that only runs on images by updates have.
_OF_UPDATES = ("resume", "dry_run", "final", "strategy", "tpu", "cpu_devices")


def main(argv):
    """Runs the training that the flags describe; errors of the user become one line."""
    with in_one_line("tfdpx.train.classify", argv):
        flag_values = run_flags.given()
        preset = _PRESET.value or presets.default_for(flag_values["dataset"])
        kind = settings.kind_of(flag_values["dataset"], flag_values["head"])
        if kind != settings.IMAGES:
            _refuse_flags_of_updates(kind)
            preset = kind
        # First, since TensorFlow cannot divide devices once a value is made, as settings make some.
        strategy = None if flags.FLAGS.dry_run else devices.from_flags()
        asked = resume.resumed(_PRESET.value, flag_values)
        asked = asked or settings.resolve(_PRESET.value, flag_values)
        if record := dry_run.from_flags(asked):
            output.print_table(record, title=f"{preset}: nothing was trained")
            print(output.to_json(record), flush=True)
            return
        path = run_flags.WORKDIR.value or time.strftime(f"runs/{preset}-%Y%m%d-%H%M%S")
        with resume.working_folder(path, devices.is_chief(strategy)) as workdir:
            record = run(asked, preset, workdir, strategy)
    if record is not None:
        print(output.to_json(record), flush=True)


def _refuse_flags_of_updates(kind):
    for name in _OF_UPDATES:
        flag = flags.FLAGS[name]
        if flag.value != flag.default:
            raise UserError(
                f"Flag --{name} belongs to {settings.IMAGES}, not to {kind}. Received: "
                f"--{name}={flag.value}. Leave it out."
            )


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
