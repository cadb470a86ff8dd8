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

from tfdpx.train import devices, output, presets, resume, run, settings
from tfdpx.train.errors import UserError, in_one_line, parse_flags

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
# Flags that only runs on images by updates have, and that are not settings.
_OF_UPDATES = ("resume", "dry_run", "strategy", "tpu", "cpu_devices")


def main(argv):
    """Runs the training that the flags describe; errors of the user become one line."""
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
        # First, since TensorFlow cannot divide devices once a value is made, as settings make some.
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
    app.run(main, flags_parser=parse_flags)
