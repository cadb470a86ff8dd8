"""One private update of a preset's model at its full image size, in a separate process.

    python preset_update.py table12/eps8

Two random images with all the preset's views, one image a pass. Prints a JSON object.
"""

import dataclasses
import json
import math
import pathlib
import sys
import types

import numpy as np

import tfdpx
from tfdpx.train import fitting, settings
from tfdpx.train.data import tfds
from tfdpx.train.objects import view_scale
from tfdpx.train.start_from import Start

IMAGES = 2


def update(preset):
    """Makes the update and returns its figures, a dict."""
    values = settings.resolve(preset, {})
    entry = tfds.Name.parse(values.dataset).entry
    shape, num_classes = entry.image_shape, entry.num_classes
    if side := values.center_crop or values.image_size:
        shape = (side, side, shape[2])
    # The weights are new: there is no file of a trained model; all else follows the preset.
    values = dataclasses.replace(values, microbatch_size=1, seed=0)
    model = Start(values).build(
        types.SimpleNamespace(
            image_shape=shape,
            num_classes=num_classes,
            centre=entry.centre,
            deviation=entry.deviation,
        ),
    )
    noise = values.noise_multiplier if values.noise_multiplier is not None else 1.0
    plan = tfdpx.PrivacyPlan(
        1_000, batch_size=IMAGES, steps=1, noise_multiplier=noise, delta=values.delta
    )
    model.compile(
        fitting.private_optimizer(values, plan, shape),
        fitting.crossentropy(values.label_smoothing),
    )
    rng = np.random.default_rng(0)
    size = [round(view_scale(values.augment) * length) for length in shape[:2]]
    x = rng.integers(0, 256, (IMAGES, *size, shape[2])).astype("uint8")
    y = rng.integers(0, num_classes, IMAGES)
    before = [v.numpy() for v in model.trainable_variables]
    model.train_on_batch(x, y, sample_weight=np.ones(IMAGES, "float32"))
    after = [v.numpy() for v in model.trainable_variables]
    status = pathlib.Path("/proc/self/status").read_text().splitlines()
    [peak] = [line for line in status if line.startswith("VmHWM:")]
    return {
        "peak_mib": int(peak.split()[1]) / 1024,
        "finite": all(np.isfinite(w).all() for w in after),
        "changed": all((a != b).any() for a, b in zip(after, before, strict=True)),
        "trainable": values.trainable,
        "trained_parameters": sum(math.prod(v.shape) for v in model.trainable_variables),
        "parameters": model.count_params(),
    }


if __name__ == "__main__":
    print(json.dumps(update(sys.argv[1])))
