"""Shows that an installed tfdpx works: its imports, three private steps, and a dry run.

python tools/smoke_test.py
"""

import importlib
import os
import platform
import subprocess
import sys
import tempfile

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

STEPS = 3
DRY_RUN = ["classify", "--preset=table12/eps8", "--dry_run"]


def private_fit():
    """Returns the epsilon of three steps of DP-SGD on random data."""
    import keras
    import numpy as np

    import tfdpx

    generator = np.random.default_rng(0)
    x = generator.normal(size=[64, 8]).astype("float32")
    y = generator.integers(2, size=64)
    plan = tfdpx.PrivacyPlan(64, batch_size=16, steps=STEPS, noise_multiplier=1.0, delta=1e-3)
    model = keras.Sequential([keras.Input([8]), keras.layers.Dense(2)])
    model.compile(
        optimizer=tfdpx.DPSGD(0.5, plan=plan, l2_norm_clip=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    before = np.concatenate([weight.ravel() for weight in model.get_weights()])
    model.fit(x, y, epochs=plan.steps, verbose=0)
    after = np.concatenate([weight.ravel() for weight in model.get_weights()])
    if int(model.optimizer.iterations) != STEPS:
        raise RuntimeError(f"{STEPS} steps were planned, {model.optimizer.iterations} were taken.")
    if not (np.all(np.isfinite(after)) and np.all(before != after)):
        raise RuntimeError(f"Some of the weights are not noisy: {before} became {after}.")
    return plan.epsilon


def main():
    """Prints the results; any failure is an exception."""
    import keras
    import tensorflow as tf

    names = ["tfdpx.layers", "tfdpx.models", "tfdpx.train", "tensorflow_datasets"]
    if keras.__version__ < "3.16":  # keras_cv 0.9 needs a name that Keras 3.16 lacks.
        names.append("keras_cv")
    for name in names:
        importlib.import_module(name)
    epsilon = private_fit()
    with tempfile.TemporaryDirectory() as folder:
        program = os.path.join(os.path.dirname(sys.executable), "tfdpx")
        command = [program, *DRY_RUN, f"--workdir={folder}"]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL)
    print(
        f"Python {platform.python_version()}, TensorFlow {tf.__version__}, Keras "
        f"{keras.__version__}: imports, {STEPS} private steps (epsilon "
        f"{epsilon:.3f}) and a dry run work."
    )


if __name__ == "__main__":
    main()
