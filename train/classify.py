r"""Trains an image classifier with differential privacy and reports accuracy and epsilon.

    python -m tfdpx.train.classify --preset=digits --epsilon=3 --workdir=/tmp/digits

The preset gives every setting; flags win over it. Of --epsilon, --noise_multiplier, --steps and
--batch_size the missing one is solved for. The working directory receives:

    model.keras             the trained model, without the optimizer; `import tfdpx.layers` and
                            keras.saving.load_model read it
    report.json             what the last line of the standard output says
    curve.jsonl             accuracy and epsilon spent after every report
    learning_curve.png, confusion_matrix.png
    privacy_statement.txt   the guarantee in words
    tensorboard/            event files

On several devices or hosts: --strategy; the chief alone writes. An interrupted run goes on with
--resume, on several hosts once it is started again on all. Losses and accuracies on the training
images, which Keras's progress bar shows, are not covered by the privacy guarantee: do not publish
the log.
"""

import dataclasses
import math
import pathlib
import sys
import time

import keras
import numpy as np
import tensorflow as tf
from absl import app, flags

import tfdpx
from tfdpx.train import (
    checkpoint,
    classifiers,
    config,
    curve,
    input_pipeline,
    pictures,
    privacy_statement,
    report,
    strategy,
)
from tfdpx.train.errors import UserError, checking_flags

EVAL_BATCH_SIZE = 500

_PRESET = flags.DEFINE_string(
    "preset", "digits", f"Settings to start from, one of: {', '.join(config.preset_names())}."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Folder for everything written. Default: runs/<preset>-<date>-<time>."
)
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Folder with TensorFlow Datasets. Default: that library's own."
)
_DOWNLOAD = flags.DEFINE_bool("download", False, "Fetch the data set if --data_dir has it not.")
_RESUME = flags.DEFINE_bool("resume", False, "Go on with the unfinished run in --workdir, if any.")
_LOG_PRIVATE_METRICS = flags.DEFINE_bool(
    "log_private_metrics",
    False,
    "Also write training loss and the like, which no guarantee covers, to TensorBoard.",
)

# The settings of a run, one flag for each field of config.Config. Unset means: as the preset says.
flags.DEFINE_string("dataset", None, "digits, or an image data set of TensorFlow Datasets.")
flags.DEFINE_float("validation", None, "Hold out this fraction of the training images to measure.")
flags.DEFINE_string("model", None, f"One of: {classifiers.NAMES}.")
flags.DEFINE_float("epsilon", None, "Privacy budget.")
flags.DEFINE_float("delta", None, "The delta of (epsilon, delta)-differential privacy.")
flags.DEFINE_float("noise_multiplier", None, "Noise deviation over l2_norm_clip; 0: no privacy.")
flags.DEFINE_integer("steps", None, "Model updates.")
flags.DEFINE_integer("batch_size", None, "Expected examples a model update.")
flags.DEFINE_enum("sampling", None, ["poisson", "shuffle"], "How batches are drawn.")
flags.DEFINE_enum("accountant", None, ["pld", "rdp"], "Who computes epsilon.")
flags.DEFINE_enum("optimizer", None, ["dpsgd", "dpadam", "dpadamw"], "Optimizer.")
flags.DEFINE_float("learning_rate", None, "Learning rate, independent of l2_norm_clip.")
flags.DEFINE_float("momentum", None, "Momentum of dpsgd.")
flags.DEFINE_float("weight_decay", None, "Weight decay of dpadamw; default 0.004.")
flags.DEFINE_float("l2_norm_clip", None, "Bound on the norm of each example's gradient.")
flags.DEFINE(
    config.MicrobatchSizeParser(),
    "microbatch_size",
    None,
    "Examples a pass, or auto for what fits in memory; bounds memory, changes no result.",
)
flags.DEFINE_integer("augmult", None, "Augmented views of each example; 0: none.")
flags.DEFINE_integer("augment_padding", None, "Views are shifted by up to this many pixels.")
flags.DEFINE_bool("augment_flip", None, "Whether views are flipped left to right at random.")
flags.DEFINE_float("ema_momentum", None, "Decay of the average of the weights; 0: no average.")
flags.DEFINE_enum("precision", None, ["float32", "mixed_bfloat16"], "Keras dtype policy.")
flags.DEFINE_enum("jit_compile", None, ["auto", "true", "false"], "Compile with XLA.")
flags.DEFINE_integer("report_every", None, "Updates between reports: the length of a Keras epoch.")
flags.DEFINE_integer(
    "seed",
    None,
    "For repeatable experiments. Who knows it can remove the noise: never for release.",
)


