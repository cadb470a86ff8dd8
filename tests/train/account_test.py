import csv
import json
import math
import pathlib
import re
import subprocess
import sys

import dp_accounting
import pytest
import scipy.stats
from absl import flags
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from PIL import Image

from tfdpx.accounting import Entry, Ledger
from tfdpx.train import account
from tfdpx.train.accounts import beside

GOLDENS = pathlib.Path(__file__).parents[1] / "tfdpx" / "accounting" / "accounting_goldens.csv"
ASKED = ("noise_multiplier", "sampling_probability", "steps", "delta", "epsilon")
SMALL = {
    "noise_multiplier": 4.0,
    "batch_size": 50,
    "num_examples": 500,
    "steps": 60,
    "delta": 1e-5,
}


def ask(capsys, **given):
    """The JSON of the last line, and all that stood before it."""
    values = flags.FlagValues()
    account.define_flags(values)
    values(["account", *(f"--{name}={value}" for name, value in given.items())])
    capsys.readouterr()
    account.main(["account"], values)
    *text, last = capsys.readouterr().out.splitlines()
    return json.loads(last), "\n".join(text)


def refusal(capsys, **given):
    with pytest.raises(SystemExit) as error:
        ask(capsys, **given)
    return str(error.value)


def epsilon_of(accountant, noise_multiplier, sampling_probability, steps, delta):
    """By dp_accounting itself."""
    judge = {
        "pld": pld_privacy_accountant.PLDAccountant,
        "rdp": rdp_privacy_accountant.RdpAccountant,
    }[accountant]()
    gaussian = dp_accounting.GaussianDpEvent(noise_multiplier)
    judge.compose(dp_accounting.PoissonSampledDpEvent(sampling_probability, gaussian), steps)
    return judge.get_epsilon(delta)


