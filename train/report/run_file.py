"""What a run was, for people and for whoever repeats it: everything but its seeds."""

import dataclasses
import datetime
import importlib.metadata
import json
import platform

import tfdpx

_VERSIONS = ("tensorflow", "keras", "numpy", "dp-accounting", "pillow")


def describe(report, settings, data, ledger, seen):
    """Everything about a finished run but what must stay secret.

    Args:
        report: Dict, the report of the run.
        settings: The `training.Training`, which leaves nothing open.
        data: `loading.ImageData`.
        ledger: `tfdpx.accounting.Ledger` of the weights.
        seen: What the weights had seen before, of `tfdpx.train.run.origin.seen_by`.

    Returns:
        Dict of JSON values.
    """
    chosen = dataclasses.asdict(settings)
    del chosen["seed"]  # Who knows it can take the noise away.
    return {
        "tfdpx": tfdpx.__version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in _VERSIONS},
        "data": {
            "name": data.name,
            "num_examples": data.num_train,
            "measured_on": data.eval_split,
            "num_measured": data.num_eval,
            "left_out": data.left_out,
            "image_shape": list(data.image_shape),
            "class_names": list(data.class_names),
            "centre": data.centre,
            "deviation": data.deviation,
        },
        "settings": chosen,
        "seen_before": seen,
        "ledger": json.loads(ledger.to_json()),
        "report": report,
    }