def main(argv):
    """Runs the training that the flags describe; errors of the user become one line."""
    try:
        if len(argv) > 1:
            raise UserError(f"Only flags are understood. Received: {' '.join(argv[1:])}.")
        names = [field.name for field in dataclasses.fields(config.Config)]
        settings = config.resolve(_PRESET.value, {name: flags.FLAGS[name].value for name in names})
        devices = strategy.from_flags()
        workdir = _make_workdir(
            _WORKDIR.value or time.strftime(f"runs/{_PRESET.value}-%Y%m%d-%H%M%S"),
            strategy.is_chief(devices),
        )
        record = train(settings, workdir, devices)
    except UserError as error:
        sys.exit(f"tfdpx.train.classify: {' '.join(str(error).split())}")
    except tf.errors.UnavailableError as error:
        sys.exit(f"tfdpx.train.classify: another worker is gone; start all with --resume: {error}")
    if strategy.is_chief(devices):
        print(report.to_json(record), flush=True)


def train(settings, workdir, devices):
    """Trains and measures, on every host of the strategy `devices`; the chief writes to `workdir`.

    Returns:
        The report, a dict; None on a host that is not the chief.
    """
    is_chief = strategy.is_chief(devices)

    # The data: bytes in memory. They are normalised in the model.
    classifiers.check_name(settings.model)
    with strategy.chief_first(devices, dataclasses.asdict(settings)) as entropy:
        data = input_pipeline.load(
            settings.dataset, _DATA_DIR.value, settings.validation, _DOWNLOAD.value
        )

    if settings.augment_padding >= min(data.image_shape[:2]):
        raise UserError(
            f"Flag --augment_padding must be smaller than the images of {data.name!r}, of shape "
            f"{data.image_shape}. Received: --augment_padding={settings.augment_padding}."
        )

    # The privacy plan: what the budget allows.
    with checking_flags():
        plan = tfdpx.PrivacyPlan(
            num_examples=len(data.train_x),
            batch_size=settings.batch_size,
            steps=settings.steps,
            noise_multiplier=settings.noise_multiplier,
            epsilon=settings.epsilon,
            delta=settings.delta,
            sampling=settings.sampling,
            accountant=settings.accountant,
        )
    strategy.check_batch_size(devices, plan.batch_size)

    # The model, as an earlier run left it or new.
    saved = checkpoint.Checkpoint(
        workdir, plan.steps, dataclasses.asdict(settings), _RESUME.value, entropy()
    )
    keras.utils.set_random_seed(saved.seeds["initial_weights"])
    keras.config.set_dtype_policy(settings.precision)
    with devices.scope():
        model = classifiers.build(settings.model, data.image_shape, data.num_classes, data.centre)
        model.compile(
            optimizer=make_optimizer(settings, plan, saved.seeds["noise"]),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            weighted_metrics=["accuracy"],
            jit_compile={"auto": "auto", "true": True, "false": False}[settings.jit_compile],
        )
        saved.restore(model)
    start = tfdpx.callbacks.steps_taken(model.optimizer)
    if is_chief:
        print(f"{plan.summary()}; {start} steps are done.")

    # Training. A Keras epoch is `report_every` updates; evaluation reads the averaged weights.
    learning_curve = curve.Curve(workdir / "curve.jsonl", plan, start)
    writers = [
        tfdpx.callbacks.TensorBoard(
            str(workdir / "tensorboard"),
            plan=plan,
            log_private_metrics=_LOG_PRIVATE_METRICS.value,
        ),
        learning_curve,
        saved,
    ]
    averaging = [keras.callbacks.SwapEMAWeights()] if settings.ema_momentum else []
    epoch = min(settings.report_every, plan.steps)
    run = dict(
        initial_epoch=start // epoch,
        epochs=math.ceil(plan.steps / epoch),
        steps_per_epoch=epoch,
        validation_data=(data.eval_x, data.eval_y),
        validation_batch_size=EVAL_BATCH_SIZE,
        callbacks=[*averaging, tfdpx.PrivacyBudget(plan), *(writers if is_chief else [])],
        verbose=0 if not is_chief else 1 if sys.stdout.isatty() else 2,
    )
    began = time.perf_counter()
    if devices.num_replicas_in_sync > 1:
        tfdpx.distributed.fit(
            model, plan, data.train_x, data.train_y, seed=saved.seeds["sampling"], **run
        )
    else:
        batches = plan.batches(
            data.train_x, data.train_y, seed=saved.seeds["sampling"], start=start
        )
        model.fit(batches, shuffle=False, **run)  # `batches` draws at random already.
    seconds = time.perf_counter() - began

    # The result. `fit` has left the averaged weights in the model.
    if not is_chief:
        return None
    steps = tfdpx.callbacks.steps_taken(model.optimizer)
    model = strategy.on_one_device(model)
    logits = model.predict(data.eval_x, batch_size=EVAL_BATCH_SIZE, verbose=0)
    predictions = np.argmax(logits, axis=-1)
    accuracy = np.mean(predictions == data.eval_y)
    record = {
        "test_accuracy": accuracy if data.eval_split == "test" else None,
        "validation_accuracy": accuracy if data.eval_split == "validation" else None,
        "epsilon": plan.epsilon_at(steps),
        "delta": plan.delta,
        "noise_multiplier": plan.noise_multiplier,
        "steps": steps,
        "seconds": seconds,
        "batch_size": plan.batch_size,
        "sampling_probability": plan.sampling_probability,
        "accountant": plan.accountant,
        "sampling": plan.sampling,
        "epsilon_is_approximate": plan.is_approximate,
        "num_examples": plan.num_examples,
        "dataset": data.name,
        "model": settings.model,
        "parameters": model.count_params(),
        "replicas": devices.num_replicas_in_sync,
        "seed": settings.seed,
        "workdir": str(workdir),
    }
    write_results(record, model, plan, data, predictions, learning_curve.rows, workdir)
    saved.remove()
    return record