def goldens():
    with open(GOLDENS, encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("row", [0, 1, 4, 5, 9])
def test_goldens(capsys, row):
    row = goldens()[row]
    found, _ = ask(
        capsys,
        noise_multiplier=row["sigma"],
        sampling_probability=row["q"],
        steps=row["steps"],
        delta=row["delta"],
    )
    assert found["solved"] == "epsilon"
    assert found["epsilon"] == found["epsilon_pld"]
    # Four digits are printed. Leaving out fractional orders, as newer RDP does, is up to 3% looser.
    assert found["epsilon_pld"] == pytest.approx(float(row["eps_pld"]), rel=2.6e-3)
    assert found["epsilon_rdp"] == pytest.approx(float(row["eps_rdp"]), rel=6e-4) or (
        float(row["eps_rdp"]) < found["epsilon_rdp"] < 1.03 * float(row["eps_rdp"])
    )
    wrong = float(row["sigma"]) * 1.01
    off, _ = ask(
        capsys,
        noise_multiplier=wrong,
        sampling_probability=row["q"],
        steps=row["steps"],
        delta=row["delta"],
    )
    assert off["epsilon_pld"] != pytest.approx(float(row["eps_pld"]), rel=2.6e-3)


@pytest.mark.parametrize("unknown", ASKED)
def test_any_one_is_solved_from_the_others(capsys, unknown):
    whole = {
        "noise_multiplier": 4.0,
        "sampling_probability": 0.1,
        "steps": 60,
        "delta": 1e-5,
        "epsilon": 1.2,
    }
    given = {name: value for name, value in whole.items() if name != unknown}
    found, _ = ask(capsys, accountant="rdp", **given)
    assert found["solved"] == unknown

    def spent(**changes):
        values = {**given, unknown: found[unknown], **changes}
        return epsilon_of("rdp", *(values[name] for name in ASKED[:4]))

    if unknown == "epsilon":
        assert found["epsilon"] == pytest.approx(spent(), rel=1e-4)
        return
    assert spent() <= 1.2
    assert found["epsilon_rdp"] == pytest.approx(1.2, rel=0.02 if unknown == "steps" else 1e-3)
    tighter = {
        "noise_multiplier": found[unknown] * 0.999,
        "sampling_probability": found[unknown] * 1.001,
        "steps": found[unknown] + 1,
        "delta": found[unknown] * 0.99,
    }
    assert spent(**{unknown: tighter[unknown]}) > 1.2


@pytest.mark.parametrize("unknown", ["batch_size", "num_examples"])
def test_sizes_are_solved(capsys, unknown):
    given = {name: value for name, value in SMALL.items() if name != unknown}
    found, _ = ask(capsys, **given, epsilon=1.0, accountant="rdp")
    size = {**given, unknown: found[unknown]}

    def spent(**changes):
        rate = {**size, **changes}
        rate = rate["batch_size"] / rate["num_examples"]
        return epsilon_of("rdp", given["noise_multiplier"], rate, given["steps"], given["delta"])

    step = {"batch_size": 1, "num_examples": -1}[unknown]
    assert spent() <= 1.0 < spent(**{unknown: found[unknown] + step})


def test_epochs_and_pld(capsys):
    given = {name: value for name, value in SMALL.items() if name != "steps"}
    found, _ = ask(capsys, **given, epochs=6)
    assert (found["steps"], found["epochs"], found["sampling_probability"]) == (60, 6.0, 0.1)
    assert found["epsilon_pld"] == pytest.approx(epsilon_of("pld", 4.0, 0.1, 60, 1e-5), rel=2e-3)
    assert found["epsilon_gdp"] is None and found["epsilon_pld"] < found["epsilon_rdp"]


def test_full_batches_are_exact(capsys):
    found, _ = ask(
        capsys, num_examples=100, batch_size=100, noise_multiplier=20, steps=206, delta=1e-5
    )
    # Balle and Wang 2018, Theorem 8, by bisection.
    mu, low, high = math.sqrt(206) / 20, 0.0, 10.0
    for _ in range(60):
        middle = (low + high) / 2
        cdf = scipy.stats.norm.cdf
        delta = cdf(mu / 2 - middle / mu) - math.exp(middle) * cdf(-mu / 2 - middle / mu)
        low, high = (middle, high) if delta > 1e-5 else (low, middle)
    assert found["epsilon_gdp"] == pytest.approx(high, rel=1e-6)
    assert found["epsilon_pld"] == pytest.approx(high, rel=1e-4)


@pytest.mark.parametrize(
    "given, message",
    [
        ({"epsilon": 3}, "exactly one must be left out of.*Missing: --noise_multiplier, --delta"),
        ({**SMALL, "epsilon": 1}, "exactly one must be left out.*Missing: none"),
        ({**SMALL, "epochs": 3}, "--steps=60 --epochs=3.*leave one of them out"),
        ({**SMALL, "sampling_probability": 0.1}, "--batch_size=50.*leave one of them out"),
        ({**SMALL, "batch_size": 501}, "`batch_size` must not exceed --num_examples.*501"),
        ({**SMALL, "delta": 0}, "`delta` must lie strictly between"),
        ({**SMALL, "noise_multiplier": -1}, "`noise_multiplier` must be a finite"),
        ({**SMALL, "num_examples": 0}, "`num_examples` must be an int >= 1"),
        ({"epsilon": "inf", "sampling_probability": 0.1, "steps": 3, "delta": 0.1}, "and finite"),
        ({**SMALL, "plot": "trade.pdf"}, "takes a .png file.*trade.pdf"),
        ({**SMALL, "sampling": "with_replacement"}, "no accountant that judges it"),
        ({**SMALL, "sampling": "shuffle", "neighbours": "add_or_remove_one"}, "use|Use neigh"),
        ({**SMALL, "sampling": "without_replacement", "accountant": "pld"}, "`accountant` must"),
        ({**SMALL, "workdir": "nowhere"}, "takes --delta beside it.*--noise_multiplier"),
        ({"workdir": "nowhere"}, "Nothing in nowhere says what was spent"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(capsys, given, message):
    error = refusal(capsys, **given)
    assert error.startswith("tfdpx.train.account: ") and "\n" not in error
    assert re.search(message, error), error


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"noise_multiplier": None, "epsilon": 1e9}, "does not bound --noise_multiplier"),
        ({"steps": None, "epsilon": 0.01}, "No --steps keeps within --epsilon=0.01"),
        ({"batch_size": None, "epsilon": 1e-5}, "No --batch_size keeps within"),
    ],
)
def test_a_target_out_of_reach(capsys, changes, message):
    given = {**SMALL, "noise_multiplier": 1.0, "accountant": "rdp", **changes}
    given = {name: value for name, value in given.items() if value is not None}
    assert message in refusal(capsys, **given)


