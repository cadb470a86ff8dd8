"""Somebody who approves runs: asks for numbers, and for one statement of what was trained."""

import json
import subprocess
import sys

import pytest
from absl import flags
from PIL import Image

from tfdpx.accounting import record as records
from tfdpx.train import account as program


def account(*arguments):
    """The JSON of the last line, and all of the output."""
    command = [sys.executable, "-m", "tfdpx.train.account", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done


def account_here(capsys, *arguments):
    """The JSON of the last line, and all of the output, of a run in this process."""
    values = flags.FlagValues()
    program.define_flags(values)
    values(["account", *arguments])
    capsys.readouterr()
    program.main(["account"], values)
    text = capsys.readouterr().out
    return json.loads(text.splitlines()[-1]), text


@pytest.mark.slow
def test_numbers_before_anything_is_trained(tmp_path, capsys):
    # Is what the team proposes within epsilon 3?
    team = ("--num_examples=5000", "--batch_size=250", "--epochs=20", "--delta=1e-5")
    found, done = account(*team, "--noise_multiplier=1")
    assert found["solved"] == "epsilon" and found["epsilon_pld"] > 3
    assert "TensorFlow" not in done.stderr and "tensorflow" not in done.stderr

    # Which noise would be, what does more of it buy, and in a picture?
    picture = tmp_path / "trade_off.png"
    given = ("--epsilon=3", "--accountant=rdp", f"--plot={picture}")
    least, text = account_here(capsys, *team, *given)
    assert least["epsilon_rdp"] <= 3 and least["epsilon_pld"] < least["epsilon_rdp"]
    with Image.open(picture) as image:
        assert image.format == "PNG"

    # Is it what the other library says, and do they really shuffle?
    assert "tensorflow-privacy" in text
    noise = f"--noise_multiplier={least['noise_multiplier']}"
    shuffled, text = account_here(capsys, *team, noise, "--sampling=shuffle")
    assert shuffled["epsilon_pld"] > 2 * least["epsilon_pld"]
    assert "without amplification" in " ".join(text.split())


@pytest.mark.slow
def test_one_statement_of_what_was_trained(finished_runs, capsys):
    folders = [str(finished_runs(kind).workdir) for kind in ("private", "network")]
    first, second = (records.read(f"{folder}/record.json").view() for folder in folders)
    alone, _ = account_here(capsys, f"--workdir={folders[0]}")
    both, text = account_here(capsys, f"--workdir={','.join(folders)}")
    assert alone["epsilon_pld"] == pytest.approx(first["epsilon"], rel=1e-4)
    assert second["epsilon"] < both["epsilon_pld"] < first["epsilon"] + second["epsilon"]
    # The second had a seed.
    assert both["steps"] == 9 and alone["releasable"] is True and both["releasable"] is False
    assert "adding or removing one example" in " ".join(text.split())
