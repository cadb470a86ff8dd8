import csv
import json
import math
import pathlib
import re
import shutil
import subprocess
import sys

import dp_accounting
import pytest
import scipy.stats
from absl import flags
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from PIL import Image

import tfdpx
from tfdpx.accounting import Ledger, group_epsilon
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import Data, Record
from tfdpx.train import account
from tfdpx.train.accounts import tf_privacy_note

GOLDENS = pathlib.Path(__file__).parents[1] / "tfdpx" / "accounting" / "accounting_goldens.csv"
PHOTOS = Data("folder:photos", 500, "01")
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


@pytest.mark.filterwarnings("ignore:The epsilon of k")
@pytest.mark.slow
def test_people_with_several_rows(capsys):
    record, text = ask(capsys, **{**SMALL, "batch_size": 500}, rows_per_user=3)
    plan = tfdpx.PrivacyPlan(500, 500, 60, noise_multiplier=4.0, delta=1e-5)
    # In full batches, three rows that move by one clip each are one person who moves by three.
    assert record["epsilon_of_user"] == pytest.approx(group_epsilon(plan, 3), rel=1e-3)
    assert record["epsilon_of_user_drawing_people"] == pytest.approx(
        record["epsilon_of_user"], rel=1e-2
    )
    assert "with 3 examples" in flat(text)
    record, text = ask(capsys, **SMALL, rows_per_user=100)
    assert record["epsilon_of_user_drawing_people"] is None
    assert "--sampling=poisson" in refusal(capsys, **SMALL, sampling="shuffle", rows_per_user=2)
    said = flat(plan.statement(rows_per_user=3))
    assert "up to 3 examples" in said and "group_epsilon" not in said


def flat(text):
    return " ".join(text.split())


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


def ask_golden(capsys, row, noise=1.0):
    """Returns the output of the program for a golden, at `noise` times its noise multiplier."""
    return ask(
        capsys,
        noise_multiplier=noise * float(row["sigma"]),
        sampling_probability=row["q"],
        steps=row["steps"],
        delta=row["delta"],
    )[0]


# Four digits are printed.
PLD_TOLERANCE = 2.6e-3


@pytest.mark.parametrize("row", [0, 1, 4, 5, 9])
def test_goldens(capsys, row):
    row = goldens()[row]
    found = ask_golden(capsys, row)
    assert found["solved"] == "epsilon"
    assert found["epsilon"] == found["epsilon_pld"]
    assert found["epsilon_pld"] == pytest.approx(float(row["eps_pld"]), rel=PLD_TOLERANCE)
    # Leaving out fractional orders, as newer RDP does, is up to 3% looser.
    assert found["epsilon_rdp"] == pytest.approx(float(row["eps_rdp"]), rel=6e-4) or (
        float(row["eps_rdp"]) < found["epsilon_rdp"] < 1.03 * float(row["eps_rdp"])
    )


@pytest.mark.planted("an account of one percent more noise than there is")
@pytest.mark.parametrize("row", [0, 1, 4, 5, 9])
def test_goldens_tell_a_little_more_noise(capsys, row):
    row = goldens()[row]
    found = ask_golden(capsys, row, noise=1.01)
    assert found["epsilon_pld"] != pytest.approx(float(row["eps_pld"]), rel=PLD_TOLERANCE)


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


REFUSED = [
    ({"epsilon": 3}, "Exactly one of.*Left out: --noise_multiplier, --delta"),
    ({**SMALL, "epsilon": 1}, "Exactly one of --.*Left out: none"),
    ({**SMALL, "epochs": 3}, "--steps=60 --epochs=3.*leave one of them out"),
    ({**SMALL, "sampling_probability": 0.1}, "--batch_size=50.*leave one of them out"),
    ({**SMALL, "batch_size": 501}, "`batch_size` must not exceed `num_examples`.*501"),
    ({**SMALL, "delta": 0}, "`delta` must lie strictly between"),
    ({**SMALL, "noise_multiplier": -1}, "`noise_multiplier` must be a finite"),
    ({**SMALL, "num_examples": 0}, "`num_examples` must be a positive integer"),
    (
        {"epsilon": "inf", "sampling_probability": 0.1, "steps": 3, "delta": 0.1},
        "positive, finite",
    ),
    ({**SMALL, "plot": "trade.pdf"}, "takes a .png file.*trade.pdf"),
    ({**SMALL, "sampling": "with_replacement"}, "no accountant that judges it"),
    ({**SMALL, "sampling": "shuffle", "neighbours": "add_or_remove_one"}, "use|Use neigh"),
    ({**SMALL, "sampling": "without_replacement", "accountant": "pld"}, "`accountant` must"),
    ({**SMALL, "workdir": "nowhere"}, "takes --delta only.*--noise_multiplier"),
    ({"workdir": "nowhere"}, "Nothing in nowhere says what was spent"),
]