def test_a_doubtful_guarantee_is_said(capsys):
    values = flags.FlagValues()
    account.define_flags(values)
    values(["account", *(f"--{n}={v}" for n, v in {**SMALL, "delta": 0.01}.items())])
    account.main(["account"], values)
    assert "Warning: delta=0.01 exceeds 1/num_examples=0.002" in capsys.readouterr().err


def test_tensorflow_privacy_stands_beside(capsys):
    _, text = ask(capsys, **SMALL)
    if beside.compute_dp_sgd_privacy_lib is None:
        assert "tensorflow-privacy is not installed" in text
        return
    line = next(line for line in text.splitlines() if "assuming Poisson sampling (*)" in line)
    assert float(line.split()[-1]) == pytest.approx(epsilon_of("pld", 4, 0.1, 60, 1e-5), abs=6e-4)
    assert "Why these differ" in text and "6 Gaussian releases" in text


def test_tensorflow_privacy_is_said_to_be_absent(capsys, monkeypatch):
    monkeypatch.setattr(beside, "compute_dp_sgd_privacy_lib", None)
    assert "tensorflow-privacy is not installed" in ask(capsys, **SMALL)[1]


@pytest.mark.skipif(beside.compute_dp_sgd_privacy_lib is None, reason="needs tensorflow-privacy")
def test_shuffling_is_tensorflow_privacys_other_line(capsys):
    found, text = ask(capsys, **SMALL, sampling="shuffle")
    line = next(line for line in text.splitlines() if "occurring once per epoch:" in line)
    assert found["epsilon_pld"] == pytest.approx(float(line.split()[-1]), abs=6e-4)
    assert found["neighbours"] == "zero_out" and found["is_exact"] is False
    assert "without amplification" in text


def test_the_trade_off_is_drawn(capsys, tmp_path):
    path = tmp_path / "new" / "trade.png"
    ask(capsys, **SMALL, accountant="rdp", plot=path)
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 600


def write_report(folder, **changes):
    folder.mkdir()
    report = {
        "model": "lenet",
        "dataset": "digits",
        "private": True,
        "noise_multiplier": 4.0,
        "sampling_probability": 0.1,
        "steps": 60,
        "sampling": "poisson",
        "delta": 1e-5,
        "num_examples": 500,
        "seeded": False,
        **changes,
    }
    (folder / "report.json").write_text(json.dumps(report))
    return folder


def test_one_statement_for_runs_heads_and_audits(capsys, tmp_path):
    first = write_report(tmp_path / "a")
    second = write_report(tmp_path / "b", noise_multiplier=6.0, steps=30)
    head = tmp_path / "c"
    head.mkdir()
    Ledger((Entry(20.0, 1.0, 3),)).save(head / "head.ledger.json")
    (head / "head.json").write_text(json.dumps({"delta": 1e-5, "num_examples": 500}))
    audit = tmp_path / "audit.json"
    audit.write_text(json.dumps({"epsilon_lower_bound": 0.7, "confidence": 0.95, "delta": 1e-5}))
    found, text = ask(capsys, workdir=f"{first},{second},{head},{audit}")
    judge = pld_privacy_accountant.PLDAccountant()
    for noise, steps in ((4.0, 60), (6.0, 30)):
        gaussian = dp_accounting.GaussianDpEvent(noise)
        judge.compose(dp_accounting.PoissonSampledDpEvent(0.1, gaussian), steps)
    judge.compose(dp_accounting.GaussianDpEvent(20.0), 3)
    assert found["epsilon_pld"] == pytest.approx(judge.get_epsilon(1e-5), rel=2e-3)
    assert found["epsilon_rdp"] > found["epsilon_pld"] > epsilon_of("pld", 4.0, 0.1, 60, 1e-5)
    assert (found["runs"], found["steps"], found["epsilon_lower_bound"]) == (4, 93, 0.7)
    assert "at least 0.7" in text and "adding or removing one example" in text


