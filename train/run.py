"""Runs `classify`: loads data, plans, builds and trains a model, measures it, writes a report."""

import dataclasses
import functools
import math
import os
import time

import keras
import tensorflow as tf

import tfdpx
from tfdpx import account
from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Ledger
from tfdpx.report import measure, report
from tfdpx.sklearn import PrivateClassifier, PrivateRegressor
from tfdpx.tables import estimators
from tfdpx.tables.rules import TooFewRows
from tfdpx.train import defaults, devices, fitting, heads, individual
from tfdpx.train.data import identity, images, tfds
from tfdpx.train.data import tables as data_tables
from tfdpx.train.errors import UserError, checking_flags, did_you_mean
from tfdpx.train.output import print_record
from tfdpx.train.resume import RunFolder, facts
from tfdpx.train.settings import DATA_DIR, DOWNLOAD, HEADS, TABLES
from tfdpx.train.start_from import Start, check_threshold, inputs_of, ledger_on, without_secrets
from tfdpx.training.budget import ledger_at_rates, steps_taken

_RATES = ("learning_rate", "l2_norm_clip")
# Settings that are shown with the results of a run on images.
_SHOWN = (*_RATES, "ema_momentum", "features", "init_from", "trainable", "head_steps")
# Settings that are passed to the estimators of `tfdpx.sklearn`.
_OF_ESTIMATOR = ("delta", "accountant", "model", "batch_size", "steps", *_RATES, "seed")
_PREPARATION = (
    "A dict from columns to arrays [rows, 1]: numbers and booleans as float32, NaN where missing; "
    'categories as strings, "(missing)" where missing. The model does all else.'
)


def run(settings, preset, workdir, strategy):
    """Trains, measures, and writes all files of a run to `workdir`.

    Args:
        settings: `settings.Settings`.
        preset: String, the name of the preset that the settings are from.
        workdir: `pathlib.Path`.
        strategy: The `tf.distribute.Strategy`. Only the chief writes files.

    Returns:
        The report, a dict; None on a host that is not the chief.

    Raises:
        UserError: If settings, files and data contradict each other.
    """
    if settings.kind == TABLES:
        return _run_on_table(settings, workdir)
    if settings.kind == HEADS:
        return heads.run(settings, workdir)
    try:
        return _run_on_images(settings, preset, workdir, strategy)
    except tf.errors.UnavailableError as error:
        raise UserError(f"another worker stopped; start all with --resume: {error}") from error