def make_optimizer(settings, plan, seed):
    """Returns the private optimizer that the settings name."""
    augment = None
    if settings.augmult:
        augment = tfdpx.augment.RandomCropFlip(settings.augment_padding, settings.augment_flip)
    common = dict(
        plan=plan,
        l2_norm_clip=settings.l2_norm_clip,
        microbatch_size=settings.microbatch_size,
        augment=augment,
        augmult=settings.augmult,
        seed=seed,
        use_ema=settings.ema_momentum > 0,
        ema_momentum=settings.ema_momentum,
    )
    with checking_flags():
        if settings.optimizer == "dpsgd":
            return tfdpx.DPSGD(settings.learning_rate, momentum=settings.momentum, **common)
        if settings.optimizer == "dpadam":
            return tfdpx.DPAdam(settings.learning_rate, **common)
        decay = 0.004 if settings.weight_decay is None else settings.weight_decay
        return tfdpx.DPAdamW(settings.learning_rate, weight_decay=decay, **common)


def write_results(record, model, plan, data, predictions, rows, workdir):
    """Writes the model, the pictures, the statement and the report; prints the table."""
    # `model` is a copy that was never compiled: a .keras file of a compiled model holds the
    # optimizer, whatever `include_optimizer` says, and with it the seed of the noise.
    model.save(workdir / "model.keras")

    names = ("learning_curve.png", "confusion_matrix.png")
    pictures.learning_curve(rows, workdir / names[0], data.eval_split)
    pictures.confusion_matrix(data.eval_y, predictions, data.class_names, workdir / names[1])
    pictures.write_to_tensorboard(
        [workdir / name for name in names], workdir / "tensorboard" / "pictures", record["steps"]
    )

    text = privacy_statement.statement(plan, record["steps"], record["seed"])
    (workdir / "privacy_statement.txt").write_text(text)
    print(text)
    report.print_table(record, title=f"{record['model']} on {record['dataset']}")
    (workdir / "report.json").write_text(report.to_json(record) + "\n")


def _make_workdir(path, is_chief):
    workdir = pathlib.Path(path)
    try:
        if is_chief:
            workdir.mkdir(parents=True, exist_ok=True)
            (workdir / ".writable").touch()
            (workdir / ".writable").unlink()
    except OSError as error:
        raise UserError(f"Cannot write to --workdir={path}: {error}.") from error
    if (workdir / "report.json").exists():
        raise UserError(
            f"The folder --workdir={path} holds a finished run. Choose another, or delete it."
        )
    return workdir


def run():
    """Entry point for a console script."""
    app.run(main)


if __name__ == "__main__":
    run()
