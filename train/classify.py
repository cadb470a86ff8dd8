r"""Trains a classifier with differential privacy and reports accuracy and epsilon.

    python -m tfdpx.train.classify --preset=digits --epsilon=3 --workdir=/tmp/digits
    python -m tfdpx.train.classify --dataset=folder:PATH --epsilon=8
    python -m tfdpx.train.classify --dataset=csv:PATH --target=COLUMN --epsilon=3

The second takes your own images, PATH/CLASS/NAME.jpg (docs/own_images.md), the third your own table
(docs/tables.md, with flags of its own); all else here is about images. The preset gives every
setting; flags win over it. Of --epsilon, --noise_multiplier, --steps and --batch_size the missing
one is solved for. With --dry_run no data are read and nothing is trained: the last line says how
large the run is and what epsilon it spends. The working directory receives:

    model.keras             the trained model, without the optimizer; `tfdpx.train.predict` takes
                            it, and `import tfdpx.layers` and keras.saving.load_model read it
    record.json             what was spent on which data, settings, versions and results, without
                            seeds and paths; accuracy is of the averaged weights, raw_accuracy
                            of the last ones. The last line of the standard output is a view
    curve.jsonl             accuracy and epsilon spent after every report
    report.html             all of the run on a page that loads nothing, to open or to send
    learning_curve.png, confusion_matrix.png
    wrong_predictions.png   test images taken for another class, where they are public: of known
                            data sets, or with --public_test
    individual_PRIVATE/     with --individual: an epsilon for every training image, and pictures of
                            them; private data
    privacy_statement.txt   the guarantee in words, to cite
    tensorboard/            event files

With --init_from the run starts from a trained model, of tfdpx or any other Keras image model
(docs/fine_tuning.md). With --trainable=last it trains the last layer alone; with --head_steps=H in
its first H updates, and then all layers, on one account. --head=NAME fits the last layer by a head
of tfdpx.heads instead, to features that stay in --workdir. --features=scatter+RUN trains a linear
classifier on fixed features of several kinds, side by side. --private=false is the same run without
clipping, noise and any guarantee.

On several devices or hosts: --strategy; the chief alone writes. Ctrl-C ends a run after the update
under way, saved. An interrupted run resumes with --workdir=PATH --resume and no other flag, on
several hosts once it is started again on all. Losses and accuracies on the training
images, which Keras's progress bar shows, are not covered by the privacy guarantee: do not publish
the log.
"""

import dataclasses
import math
import pathlib
import time

import keras
import tensorflow as tf
from absl import app, flags

import tfdpx
from tfdpx import account
from tfdpx.accounting.record import Record
from tfdpx.train.config import preset_lookup, run_flags, setting_flags
from tfdpx.train.config.training import AUTO, LINEAR_ON_FEATURES, Training
from tfdpx.train.data import identity, images
from tfdpx.train.errors import UserError, checking_flags, in_one_line
from tfdpx.train.report import curve
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import (
    auto_settings,
    checkpoint,
    classifiers,
    devices,
    dry_run,
    evaluation,
    finetuning,
    fitting,
    heads_by_flag,
    image_input,
    individual,
    interruption,
    provenance,
    results,
    side_by_side,
)
from tfdpx.train.tables import settings as table_settings
from tfdpx.training.budget import steps_taken

_PRESET = flags.DEFINE_string(
    "preset",
    None,
    f"Settings to start from, one of: {preset_lookup.summary()}. Default: folder for "
    "--dataset=folder:PATH, else digits.",
)
for _module in (setting_flags, run_flags, dry_run, devices, heads_by_flag):
    flags.adopt_module_key_flags(_module)  # So that --help lists them.
_LOG_PRIVATE_METRICS = flags.DEFINE_bool(
    "log_private_metrics",
    False,
    "Also write training loss and the like, which no guarantee covers, to TensorBoard.",
)