def _run_on_images(asked, preset, workdir, strategy):
    is_chief = devices.is_chief(strategy)

    # Load: first the initial weights and their earlier trainings, then the images, as bytes in
    # memory or on disk. The model scales the bytes.
    with strategy.scope():
        start = Start(asked)
    settings = start.settings
    before = ledger_on(start.seen, settings.dataset, allow_unaccounted=not settings.private)
    with devices.chief_first(strategy, dataclasses.asdict(settings)) as entropy:
        data = images.load_for(settings, DATA_DIR.value, DOWNLOAD.value, start.image_shape)
        check_threshold(settings.threshold, data.class_names)
        # Identify the data now: if this fails after the training, the training is lost.
        trained_on = identity.of(settings.dataset)
    say = print if is_chief else lambda *lines: None
    for note in (*data.notes, *start.notes):
        say(note)

    # Plan: choose open settings, and compute the updates that the budget allows.
    shape, classes = tuple(data.image_shape), data.num_classes
    settings, chosen = defaults.complete(
        settings,
        data.num_protected,
        strategy.num_replicas_in_sync,
        lambda name: start.sketch(name, shape, classes),
    )
    if chosen:
        say(chosen)
    plan = settings.privacy_plan(data.num_protected)
    if before.steps:
        epsilon = before.composed_epsilon(plan.delta, plan.accountant)
        say(
            f"The weights to start from were trained on these data at epsilon {epsilon:.4g}; the "
            "record of this run counts both trainings."
        )
    fitting.check(settings, plan, data.image_shape)
    devices.check_batch_size(strategy, plan.batch_size)

    # Model: new, from a file, or from an interrupted run.
    determined = facts(data, trained_on, start.files) | {
        name: getattr(plan, name) for name in ("batch_size", "steps", "noise_multiplier")
    }
    folder = RunFolder(workdir, preset, asked, determined, entropy())
    keras.utils.set_random_seed(folder.seed)
    keras.config.set_dtype_policy(settings.precision)
    start.settings = settings
    with strategy.scope():
        warm_start = functools.partial(_warm_start, folder)
        whole = model = start.build(data, prepare=warm_start if settings.warm_start else None)
    trained = sum(math.prod(v.shape) for v in whole.trainable_variables)
    say(
        f"Train {trained:,} of {whole.count_params():,} weights (--trainable={settings.trainable})."
    )
    examples = data
    if strategy.num_replicas_in_sync == 1:
        model, examples = fitting.head_and_features(settings, whole, data)
    with checking_flags():
        plan = _counting(plan, account.ledger_of(whole.weights))
    first_step = fitting.updates_saved(folder.path)
    if is_chief:
        folder.begin()
        say(_description(settings, plan))

    # Fit: a Keras epoch has `report_every` updates. The curve shows the averaged weights.
    curve = fitting.Curve(workdir / "curve.jsonl", plan, first_step, before)
    board = tfdpx.callbacks.TensorBoard(str(workdir / "tensorboard"), plan=plan, before=before)
    writers = [curve, board] if is_chief else []
    began = time.perf_counter()
    fitting.train(model, settings, strategy, plan, examples, folder.path, writers, is_chief)
    seconds = time.perf_counter() - began
    if not is_chief:
        return None

    # Measure: after `fit`, the model has the averaged weights.
    optimizer = model.optimizer
    model, whole = devices.on_one_device(model), devices.on_one_device(whole)
    is_public = data.is_public(settings.public_test)
    measured = measure.measure(model, examples, is_public, settings.threshold)

    # Report: write the record of the privacy loss and the results, and the files made from it.
    ledger = before + ledger_at_rates(optimizer, plan)
    if (workdir / records.FILE).exists():  # This run ended before, while it wrote its page.
        ledger += records.read(workdir / records.FILE).ledger
    epsilons, released, of_statistics = None, {}, Ledger()
    if settings.individual:
        epsilons, released, of_statistics = individual.release(
            optimizer.individual, settings.individual_release
        )
    recorded = without_secrets(settings)
    record = report.write(
        workdir,
        program="classify",
        data=dataclasses.replace(trained_on, num_examples=plan.num_examples),
        ledger=ledger + of_statistics,
        model=whole,
        optimizer=optimizer,
        measured=measured,
        curve=curve.rows,
        examples=data.eval_examples,
        seen=start.seen,
        initialized=not start.files,
        inputs=inputs_of(data),
        settings=recorded,
        results={
            "steps": steps_taken(optimizer),
            "seconds": seconds,
            "left_out": data.left_out,
            **{name: recorded[name] for name in _SHOWN},
            "trained_parameters": trained,
            "replicas": strategy.num_replicas_in_sync,
            **released,
        },
    )
    print_record(record)
    if settings.individual:
        worst, norms = ledger.composed_epsilon(plan.delta, plan.accountant), optimizer.individual
        private = individual.write(epsilons, worst, norms.norms(), model, examples, workdir)
        print(f"An epsilon for every training image is in {private}: private data.")
    folder.remove()
    return {**record.view(), "workdir": str(workdir)}


def describe(settings):
    """Returns a dict of settings, sizes and epsilon of a run on images, without reading data.

    Args:
        settings: A `settings.Settings`.

    Raises:
        UserError: If the size of the data set is unknown, or the values contradict each other.
    """
    entry = tfds.find(settings.dataset)
    if entry is None or entry.train_images is None:
        names = [entry.source for entry in tfds.ENTRIES if entry.train_images]
        raise UserError(
            f"The size of the data set {settings.dataset!r} is not known without reading it."
            f"{did_you_mean(settings.dataset or '', tfds.KNOWN)} "
            f"--dry_run knows: {', '.join(names)}."
        )
    share = settings.validation
    held_out = math.ceil(share * entry.train_images) if share < 1 else int(share)
    num_examples = entry.train_images - held_out
    if num_examples <= 0:
        raise UserError(
            f"Flag --validation must leave some of the {entry.train_images} images to train on. "
            f"Received: --validation={share:g}."
        )
    start = Start(settings)
    side = settings.center_crop or settings.image_size
    sizes = zip(start.image_shape, (side, side, None), entry.image_shape, strict=True)
    shape = tuple(of_model or of_flag or of_data for of_model, of_flag, of_data in sizes)
    if None in shape:
        raise UserError(
            f"The images of {settings.dataset!r} are of many sizes: give --image_size. Received: "
            f"--image_size={settings.image_size}."
        )
    sketch = functools.partial(start.sketch, shape=shape, num_classes=entry.num_classes)
    settings, _ = defaults.complete(start.settings, num_examples, sketch=sketch)
    plan = settings.privacy_plan(num_examples)
    fitting.check(settings, plan, shape)
    of_settings = ("model", "pretrained_on", "trainable", "head_steps", "private", "augmult")
    of_plan = "batch_size noise_multiplier steps epochs delta accountant epsilon".split()
    return {
        "dataset": entry.source,
        "num_examples": num_examples,
        "image_height": shape[0],
        "image_width": shape[1],
        "parameters": sketch(settings.model).count_params(),
        **{name: getattr(settings, name) for name in (*of_settings, *_RATES)},
        "images_per_update": plan.batch_size * max(settings.augmult, 1),
        **{name: getattr(plan, name) for name in of_plan},
        "epsilon_is_approximate": plan.is_approximate,
    }


