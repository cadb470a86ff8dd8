"""A privacy officer asks for numbers before anything is trained."""

import json
import subprocess
import sys

import pytest

from tfdpx.train import plan


@pytest.mark.nightly
def test_numbers_for_a_proposal(run):
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
