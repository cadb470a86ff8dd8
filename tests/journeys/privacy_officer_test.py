"""A privacy officer approves runs: asks for numbers, and for one statement about the training."""

import json
import subprocess
import sys

import pytest

from tfdpx.accounting import record as records
from tfdpx.train import account, plan


@pytest.mark.nightly
def test_numbers_before_anything_is_trained(run):
    # Is the team's proposal within epsilon 3?
    team = dict(num_examples=5000, batch_size=250, epochs=20, delta=1e-5)
    arguments = [f"--{name}={value}" for name, value in team.items()]
    command = [sys.executable, "-m", "tfdpx.train.plan", *arguments, "--noise_multiplier=1"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    answer = json.loads(process.stdout.splitlines()[-1])
    assert answer["solved"] == "epsilon" and answer["epsilon_pld"] > 3

    # Which noise would be?
    least, text = run(plan, **team, epsilon=3, accountant="rdp")
    assert least["epsilon_rdp"] <= 3 and least["epsilon_pld"] < least["epsilon_rdp"]

    # Does the other library agree, and do they really shuffle?
    assert "tensorflow-privacy" in text
    noise = least["noise_multiplier"]
    shuffled, text = run(plan, **team, noise_multiplier=noise, sampling="shuffle")
    assert shuffled["epsilon_pld"] > 2 * least["epsilon_pld"]
    assert "without amplification" in " ".join(text.split())


@pytest.mark.slow
def test_one_statement_of_what_was_trained(finished_runs, run):
    folders = [finished_runs(kind).workdir for kind in ("private", "network")]
    first, second = (records.read(folder / "record.json").view() for folder in folders)
    alone, _ = run(account, workdir=folders[0])
    both, text = run(account, workdir=folders)
    assert alone["epsilon_pld"] == pytest.approx(first["epsilon"], rel=1e-4)
    assert second["epsilon"] < both["epsilon_pld"] < first["epsilon"] + second["epsilon"]
    # The second had a seed.
    assert both["steps"] == 9 and alone["releasable"] is True and both["releasable"] is False
    assert run(account, workdir=folders[1] / "model.keras")[0]["releasable"] is False
    assert "adding or removing one example" in " ".join(text.split())