def _run_on_table(settings, workdir):
    table = data_tables.load(settings)
    check_threshold(settings.threshold, table.class_names)
    for note in table.notes:
        print(note)
    data = identity.of(settings.dataset, table.train.num_protected)
    began = time.perf_counter()
    estimator = fit_table(table, settings)
    seconds = time.perf_counter() - began
    plan, names = estimator.training_.plan, table.class_names
    outputs = estimators.predict(estimator.model_, table.test.columns)
    outputs = outputs if names else outputs[:, 0]
    of_plan = ("noise_multiplier", "batch_size", "sampling_probability", "steps")
    record = report.write(
        workdir,
        program="classify",
        data=data,
        ledger=estimator.ledger_,
        accountant=plan.accountant,
        model=estimator.model_,
        measured=measure.Measured(table.test.target, outputs, names, settings.threshold),
        inputs=dict(
            columns=table.kinds,
            target=settings.target,
            class_names=list(names),
            preparation=_PREPARATION,
        ),  # fmt: skip
        unit="row",
        settings=without_secrets(settings),
        results={
            **{name: getattr(plan, name) for name in of_plan},
            "preprocessing_noise_multiplier": min(
                (entry.noise_multiplier for entry in plan.spent.entries), default=None
            ),
            "releases": plan.spent.steps,
            "seconds": seconds,
            **{name: getattr(estimator.training_, name) for name in _RATES},
        },
    )
    print_record(record)
    return {**record.view(), "workdir": str(workdir)}


def fit_table(table, settings):
    """Returns a private estimator of `tfdpx.sklearn`, fitted to the training rows of a table.

    Args:
        table: `data.tables.Table`.
        settings: The settings of the run.

    Raises:
        UserError: If there are too few rows to find ranges, or settings contradict each other.
    """
    arguments = {name: getattr(settings, name) for name in _OF_ESTIMATOR} | settings.goal
    ranges = {
        name: settings.ranges.get(name, settings.ranges.get("*"))
        for name in table.of_kind(data_tables.NUMBER)
    } | dict.fromkeys(table.of_kind(data_tables.BOOLEAN), (0.0, 1.0))
    for end, name in enumerate(("lower", "upper")):
        arguments[name] = {column: pair[end] for column, pair in ranges.items() if pair}
    if table.class_names:
        estimator = PrivateClassifier(classes=range(len(table.class_names)), **arguments)
    else:
        limits = {name: getattr(settings, name) for name in ("target_lower", "target_upper")}
        estimator = PrivateRegressor(**limits, **arguments)
    rows, people = table.train, {}
    if settings.has_people:
        people = {"user_ids": rows.people, "examples_per_user": settings.examples_per_user}
    with checking_flags():
        try:
            return estimator.fit(rows.columns, rows.target, **people)
        except TooFewRows as error:
            first = next(column for column, pair in ranges.items() if not pair)
            bounds = f"--bounds={first}:LOWER:UPPER,... or --bounds=*:LOWER:UPPER"
            raise UserError(f"{error} As a flag: {bounds}.") from error


def _warm_start(folder, model):
    """Trains a model on generated images, or loads the weights that an interrupted run saved."""
    if tf.distribute.has_strategy():
        raise UserError("Flag --warm_start trains on one device: leave out --strategy.")
    path = folder.path / "warm_start.weights.h5"
    if path.exists():
        model.load_weights(path)
        account.mark_known(model.weights)  # These weights do not depend on private data.
        return
    with checking_flags():
        tfdpx.synthetic.warm_start(model)
    folder.begin()
    part = path.with_name("part.weights.h5")
    model.save_weights(part)
    os.replace(part, path)


def _counting(plan, ledger):
    """Returns a plan that also counts `ledger`, the privacy loss of the initial weights."""
    if not ledger.entries or not plan.noise_multiplier:
        return plan
    names = ("sampling", "accountant", "unit", "delta", "noise_multiplier")
    return tfdpx.PrivacyPlan(
        *(plan.num_examples, plan.batch_size, plan.steps),
        **{name: getattr(plan, name) for name in names},
        spent=ledger.assuming(1.0),
    )


def _description(settings, plan):
    if settings.private:
        return plan.summary()
    return (
        f"NOT PRIVATE (--private=false): {plan.steps} steps of {plan.batch_size} out of "
        f"{plan.num_examples} examples without clipping and noise; epsilon is infinite"
    )