def main(argv):
    """Runs the training that the flags describe; errors of the user become one line."""
    with in_one_line("tfdpx.train.classify", argv):
        given = setting_flags.given()
        if table_settings.of_table(given["dataset"]):
            from tfdpx.train.tables import run as tables  # On the call: images need no pyarrow.

            print(to_json(tables.main(table_settings.from_flags())), flush=True)
            return
        table_settings.refuse_for_images()
        if record := heads_by_flag.from_flags({**given, "preset": _PRESET.value}):
            print_table(record, title="classify")
            print(to_json(record), flush=True)
            return
        preset = _PRESET.value or preset_lookup.default_for(given["dataset"])
        settings = checkpoint.resumed(Training, ("preset", _PRESET.value), given)
        settings = settings or preset_lookup.resolve(preset, given)
        if record := dry_run.from_flags(settings):
            print_table(record, title=f"{preset}: nothing was trained")
            print(to_json(record), flush=True)
            return
        strategy = devices.from_flags()
        path = run_flags.WORKDIR.value or time.strftime(f"runs/{preset}-%Y%m%d-%H%M%S")
        ending = interruption.ending_in_a_line("classify", path)
        with ending, run_flags.leaving_no_empty_folder(pathlib.Path(path)):
            workdir = run_flags.make_workdir(path, devices.is_chief(strategy))
            try:
                record = train(settings, workdir, strategy)
            except tf.errors.UnavailableError as error:
                raise UserError(
                    f"another worker is gone; start all with --resume: {error}"
                ) from error
    if devices.is_chief(strategy):
        print(to_json(record), flush=True)