def test_what_cannot_be_answered_is_refused_by_name(capsys):
    for given, message in REFUSED:
        error = refusal(capsys, **given)
        assert error.startswith("tfdpx.train.account: ") and "\n" not in error
        assert re.search(message, error), error


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"steps": None, "epsilon": 0.01}, "No `steps` keeps within the target"),
        ({"batch_size": None, "epsilon": 1e-5}, "No `batch_size` keeps within"),
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
    if tf_privacy_note.compute_dp_sgd_privacy_lib is None:
        assert "tensorflow-privacy is not installed" in text
        return
    line = next(line for line in text.splitlines() if "assuming Poisson sampling (*)" in line)
    assert float(line.split()[-1]) == pytest.approx(epsilon_of("pld", 4, 0.1, 60, 1e-5), abs=6e-4)
    assert "Why these differ" in text and "6 Gaussian releases" in text


def test_tensorflow_privacy_is_said_to_be_absent(capsys, monkeypatch):
    monkeypatch.setattr(tf_privacy_note, "compute_dp_sgd_privacy_lib", None)
    assert "tensorflow-privacy is not installed" in ask(capsys, **SMALL)[1]


@pytest.mark.skipif(
    tf_privacy_note.compute_dp_sgd_privacy_lib is None, reason="needs tensorflow-privacy"
)
def test_shuffling_is_tensorflow_privacys_other_line(capsys):
    found, text = ask(capsys, **SMALL, sampling="shuffle")
    line = next(line for line in text.splitlines() if "occurring once per epoch:" in line)
    assert found["epsilon_pld"] == pytest.approx(float(line.split()[-1]), abs=6e-4)
    assert found["neighbours"] == "zero_out" and found["is_exact"] is False
    assert "without amplification" in text


@pytest.mark.slow
def test_the_trade_off_is_drawn(capsys, tmp_path):
    path = tmp_path / "new" / "trade.png"
    ask(capsys, **SMALL, accountant="rdp", plot=path)
    with Image.open(path) as image:
        assert image.format == "PNG" and image.width > 600


def leave(folder, noise=4.0, steps=60, run=1, data=PHOTOS, name="record.json", **changes):
    """A folder with the record that a run leaves."""
    entry = Entry(noise, 0.1, steps, poisson_sampled=changes.get("sampling") != "shuffle", run=run)
    given = dict(program="classify", data=data, ledger=Ledger((entry,)), delta=1e-5)
    folder.mkdir(parents=True, exist_ok=True)
    Record(**{**given, **changes}).save(folder / name)
    return folder


def composed(*runs):
    """Epsilon by dp_accounting itself, of pairs of a noise multiplier and a number of updates."""
    judge = pld_privacy_accountant.PLDAccountant()
    for noise, steps in runs:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        judge.compose(dp_accounting.PoissonSampledDpEvent(0.1, gaussian), steps)
    return judge.get_epsilon(1e-5)


def test_one_statement_for_a_folder_of_runs_and_a_ledger(capsys, tmp_path):
    leave(tmp_path / "runs" / "a")
    leave(tmp_path / "runs" / "b", noise=6.0, steps=30, run=2)
    Ledger((Entry(20.0, 0.1, 10, run=3),)).save(tmp_path / "ledger.json")
    found, text = ask(capsys, workdir=f"{tmp_path / 'runs'},{tmp_path / 'ledger.json'}")
    expected = composed((4.0, 60), (6.0, 30), (20.0, 10))
    assert found["epsilon_pld"] == pytest.approx(expected, rel=2e-3)
    assert found["epsilon_rdp"] > found["epsilon_pld"]
    assert (found["runs"], found["steps"], found["num_examples"]) == (3, 100, 500)
    assert "adding or removing one example" in flat(text) and found["releasable"] is True


