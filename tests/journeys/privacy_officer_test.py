"""Somebody who approves runs: asks for numbers, and for one statement of what was trained."""

import json
import subprocess
import sys

import pytest
from absl import flags
from absl.testing import flagsaver
from PIL import Image

from tfdpx.accounting import record as records
from tfdpx.train import classify


def account(*arguments):
    """The JSON of the last line, and all of the output."""
    command = [sys.executable, "-m", "tfdpx.train.account", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


def test_numbers_before_anything_is_trained(tmp_path):
    # Is what the team proposes within epsilon 3?
    team = ("--num_examples=5000", "--batch_size=250", "--epochs=20", "--delta=1e-5")
    found, done = account(*team, "--noise_multiplier=1")
    assert found["solved"] == "epsilon" and found["epsilon_pld"] > 3
    assert "TensorFlow" not in done.stderr and "tensorflow" not in done.stderr

    # Which noise would be, what does more of it buy, and in a picture?
    picture = tmp_path / "trade_off.png"
    least, done = account(*team, "--epsilon=3", "--accountant=rdp", f"--plot={picture}")
    assert least["epsilon_rdp"] <= 3 and least["epsilon_pld"] < least["epsilon_rdp"]
    with Image.open(picture) as image:
        assert image.format == "PNG"

    # Is it what the other library says, and do they really shuffle?
    assert "tensorflow-privacy" in done.stdout
    noise = f"--noise_multiplier={least['noise_multiplier']}"
    shuffled, done = account(*team, noise, "--sampling=shuffle")
    assert shuffled["epsilon_pld"] > 2 * least["epsilon_pld"]
    assert "without amplification" in " ".join(done.stdout.split())


def test_a_delta_that_protects_nobody_is_said():
    _, done = account(
        *("--num_examples=1000", "--batch_size=1000", "--steps=1", "--noise_multiplier=5"),
        "--delta=0.01",
    )
    assert "exceeds 1/num_examples=0.001" in done.stderr


@pytest.mark.slow
def test_one_statement_of_what_was_trained(tmp_path):
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["classify"])
    given = dict(model="small_cnn", steps=4, batch_size=64, report_every=4, preset="digits")
    folders = [str(tmp_path / name) for name in ("first", "second")]
    for folder in folders:
        with flagsaver.flagsaver(**given, data_dir=str(tmp_path / "data"), workdir=folder):
            classify.main(["classify"])
    [first, second] = [records.read(f"{folder}/record.json").view() for folder in folders]
    alone, _ = account(f"--workdir={folders[0]}")
    both, done = account(f"--workdir={','.join(folders)}")
    assert alone["epsilon_pld"] == pytest.approx(first["epsilon"], rel=1e-4)
    assert alone["epsilon_pld"] < both["epsilon_pld"] < first["epsilon"] + second["epsilon"]
    assert both["steps"] == 8 and both["releasable"] is True
    assert "adding or removing one example" in " ".join(done.stdout.split())
