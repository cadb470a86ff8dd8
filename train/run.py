"""Runs `classify`: load, plan, model, fit, measure, record, report."""

import dataclasses
import functools
import math
import os
import time

import keras
import numpy as np
import tensorflow as tf

import tfdpx
from tfdpx import account
from tfdpx.accounting.ledger import Ledger
from tfdpx.report import measure, report
from tfdpx.train import defaults, devices, fitting, heads, individual, tables
from tfdpx.train.data import identity, images
from tfdpx.train.data import tables as data_tables
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.model_files import inputs_of
from tfdpx.train.output import print_record
from tfdpx.train.resume import RunFolder, facts
from tfdpx.train.run_flags import DATA_DIR, DOWNLOAD
from tfdpx.train.settings import HEADS, TABLES, check_threshold
from tfdpx.train.start_from import Start, without_secrets
from tfdpx.training.budget import ledger_at_rates, steps_taken

# Settings among the results of a run on images.
_SHOWN = (
    *("learning_rate", "l2_norm_clip", "ema_momentum", "features", "init_from", "trainable"),
    "head_steps",
)


def run(settings, preset, workdir, strategy):
    """Trains, measures, and writes all files of a run to `workdir`.

    Args:
        settings: `settings.Settings`.
        preset: String, the name of the preset of the settings.
        workdir: `pathlib.Path`.
        strategy: The `tf.distribute.Strategy`; only the chief writes.

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
        raise UserError(f"another worker is gone; start all with --resume: {error}") from error
    except RuntimeError as error:
        if "Another training uses" not in str(error):
            raise
        raise UserError(str(error)) from error


def _run_on_images(asked, preset, workdir, strategy):
    is_chief = devices.is_chief(strategy)

    # Load: the weights to start from and their earlier trainings; then the images, as bytes in
    # memory or on disk. The model normalises them.
    with strategy.scope():
        start = Start(asked)
    settings = start.settings
    before = start.ledger_on(settings.dataset, settings.allow_seen_data or not settings.private)
    with devices.chief_first(strategy, dataclasses.asdict(settings)) as entropy:
        data = images.load_for(settings, DATA_DIR.value, DOWNLOAD.value, start.image_shape)
        check_threshold(settings.threshold, data.class_names)
        groups = individual.read_groups(settings.individual_groups, data)
        # Before the training: it should not be lost if the data cannot be identified.
        trained_on = identity.of(settings.dataset)
    say = print if is_chief else lambda *lines: None
    for note in (*data.notes, *start.notes):
        say(note)

    # Plan: choices for open settings, and the updates that the budget allows.
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
            f"The weights to start from have seen these data at epsilon {epsilon:.4g}; this run "
            "is recorded together with it."
        )
    fitting.check(settings, plan, data.image_shape)
    devices.check_batch_size(strategy, plan.batch_size)

    # Model: new, from a file, or from an interrupted run.
    determined = facts(data, trained_on, start.files) | {
        name: getattr(plan, name) for name in ("batch_size", "steps", "noise_multiplier")
    }
    folder = RunFolder(workdir, preset, asked, settings, determined, entropy())
    keras.utils.set_random_seed(folder.seed)
    keras.config.set_dtype_policy(settings.precision)
    start.settings = settings
    with strategy.scope():
        warm_start = functools.partial(_warm_start, folder)
        whole = model = start.build(data, prepare=warm_start if settings.warm_start else None)
    examples = data
    if strategy.num_replicas_in_sync == 1:
        model, examples = fitting.head_and_features(settings, whole, data)
    with checking_flags():
        plan = _counting(plan, account.ledger_of(whole.weights))
    trainer = fitting.Trainer(settings, strategy, plan, examples, folder, write=is_chief)
    first_step = trainer.steps_saved
    if is_chief:
        folder.begin()
        say(f"{_description(settings, plan)}; {first_step} steps are done.")

    # Fit: a Keras epoch is `report_every` updates; the curve is of the averaged weights.
    curve = fitting.Curve(workdir / "curve.jsonl", plan, first_step, before)
    raw = fitting.RawWeights(plan.steps)
    history = individual.History(examples, folder.path / "individual_history.npz")
    tensorboard = tfdpx.callbacks.TensorBoard(
        str(workdir / "tensorboard"),
        plan=plan,
        before=before,
    )
    writers = [tensorboard, curve, raw]
    if settings.individual and strategy.num_replicas_in_sync == 1:
        writers.append(history)
    began = time.perf_counter()
    if settings.head_steps:
        trainer.fit_head(model, [curve] if is_chief else [])
    trainer.fit(model, writers if is_chief else [])
    seconds = time.perf_counter() - began
    if not is_chief:
        return None

    # Measure: the model has the averaged weights after `fit`.
    optimizer, trained = model.optimizer, model.trainable_variables
    steps = steps_taken(optimizer)
    model, whole = devices.on_one_device(model), devices.on_one_device(whole)
    how = (data.is_public(settings.public_test), settings.threshold)
    measured = measure.measure(model, examples, *how)
    raw_measured = measure.measure(devices.on_one_device(model, raw.values), examples, *how)

    # Report: the record of the privacy loss and the results, and all files that follow from it.
    ledger = before + ledger_at_rates(optimizer, plan)
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
            "raw_accuracy": float(np.mean(raw_measured.predictions == raw_measured.targets)),
            "raw_top5_accuracy": raw_measured.top5_accuracy,
            "steps": steps,
            "seconds": seconds,
            "left_out": data.left_out,
            **{name: recorded[name] for name in _SHOWN},
            "trained_parameters": sum(math.prod(v.shape) for v in trained),
            "replicas": strategy.num_replicas_in_sync,
            **released,
        },
    )
    print_record(record)
    if settings.individual:
        worst = ledger.composed_epsilon(plan.delta, plan.accountant)
        private = individual.write(epsilons, worst, history, model, examples, workdir, groups)
        print(f"An epsilon for every training image is in {private}: private data.")
    folder.remove()
    return {**record.view(), "workdir": str(workdir)}


def _run_on_table(settings, workdir):
    table = data_tables.load(settings)
    check_threshold(settings.threshold, table.class_names)
    for note in table.notes:
        print(note)
    data = identity.of(settings.dataset, table.train.num_protected)
    began = time.perf_counter()
    estimator = tables.fit(table, settings)
    seconds = time.perf_counter() - began
    plan = estimator.training_.plan
    of_plan = ("noise_multiplier", "batch_size", "sampling_probability", "steps")
    record = report.write(
        workdir,
        program="classify",
        data=data,
        ledger=estimator.ledger_,
        accountant=plan.accountant,
        model=estimator.model_,
        measured=tables.measure(estimator, table, settings.threshold),
        inputs=tables.inputs(table, settings),
        unit="row",
        settings=without_secrets(settings),
        results={
            **{name: getattr(plan, name) for name in of_plan},
            "preprocessing_noise_multiplier": min(
                (entry.noise_multiplier for entry in plan.spent.entries), default=None
            ),
            "releases": plan.spent.steps,
            "seconds": seconds,
            "learning_rate": estimator.training_.learning_rate,
            "l2_norm_clip": estimator.training_.l2_norm_clip,
        },
    )
    print_record(record)
    return {**record.view(), "workdir": str(workdir)}


def _warm_start(folder, model):
    """Trains a model on generated images, or loads the weights of an interrupted run."""
    if tf.distribute.has_strategy():
        raise UserError("Flag --warm_start trains on one device: leave out --strategy.")
    path = folder.path / "warm_start.weights.h5"
    if path.exists():
        model.load_weights(path)
        account.mark_known(model.weights)  # The run that wrote them had read no data.
        return
    with checking_flags():
        tfdpx.synthetic.warm_start(model)
    folder.begin()
    part = path.with_name("part.weights.h5")
    model.save_weights(part)
    os.replace(part, path)


def _counting(plan, ledger):
    """Returns the plan with the privacy loss of the weights to start from, on any data."""
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