def test_a_shuffled_run_makes_all_neighbours_those_of_shuffling(capsys, tmp_path):
    shuffled = write_report(tmp_path / "a", sampling="shuffle", epsilon_is_approximate=True)
    poisson = write_report(tmp_path / "b")
    found, text = ask(capsys, workdir=f"{shuffled},{poisson}")
    judge = rdp_privacy_accountant.RdpAccountant()
    judge.compose(dp_accounting.GaussianDpEvent(4.0), 6)
    judge.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0)), 60)
    assert found["epsilon_rdp"] == pytest.approx(judge.get_epsilon(1e-5), rel=1e-4)
    assert found["neighbours"] == "zero_out" and not found["epsilon_is_approximate"]
    assert "emptying the place of one example" in text


def test_what_is_no_gaussian_adds_up(capsys, tmp_path):
    first = write_report(tmp_path / "a", individual_release_epsilon=0.5)
    alone, _ = ask(capsys, workdir=write_report(tmp_path / "b"))
    found, text = ask(capsys, workdir=first)
    assert found["epsilon_pld"] == pytest.approx(alone["epsilon_pld"] + 0.5)
    assert found["delta"] == pytest.approx(2e-5) and "adds its own epsilon" in text


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_examples": 501}, "not of one data set.*500, 501 examples"),
        ({"delta": 1e-6}, "Give --delta: the runs have no one delta. Found: 1e-06, 1e-05"),
        ({"steps": 0}, "`steps` of an entry must be at least 1"),
    ],
)
def test_runs_that_do_not_compose(capsys, tmp_path, changes, message):
    first = write_report(tmp_path / "a")
    second = write_report(tmp_path / "b", **changes)
    assert re.search(message, refusal(capsys, workdir=f"{first},{second}"))


def test_an_audit_that_proves_more_than_the_account_is_no_statement(capsys, tmp_path):
    run = write_report(tmp_path / "a")
    audit = tmp_path / "audit.json"
    audit.write_text(json.dumps({"epsilon_lower_bound": 9.0, "delta": 1e-5}))
    assert "the guarantee is broken" in refusal(capsys, workdir=f"{run},{audit}")


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("a.json", "{", "Cannot read"),
        ("a.json", "[]", "holds no report and no ledger"),
        ("a.json", "{}", "not a whole ledger"),
    ],
)
def test_damaged_files(capsys, tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    assert message in refusal(capsys, workdir=tmp_path / name)


def test_a_seeded_run_is_not_releasable(capsys, tmp_path):
    found, text = ask(capsys, workdir=write_report(tmp_path / "a", seeded=True))
    assert found["releasable"] is False and "Not releasable" in text


def test_a_run_without_noise_is_not_releasable(capsys, tmp_path):
    run = write_report(tmp_path / "a", noise_multiplier=0.0, delta=None)
    assert "Give --delta" in refusal(capsys, workdir=run)
    found, text = ask(capsys, workdir=run, delta=1e-5)
    assert found["epsilon"] == "inf" and found["releasable"] is False
    assert "no noise" in text


def test_an_unfinished_run_has_no_statement_yet(capsys, tmp_path):
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    assert "not finished" in refusal(capsys, workdir=tmp_path / "run")


def test_it_starts_without_tensorflow():
    code = (
        "import runpy, sys\n"
        "sys.argv = ['account', '--noise_multiplier=1', '--sampling_probability=1', '--steps=1',"
        " '--delta=1e-5', '--accountant=rdp']\n"
        "try: runpy.run_module('tfdpx.train.account', run_name='__main__', alter_sys=True)\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert 'tensorflow' not in sys.modules and 'keras' not in sys.modules\n"
    )
    # What decides is the command line that the process was started by.
    command = [sys.executable, "-c", code, "-m", "tfdpx.train.account"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["epsilon_gdp"] > 0
