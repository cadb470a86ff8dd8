"""A run on a table: load, model, plan, fit, measure, record, report."""

import pathlib
import time

from tfdpx.accounting.record import Record
from tfdpx.train import tables
from tfdpx.train.config import run_flags
from tfdpx.train.data import identity
from tfdpx.train.data import tables as data_tables
from tfdpx.train.report import page, pictures
from tfdpx.train.run import provenance, results


def main(settings):
    """Runs `train` in the folder of --workdir, and returns its report."""
    path = run_flags.WORKDIR.value or time.strftime("runs/table-%Y%m%d-%H%M%S")
    with run_flags.leaving_no_empty_folder(pathlib.Path(path)):
        return train(settings, run_flags.make_workdir(path))


def train(settings, workdir):
    """Trains, measures, and writes the files of a run.

    Args:
        settings: `table_settings.TableSettings`.
        workdir: `pathlib.Path`.

    Returns:
        The report, a dict.
    """
    table = data_tables.load(settings)
    print(
        f"{len(table.train)} rows to train on, {len(table.test)} to test on; "
        + ", ".join(f"{name} ({kind})" for name, kind in table.kinds.items())
    )
    print(
        "Public, so not protected: how many rows there are to train on, names and types of columns"
        + (f", the labels {', '.join(table.class_names)}." if table.class_names else ".")
    )
    began = time.perf_counter()
    data = identity.of(settings.dataset, len(table.train))
    trained = tables.fit(table, settings)
    seconds = time.perf_counter() - began
    plan, optimizer = trained.plan, trained.optimizer
    record = Record(
        program="classify",
        data=data,
        ledger=optimizer.ledger,
        delta=plan.delta,
        accountant=plan.accountant,
        sampling=plan.sampling,
        independence="; ".join(map(str, optimizer.independence)) or None,
        inputs=tables.inputs(table, settings),
        unit="row",
        settings=provenance.without_secrets(settings),
        results={
            **tables.measure(trained.model, table.test, settings),
            "noise_multiplier": plan.noise_multiplier,
            "steps": plan.steps,
            "preprocessing_noise_multiplier": max(
                (entry.noise_multiplier for entry in plan.spent.entries), default=None
            ),
            "releases": plan.spent.steps,
            "seconds": seconds,
            "batch_size": plan.batch_size,
            "sampling_probability": plan.sampling_probability,
            "measured_on": "test",
            "num_measured": len(table.test),
            "model": trained.model.name,
            "learning_rate": trained.learning_rate,
            "l2_norm_clip": "automatic",
            "parameters": trained.model.count_params(),
        },
    )
    results.save_model(trained.model, record, workdir)
    results.write_record(record, workdir)
    if table.class_names and len(table.test):
        predicted = tables.predict(trained.model, table.test.columns).argmax(axis=1)
        path = workdir / page.CONFUSION
        pictures.confusion_matrix(table.test.target, predicted, table.class_names, path)
    page.write_page(workdir)
    return {**record.view(), "workdir": str(workdir)}
