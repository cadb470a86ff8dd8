"""What a finished run writes: the model, the pictures, the statement and the report."""

from tfdpx.train.report import pictures, privacy_statement
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import origin


def write(record, model, seen, plan, data, measured, rows, workdir):
    """Writes everything to the working directory, the report last, and prints the table.

    Args:
        record: Dict, the report.
        model: A `keras.Model` that was never compiled: a .keras file of a compiled model holds the
            optimizer, whatever `include_optimizer` says, and with it the seed of the noise.
        seen: What the model had seen before the run, of `origin.seen_by`.
        plan: The `tfdpx.PrivacyPlan`.
        data: `loading.ImageData`.
        measured: `evaluation.Measured`.
        rows: Those of `curve.Curve`.
        workdir: `pathlib.Path`.
    """
    model.save(workdir / "model.keras")
    origin.write(workdir / "model.keras", seen, record)

    names = ("learning_curve.png", "confusion_matrix.png")
    pictures.learning_curve(rows, workdir / names[0], data.eval_split)
    pictures.confusion_matrix(
        measured.labels, measured.predictions, data.class_names, workdir / names[1]
    )
    pictures.write_to_tensorboard(
        [workdir / name for name in names], workdir / "tensorboard" / "pictures", record["steps"]
    )

    text = privacy_statement.statement(plan, record["steps"], record["seed"])
    if "total_epsilon" in record:
        text += (
            "\nStatistics of the individual epsilons were released too, in report.json. Together "
            f"with them the run is ({record['total_epsilon']:.4g}, {record['delta']:.3g})-DP.\n"
        )
    if record["separation"] and record["private"]:
        text += f"\nThat examples keep apart in the model and the loss is {record['separation']}.\n"
    (workdir / "privacy_statement.txt").write_text(text)
    print(text)
    print_table(record, title=f"{record['model']} on {record['dataset']}")
    (workdir / "report.json").write_text(to_json(record) + "\n")