def test_what_is_named_twice_counts_once(capsys, tmp_path):
    first = leave(tmp_path / "a")
    shutil.copytree(first, tmp_path / "copy")
    found, _ = ask(capsys, workdir=f"{first},{first}/record.json,{tmp_path},{tmp_path / 'copy'}")
    assert found["steps"] == 60
    assert found["epsilon_pld"] == pytest.approx(composed((4.0, 60)), rel=2e-3)


def test_a_shuffled_run_makes_all_neighbours_those_of_shuffling(capsys, tmp_path):
    leave(tmp_path / "a", sampling="shuffle")
    leave(tmp_path / "b", run=2)
    found, text = ask(capsys, workdir=tmp_path)
    judge = rdp_privacy_accountant.RdpAccountant()
    judge.compose(dp_accounting.GaussianDpEvent(4.0), 6)
    judge.compose(dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(4.0)), 60)
    assert found["epsilon_rdp"] == pytest.approx(judge.get_epsilon(1e-5), rel=1e-4)
    assert found["neighbours"] == "zero_out" and not found["epsilon_is_approximate"]
    assert "emptying the place of one example" in flat(text)


def test_the_best_of_several_runs_adds_up(capsys, tmp_path):
    tuned = Ledger.selected([Entry(10.0, 0.1, 60), Entry(40.0, 1.0, 1)], 5.0, 1e-5)
    leave(tmp_path / "a")
    leave(tmp_path / "b", ledger=tuned, searched="5 runs")
    found, text = ask(capsys, workdir=tmp_path)
    assert found["epsilon_pld"] == pytest.approx(
        composed((4.0, 60)) + tuned.epsilon(None), rel=2e-3
    )
    assert found["delta"] == pytest.approx(2e-5) and "adds its own epsilon" in flat(text)
    assert found["releasable"] is True


def test_different_data_do_not_compose_without_a_word(capsys, tmp_path):
    leave(tmp_path / "a")
    leave(tmp_path / "b", run=2, data=Data("folder:photos", 500, "02"))
    assert "different identifiers" in refusal(capsys, workdir=tmp_path)
    found, _ = ask(capsys, workdir=tmp_path, same_data="true")
    assert found["epsilon_pld"] == pytest.approx(composed((4.0, 120)), rel=2e-3)
    leave(tmp_path / "b", run=2, data=Data("folder:photos", 499, "01"))
    assert ask(capsys, workdir=tmp_path)[0]["num_examples"] == [499, 500]


def test_runs_of_different_deltas_need_one(capsys, tmp_path):
    leave(tmp_path / "a")
    leave(tmp_path / "b", run=2, delta=1e-6)
    message = refusal(capsys, workdir=tmp_path)
    assert "Give --delta: the runs have no one delta. Found: 1e-06, 1e-05" in message
    assert ask(capsys, workdir=tmp_path, delta=1e-5)[0]["delta"] == 1e-5


DAMAGED = [
    ("a.json", "{", "not a whole ledger"),
    ("a.json", "[]", "not a whole ledger"),
    ("record.json", "{}", "no whole record"),
    ("m.keras", "weights", "Cannot read"),
    ("notes.txt", "", "not a whole ledger"),
]


def test_damaged_files(capsys, tmp_path):
    for name, text, message in DAMAGED:
        (tmp_path / name).write_text(text)
        assert message in refusal(capsys, workdir=tmp_path / name)


def test_an_empty_folder_says_nothing(capsys, tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        assert "says what was spent" in refusal(capsys, workdir=path)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ledger": Ledger((Entry(4.0, 0.1, 60, seeded=True),))}, "had a seed"),
        ({"searched": "a grid"}, "searched on the same data"),
        ({"ledger": Ledger((Entry(4.0, 0.1, 60),), is_complete=False)}, "is unknown"),
    ],
)
def test_what_is_not_releasable(capsys, tmp_path, changes, message):
    found, text = ask(capsys, workdir=leave(tmp_path / "a", **changes))
    assert found["releasable"] is False and "Not releasable: " in text and message in flat(text)


def test_a_run_without_noise_is_not_releasable(capsys, tmp_path):
    leave(tmp_path / "a", noise=0.0, delta=None)
    found, text = ask(capsys, workdir=tmp_path)
    assert found["epsilon"] == "inf" and found["releasable"] is False
    assert "epsilon is infinite" in text


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
        "assert not {'tensorflow', 'keras', 'sklearn', 'matplotlib'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["epsilon_gdp"] > 0


