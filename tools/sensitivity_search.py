r"""Searches for examples that move a clipped sum by more than the clip C.

    python tools/sensitivity_search.py --trials=30

The search uses whole models and difficult examples, for example with huge gradients, zero
gradients, duplicates or extreme sample weights. It compares sums with and without one example, in
float32 and bfloat16, with and without XLA. It also compares whole updates on one device and on two.
The last line is a JSON object: the largest norms of the differences, divided by C. The exit status
is 1 if one of them exceeds 1 + 1e-5.
"""

import argparse
import json
import os
import pathlib
import sys
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = ""
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "support"))

import adversarial  # noqa: E402
import tensorflow as tf  # noqa: E402

BOUND = 1.0 + 1e-5


def main():
    """Runs the search; see the module."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--models", default=",".join(adversarial.MODELS))
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    [device] = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    ratios, tried = {}, 0
    for policy in ("float32", "mixed_bfloat16"):
        for jit_compile in (False, True):
            name = f"{policy}{', XLA' if jit_compile else ''}"
            for model in arguments.models.split(","):
                if jit_compile and model == "lstm":
                    continue  # XLA does not support these loops.
                ratio = adversarial.largest_ratio(model, policy, jit_compile, arguments.trials)
                ratios[name] = max(ratios.get(name, 0.0), ratio)
                tried += 2 * arguments.trials
                print(f"{name}: {model} {ratio:.7f}", file=sys.stderr, flush=True)
    ratios["updates"] = adversarial.largest_ratio_of_updates()
    ratios["updates on two replicas"] = adversarial.ratio_on_two_replicas()
    print(json.dumps({"largest_ratio": max(ratios.values()), "pairs_tried": tried, "by": ratios}))
    sys.exit(int(max(ratios.values()) > BOUND))


if __name__ == "__main__":
    main()
