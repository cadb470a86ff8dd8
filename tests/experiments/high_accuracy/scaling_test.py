"""The program that prints the scaling figures, as a user runs it."""

import json
import subprocess
import sys


def run(*flags):
    # In a process of its own: its flags have the names of those of `tfdpx.train.classify`.
    command = [sys.executable, "-m", "experiments.high_accuracy.scaling", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_last_line_is_json():
    done = run(
        *("--model=lenet", "--image_size=28", "--num_classes=10", "--num_examples=60000"),
        *("--batch_size=512", "--steps=100", "--delta=1e-5", "--chips=8,2"),
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert [row["chips"] for row in record["spread"]] == [2, 8]
    assert record["parameters"] == 61_706 + 2 * 25 * 6  # LeNet-5 with three channels for one.
    assert record["epsilon"] > 0 and record["padding"] > 0
    assert all("limits" in row for row in record["spread"])


def test_an_error_of_the_user_is_one_line():
    done = run("--model=no_such_model")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "experiments.high_accuracy.scaling: There is no model"
    )