def leave_two(folder):
    """Two runs that differ in a setting, and in what came of it."""
    small = {"settings": {"model": "lenet", "steps": 60}, "results": {"test_accuracy": 0.5}}
    large = {"settings": {"model": "wrn", "steps": 60}, "results": {"test_accuracy": 0.75}}
    return leave(folder / "a", **small), leave(folder / "b", noise=6.0, run=2, **large)


def test_runs_are_compared(capsys, tmp_path):
    first, second = leave_two(tmp_path)
    found, text = ask(capsys, compare=f"{first},{second}/record.json")
    assert found["differing"] == ["model"]
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert [run["settings"] for run in found["runs"]] == [{"model": "lenet"}, {"model": "wrn"}]
    assert [run["accuracy"] for run in found["runs"]] == [0.5, 0.75]
    epsilons = [run["epsilon"] for run in found["runs"]]
    assert epsilons == pytest.approx([composed((4.0, 60)), composed((6.0, 60))], rel=2e-3)
    assert "lenet" in text and "wrn" in text and f"{epsilons[0]:.5g}" in text
    assert "--workdir=A,B,... adds it up" in text
    # In another order, and from the folder around them; at another delta.
    assert ask(capsys, compare=f"{second},{first}")[0]["runs"][0]["name"] == "b"
    assert ask(capsys, compare=tmp_path)[0] == found
    tighter, _ = ask(capsys, compare=tmp_path, delta=1e-7)
    assert tighter["runs"][0]["epsilon"] > epsilons[0] and tighter["runs"][1]["delta"] == 1e-7


def test_runs_of_one_name_are_told_by_their_folders(capsys, tmp_path):
    for name in ("one", "two"):
        leave_two(tmp_path / name)
    paths = f"{tmp_path / 'one' / 'a'},{tmp_path / 'two' / 'a'}"
    found, text = ask(capsys, compare=paths)
    assert [run["name"] for run in found["runs"]] == ["one/a", "two/a"]
    assert found["differing"] == [] and "No recorded setting differs" in text


def test_a_picture_of_compared_runs(capsys, tmp_path):
    leave_two(tmp_path)
    results = {"validation_accuracy": 0.9}
    leave(tmp_path / "$c$", noise=0.0, delta=None, run=3, results=results)
    leave(tmp_path / "d", run=4)
    found, text = ask(capsys, compare=tmp_path, plot=tmp_path / "new" / "runs.png")
    assert [run["epsilon"] for run in found["runs"]].count("inf") == 1
    assert "Runs without an accuracy are left out of the picture: 1." in text
    with Image.open(tmp_path / "new" / "runs.png") as picture:
        assert picture.format == "PNG" and len(picture.convert("RGB").getcolors(1 << 20)) > 10
    shutil.rmtree(tmp_path / "$c$")
    for name in ("a", "b"):
        shutil.rmtree(tmp_path / name)
    leave(tmp_path / "e", run=5)
    assert "no run has recorded one" in refusal(capsys, compare=tmp_path, plot="runs.png")


def test_what_cannot_be_compared_is_refused_with_the_remedy(capsys, tmp_path):
    first, second = leave_two(tmp_path / "runs")
    (tmp_path / "under_way" / "checkpoint").mkdir(parents=True)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "record.json").write_text((first / "record.json").read_text()[:-50])
    for compare, message in [
        (first, "two runs at least.*Name another run"),
        (f"{first},{first}/record.json", "two runs at least"),
        (
            f"{first},{tmp_path / 'nowhere'}",
            "Nothing in .*nowhere says.*Name the folder of a finished",
        ),
        (f"{first},{tmp_path / 'under_way'}", "not finished.*finish it with --resume"),
        (f"{first},{tmp_path / 'damaged'}", "damaged/record.json.*restore it from a copy"),
    ]:
        error = refusal(capsys, compare=compare)
        assert re.search(message, error) and "\n" not in error, error
    error = refusal(capsys, compare=f"{first},{second}", epsilon=3)
    assert "--delta and --plot only. Received also: --epsilon" in error
    assert "Received also: --compare" in refusal(capsys, workdir=first, compare=first)