def train(settings, workdir, strategy):
    """Trains and measures, on every host of `strategy`; the chief writes to `workdir`.

    Returns:
        The report, a dict; None on a host that is not the chief.
    """
    is_chief = devices.is_chief(strategy)

    preset = _PRESET.value or preset_lookup.default_for(settings.dataset)
    asked_for = checkpoint.asked(preset, settings)
    # The data: bytes, in memory or read as they are drawn. They are normalised in the model.
    settings = finetuning.check(settings)
    with strategy.scope():
        settings, source = finetuning.source(settings)
    if source is None and settings.model not in (AUTO, LINEAR_ON_FEATURES):
        classifiers.check_name(settings.model)
    side_by_side.files(settings.features)
    seen = provenance.seen_by(provenance.files(settings), settings.init_data)
    unaccounted = settings.allow_seen_data or not settings.private
    before = provenance.on_same_data(seen, settings.dataset, unaccounted)
    with devices.chief_first(strategy, dataclasses.asdict(settings)) as entropy:
        data = images.load_for(
            settings,
            run_flags.DATA_DIR.value,
            run_flags.DOWNLOAD.value,
            source and source.image_shape,
            settings.user,
        )
    if is_chief:
        notes = [*data.notes, *([source.about] if source else [])]
        print(*notes, sep="\n", end="\n" * bool(notes))

    # What the preset and the flags leave open.
    asked = {k: v for k, v in dataclasses.asdict(settings).items() if v is not None}
    settings, chosen = auto_settings.complete(
        settings, data.num_protected, strategy.num_replicas_in_sync
    )
    if chosen and is_chief:
        print(chosen)
    if settings.augment_padding >= min(data.image_shape[:2]):
        raise UserError(
            f"Flag --augment_padding must be smaller than the images of {data.name!r}, of shape "
            f"{data.image_shape}. Received: --augment_padding={settings.augment_padding}."
        )

    # The privacy plan: what the budget allows.
    plan = settings.privacy_plan(data.num_protected)
    if before.steps and is_chief:
        print(provenance.about(before, plan))
    fitting.check_head_steps(settings, plan)
    devices.check_batch_size(strategy, plan.batch_size)

    # The model, as an earlier run left it or new.
    determined_by = {
        **asked,  # First, so that a resume with another flag names it and not what follows from it.
        **checkpoint.facts(data, provenance.files(settings)),
        **dataclasses.asdict(settings),
        "noise_multiplier of the plan": plan.noise_multiplier,
    }
    resume = run_flags.RESUME.value
    folder = checkpoint.RunFolder(workdir, determined_by, resume, entropy(), asked_for)
    keras.utils.set_random_seed(folder.seeds["initial_weights"])
    keras.config.set_dtype_policy(settings.precision)
    with strategy.scope():
        if settings.features:
            whole = model = side_by_side.build(settings, data)
        else:
            whole = model = finetuning.build(settings, data, source)
        inputs = data
        if strategy.num_replicas_in_sync == 1:
            model, inputs = fitting.head_and_features(settings, whole, data)
    with checking_flags():
        plan = _counting(plan, account.ledger_of(whole.variables))
    trainer = fitting.Trainer(settings, strategy, plan, inputs, folder, write=is_chief)
    start = trainer.steps_saved
    if is_chief:
        # Before it trains: data that cannot be named are no reason to lose what it learned.
        trained_on = identity.of(settings.dataset, plan.num_examples)
        folder.begin()
        print(f"{_describe(settings, plan)}; {start} steps are done.")

    # Training. A Keras epoch is `report_every` updates; evaluation reads the averaged weights.
    learning_curve = curve.Curve(workdir / "curve.jsonl", plan, start, before)
    raw = evaluation.RawWeights(plan.steps)
    writers = [
        tfdpx.callbacks.TensorBoard(
            str(workdir / "tensorboard"),
            plan=plan,
            log_private_metrics=_LOG_PRIVATE_METRICS.value,
            before=before,
        ),
        learning_curve,
        raw,
    ]
    history = individual.History(inputs, folder.path / "individual_history.npz")
    if settings.individual and strategy.num_replicas_in_sync == 1:
        writers.append(history)
    began = time.perf_counter()
    if settings.head_steps:
        trainer.fit_head(model, [learning_curve] if is_chief else [])
    trainer.fit(model, writers if is_chief else [])
    seconds = time.perf_counter() - began

    # The result. `fit` has left the averaged weights in the model.
    if not is_chief:
        return None
    optimizer, trained = model.optimizer, model.trainable_variables
    steps = steps_taken(optimizer)
    model, whole = devices.on_one_device(model), devices.on_one_device(whole)
    measured = evaluation.measure(model, inputs)
    raw_measured = evaluation.measure(devices.on_one_device(model, raw.values), inputs)
    results_found = {
        "test_accuracy": measured.accuracy if data.eval_split == "test" else None,
        "validation_accuracy": measured.accuracy if data.eval_split == "validation" else None,
        "top5_accuracy": measured.top5_accuracy,
        "raw_accuracy": raw_measured.accuracy,
        "raw_top5_accuracy": raw_measured.top5_accuracy,
        "noise_multiplier": plan.noise_multiplier,
        "steps": steps,
        "seconds": seconds,
        "batch_size": plan.batch_size,
        "sampling_probability": plan.sampling_probability,
        "measured_on": data.eval_split,
        "num_measured": data.num_eval,
        "left_out": data.left_out,
        "model": whole.name,
        "learning_rate": settings.learning_rate,
        "l2_norm_clip": settings.l2_norm_clip,
        "ema_momentum": settings.ema_momentum,
        "features": provenance.without_paths(settings.features),
        "init_from": provenance.without_paths(settings.init_from),
        "trainable": settings.trainable,
        "head_steps": settings.head_steps,
        "parameters": whole.count_params(),
        "trained_parameters": sum(math.prod(v.shape) for v in trained),
        "replicas": strategy.num_replicas_in_sync,
    }
    ledger = before + optimizer.ledger.assuming(plan.sampling_probability)
    worst = ledger.composed_epsilon(plan.delta, plan.accountant)
    if settings.individual:
        found, released = individual.release(optimizer.individual, settings.individual_release)
        results_found.update(found)
        ledger += released
    record = Record(
        program="classify",
        data=trained_on,
        ledger=ledger,
        delta=plan.delta if settings.private else None,
        accountant=plan.accountant,
        sampling=plan.sampling,
        seen=seen,
        independence="; ".join(map(str, optimizer.independence)) or None,
        inputs=image_input.of(data),
        settings=provenance.without_secrets(settings),
        results=results_found,
    )
    results.write(record, whole, data, measured, learning_curve.rows, workdir, settings.public_test)
    if settings.individual:
        epsilons = optimizer.individual.epsilon()
        private = individual.write(epsilons, worst, history, model, inputs, workdir)
        print(f"An epsilon for every training image is in {private}: private data.")
    folder.remove()
    return {**record.view(), "workdir": str(workdir)}


def _counting(plan, ledger):
    """The plan with what the weights to start from have spent, on whatever data."""
    if not ledger.entries or not plan.noise_multiplier:
        return plan
    names = ("sampling", "accountant", "unit", "delta", "noise_multiplier")
    return tfdpx.PrivacyPlan(
        *(plan.num_examples, plan.batch_size, plan.steps),
        **{name: getattr(plan, name) for name in names},
        spent=ledger.assuming(plan.sampling_probability),
    )


def _describe(settings, plan):
    if settings.private:
        return plan.summary()
    return (
        f"NOT PRIVATE (--private=false): {plan.steps} steps of {plan.batch_size} out of "
        f"{plan.num_examples} examples without clipping and noise; epsilon is infinite"
    )


if __name__ == "__main__":
    app.run(main)
