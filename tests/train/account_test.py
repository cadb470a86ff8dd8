"""`account` by its flags: solving, the joint privacy loss of runs, and refusals."""

import io
import math
import re
import shutil
import zipfile
from unittest import mock

import dp_accounting
import h5py
import numpy as np
import pytest
from dp_accounting.pld import pld_privacy_accountant
from dp_accounting.rdp import rdp_privacy_accountant
from PIL import Image
from scipy import stats

from tfdpx.accounting import Ledger, group_epsilon
from tfdpx.accounting.ledger import Entry
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.report import pictures
from tfdpx.train import account, account_question

PHOTOS = DatasetId("folder:photos", 500, "01")
SMALL = dict(noise_multiplier=4.0, batch_size=50, num_examples=500, steps=60, delta=1e-5)


@pytest.fixture
def ask(run):
    """A function from flags to the last line, and all text without line breaks."""

    def asked(**arguments):
        record, text = run(account, **arguments)
        return record, " ".join(text.split())

    return asked


@pytest.mark.filterwarnings("ignore:The epsilon of k")
@pytest.mark.slow
def test_people_with_several_rows(ask, refusal):
    record, text = ask(**{**SMALL, "batch_size": 500}, rows_per_user=3)
    # In full batches, three rows that each move by one clip equal one person who moves by three.
    together = group_epsilon(Ledger((Entry(4.0, 1.0, 60),)), 3, delta=1e-5)
    assert record["epsilon_of_user"] == pytest.approx(together, rel=1e-3)
    assert record["epsilon_of_user_drawing_people"] == pytest.approx(together, rel=1e-2)
    assert "with 3 examples" in text
    assert record["epsilon_pld"] == pytest.approx(record["epsilon_gdp"], rel=1e-4)
    assert "--sampling=poisson" in refusal(account, **SMALL, sampling="shuffle", rows_per_user=2)


def composed(*runs, accountant="pld", delta=1e-5):
    """Returns dp_accounting's epsilon of runs, each of a noise, a number of updates and a rate."""
    kinds = pld_privacy_accountant.PLDAccountant, rdp_privacy_accountant.RdpAccountant
    judge = kinds[accountant == "rdp"]()
    for noise, steps, *rate in runs:
        gaussian = dp_accounting.GaussianDpEvent(noise)
        judge.compose(dp_accounting.PoissonSampledDpEvent(*rate or [0.1], gaussian), steps)
    return judge.get_epsilon(delta)


# Each quantity has a change that would overspend.
UNKNOWN = {"noise_multiplier": 0.999, "batch_size": 1, "num_examples": -1, "steps": 1}
UNKNOWN |= {"delta": 0.99, "epsilon": None}


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_any_one_is_solved_from_the_others(ask, unknown):
    arguments = {**SMALL, "epsilon": 1.2}
    del arguments[unknown]
    answer, _ = ask(accountant="rdp", **arguments)
    value, change = answer[unknown], UNKNOWN[unknown]

    def spent(value):
        values = {**arguments, unknown: value}
        run = values["noise_multiplier"], values["steps"]
        rate = values["batch_size"] / values["num_examples"]
        return composed((*run, rate), accountant="rdp", delta=values["delta"])

    assert answer["solved"] == unknown
    assert answer["epsilon_rdp"] == pytest.approx(spent(value), rel=1e-4)
    if change is not None:
        assert spent(value) <= 1.2 < spent(value + change if change % 1 == 0 else value * change)


def test_epochs_and_pld_and_what_is_said_of_both(ask, capsys, monkeypatch):
    arguments = {name: value for name, value in SMALL.items() if name != "steps"}
    answer, _ = ask(**arguments, epochs=6)
    assert (answer["steps"], answer["epochs"], answer["sampling_probability"]) == (60, 6.0, 0.1)
    assert answer["epsilon_pld"] == pytest.approx(composed((4.0, 60)), rel=2e-3)
    assert answer["epsilon"] == answer["epsilon_pld"] < answer["epsilon_rdp"]
    # A weak guarantee, and no library to compare with.
    monkeypatch.setattr(account_question, "compute_dp_sgd_privacy_lib", None)
    answer, text = ask(**{**SMALL, "delta": 0.01})
    assert "Warning: delta=0.01 exceeds 1/num_examples=0.002" in capsys.readouterr().err
    assert "tensorflow-privacy is not installed" in text
    assert answer["epsilon_tensorflow_privacy_poisson"] is None and answer["is_exact"] is True


def test_bounds_on_attacks_are_printed_rounded_up(ask, tmp_path):
    full = {**SMALL, "batch_size": 500}
    for arguments, steps, remark in [
        ({**full, "rows_per_user": 3}, 60, "All examples of a person together are easier to find"),
        ({**SMALL, "sampling": "shuffle"}, 6, "an empty example is in its place"),
        ({**full, "noise_multiplier": 2.0, "sampling": "shuffle"}, 60, "Absent means"),
    ]:
        answer, text = ask(**arguments)
        mu = math.sqrt(steps) / arguments["noise_multiplier"]
        bounds, right = answer["attack_bounds"], stats.norm.cdf(mu / 2)
        true = stats.norm.cdf(mu + stats.norm.ppf(0.01))
        values = (bounds["right_guesses"], bounds["true_positive_rate"]["0.01"], bounds["mu"])
        assert values == pytest.approx((right, true, mu), abs=1e-4) and remark in text
        printed = re.findall(r"(?:if 1% of[^│]*|right guesses[^│]*)│ ([\d.]+)%", text)
        true, right = (float(number) / 100 for number in printed)
        assert 0 <= true - values[1] < 1e-3 and 0 <= right - values[0] < 1e-3
        assert f"right at most {math.ceil(100 * values[0])} times of 100" in text
    answer, text = ask(**SMALL, sampling="without_replacement")
    assert answer["attack_bounds"] is None and "No bound on attacks is known" in text
    # Two runs together, and one of people.
    leave(tmp_path / "a"), leave(tmp_path / "b", run=2)
    both = Ledger((Entry(4.0, 0.1, 120),)).attack_bounds(1e-5)
    answer, text = ask(workdir=tmp_path)
    assert answer["attack_bounds"]["mu"] == pytest.approx(both.mu, rel=1e-6)
    assert both.sentence("example") in text
    people = Ledger((Entry(4.0, 0.1, 60, run=1, unit="user"),))
    assert "one given person" in ask(workdir=leave(tmp_path / "c", ledger=people))[1]


NO_STEPS = dict(noise_multiplier=1, sampling_probability=0.1, delta=1e-5, accountant="rdp")
REFUSED = [
    ({"epsilon": 3}, "Exactly one of.*Left out: --noise_multiplier, --delta"),
    ({**SMALL, "epsilon": 1}, "Exactly one of --.*Left out: none"),
    ({**SMALL, "epochs": 3}, "--steps=60 --epochs=3.*leave one of them out"),
    ({**SMALL, "sampling_probability": 0.1}, "--batch_size=50.*leave one of them out"),
    ({**SMALL, "plot": "trade.pdf"}, "takes a .png file.*trade.pdf"),
    ({**SMALL, "sampling": "with_replacement"}, "but no accountant for it"),
    ({**SMALL, "workdir": "nowhere"}, "takes --delta only.*--noise_multiplier"),
    ({"workdir": "nowhere"}, "Nothing in nowhere says what was spent"),
    ({"workdir": "nowhere", "compare": "nowhere"}, "Received also: --compare"),
    ({"compare": "nowhere", "epsilon": 3}, "--delta and --plot only. Received also: --epsilon"),
    ({**NO_STEPS, "epsilon": 0.01}, "No `steps` meets the target"),
]


def test_unanswerable_questions_are_refused_by_name(refusal):
    for arguments, message in REFUSED:
        assert re.search(message, refusal(account, **arguments)), (arguments, message)


ORACLES = [
    ({}, "pld", "poisson"),
    ({"sampling": "shuffle"}, "pld", "once_per_epoch"),
    ({"noise_multiplier": 20.0, "batch_size": 500, "steps": 206}, "rdp", "poisson"),
]


@pytest.mark.skipif(
    account_question.compute_dp_sgd_privacy_lib is None, reason="needs tensorflow-privacy"
)
@pytest.mark.parametrize(("arguments", "accountant", "name"), ORACLES)
def test_tensorflow_privacy_agrees_and_stands_beside(run, arguments, accountant, name):
    answer, text = run(account, **{**SMALL, **arguments}, accountant=accountant)
    theirs = answer[f"epsilon_tensorflow_privacy_{name}"]
    assert answer[f"epsilon_{accountant}"] == pytest.approx(theirs, rel=2e-4, abs=6e-4)
    assert re.search(rf"epsilon tensorflow privacy {name.replace('_', ' ')} *│ {theirs:.5g}", text)
    assert f"{theirs:12.3f}\n" in text and "Why these differ" in text


def leave(folder, noise=4.0, steps=60, run=1, data=PHOTOS, **changes):
    """Writes the record of a run to a folder."""
    shuffled = "sampling" in changes
    entry = Entry(noise, 0.1, steps, poisson_sampled=not shuffled, run=run, shuffled=shuffled)
    defaults = dict(program="classify", data=data, ledger=Ledger((entry,)), delta=1e-5)
    folder.mkdir(parents=True, exist_ok=True)
    Record(**{**defaults, **changes}).save(folder / "record.json")
    return folder


def save_model(path, ledger):
    """Saves a `.keras` file as Keras saves a model with a private optimizer."""
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file["optimizer/vars/ledger"] = np.frombuffer(ledger.to_json().encode(), "uint8")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.weights.h5", weights.getvalue())


def test_one_statement_for_a_folder_of_runs_and_ledgers(ask, tmp_path):
    first, copy = leave(tmp_path / "runs" / "a"), tmp_path / "copy"
    second = leave(first / "checkpoint" / "b", noise=6.0, steps=30, run=2)
    shutil.copytree(first, copy)  # It counts once.
    shutil.copy(second / "record.json", copy / "alice.json")
    third, fourth = (Ledger((Entry(20.0, 0.1, 10, run=run),)) for run in (3, 4))
    third.save(copy / "ledger")
    save_model(copy / "tfdpx-checkpoint.zip", fourth)
    answer, text = ask(workdir=[first, copy])
    assert ask(workdir=tmp_path)[0] == answer
    expected = composed((4.0, 60), (6.0, 30), (20.0, 20))
    assert answer["epsilon_pld"] == pytest.approx(expected, rel=2e-3)
    assert (answer["steps"], answer["num_examples"]) == (110, 500)
    assert "adding or removing one example" in text and answer["releasable"] is True


def test_a_shuffled_run_makes_all_neighbours_those_of_shuffling(ask, tmp_path):
    leave(tmp_path / "a", sampling="shuffle")
    leave(tmp_path / "b", run=2)
    answer, text = ask(workdir=tmp_path)
    expected = composed((4.0, 7, 1.0), (4.0, 60), accountant="rdp")
    assert answer["epsilon_rdp"] == pytest.approx(expected, rel=1e-4)
    assert answer["neighbours"] == "zero_out" and not answer["epsilon_is_approximate"]
    assert "emptying the place of one example" in text


def test_the_best_of_several_runs_adds_up(ask, tmp_path):
    tuned = Ledger.selected([Entry(10.0, 0.1, 60), Entry(40.0, 1.0, 1)], 5.0, 1e-5)
    leave(tmp_path / "a")
    leave(tmp_path / "b", ledger=tuned, searched="5 runs")
    answer, text = ask(workdir=tmp_path)
    both = composed((4.0, 60)) + tuned.epsilon(None)
    assert answer["epsilon_pld"] == pytest.approx(both, rel=2e-3) and answer["releasable"] is True
    assert answer["delta"] == pytest.approx(2e-5) and "adds its own epsilon" in text


def test_different_data_or_deltas_do_not_compose_without_a_word(ask, refusal, tmp_path):
    leave(tmp_path / "a")
    leave(tmp_path / "b", run=2, data=DatasetId("folder:photos", 500, "02"))
    assert "different identifiers" in refusal(account, workdir=tmp_path)
    answer, _ = ask(workdir=tmp_path, same_data=True)
    assert answer["epsilon_pld"] == pytest.approx(composed((4.0, 120)), rel=2e-3)
    leave(tmp_path / "b", run=2, data=DatasetId("folder:photos", 499, "01"), delta=1e-6)
    assert "no one delta. Found: 1e-06, 1e-05" in refusal(account, workdir=tmp_path)
    answer, _ = ask(workdir=tmp_path, delta=1e-5)
    assert (answer["delta"], answer["num_examples"]) == (1e-5, [499, 500])


DAMAGED = [
    ("ledger.json", '{"format": "tfdpx.Ledger/8"', "ledger.json.*not a whole ledger"),
    ("record.json", "{}", "no whole record"),
    ("m.keras", "weights", "Cannot read"),
    *(
        (name, text, f"{name} is neither .* for people: give record.json or model.keras of its run")
        for name, text in {"report.html": "<html>", "table.csv": "a,b", "card.md": "---"}.items()
    ),
    ("missing/notes.txt", None, "Nothing in .*notes.txt says what was spent"),
    ("run", None, "not finished.*finish it with --resume"),
]


def test_files_that_do_not_say_what_was_spent(refusal, tmp_path):
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    for name, text, message in DAMAGED:
        if text is not None:
            (tmp_path / name).write_text(text)
        assert re.search(message, refusal(account, workdir=tmp_path / name)), name


def test_the_model_of_another_run_is_refused(finished_runs, ask, refusal, tmp_path):
    run = finished_runs("private").workdir
    mixed = shutil.copytree(run, tmp_path / "mixed")
    assert ask(workdir=mixed)[0]["epsilon"] == ask(workdir=run / "model.keras")[0]["epsilon"]
    leave(mixed)
    message = f"{mixed / 'model.keras'} and {mixed / 'record.json'} are not of one run"
    assert message in refusal(account, workdir=mixed)
    assert message in refusal(account, compare=mixed)


def test_a_model_that_was_trained_on_and_saved_in_place(ask, refusal, tmp_path):
    leave(tmp_path)
    ledger, more = Ledger((Entry(4.0, 0.1, 60, run=1),)), Ledger((Entry(1.0, 0.1, 30, run=2),))
    save_model(tmp_path / "model.keras", ledger + more)
    both = pytest.approx(composed((4.0, 60), (1.0, 30)), rel=2e-3)
    assert ask(workdir=tmp_path)[0]["epsilon"] == both
    assert both in [run["epsilon"] for run in ask(compare=tmp_path)[0]["runs"]]
    # Keras loaded the file without its optimizer, so the ledger is lost and begins at zero.
    save_model(tmp_path / "model.keras", Ledger(more.entries, is_complete=False))
    assert "does not hold what the record says was spent" in refusal(account, workdir=tmp_path)
    answer, text = ask(workdir=[tmp_path / "record.json", tmp_path / "model.keras"])
    assert answer["epsilon"] == both and answer["epsilon_is_lower_bound"] is True
    assert "All together are" not in text and "No differential privacy can be stated" in text
    assert answer["releasable"] is False and "Not releasable: a part of what" in text


def test_runs_are_compared(ask, refusal, tmp_path):
    small = {"settings": {"model": "lenet", "steps": 60}, "results": {"test_accuracy": 0.5}}
    large = {"settings": {"model": "wrn", "steps": 60}, "results": {"test_accuracy": 0.75}}
    first = leave(tmp_path / "a", **small)
    second = leave(tmp_path / "b", noise=6.0, run=2, **large)
    answer, text = ask(compare=[first, second / "record.json"])
    assert answer["differing"] == ["model"] and "lenet" in text and "wrn" in text
    assert [run["name"] for run in answer["runs"]] == ["a", "b"]
    assert [run["settings"] for run in answer["runs"]] == [{"model": "lenet"}, {"model": "wrn"}]
    assert [run["accuracy"] for run in answer["runs"]] == [0.5, 0.75]
    epsilons = [run["epsilon"] for run in answer["runs"]]
    assert epsilons == pytest.approx([composed((4.0, 60)), composed((6.0, 60))], rel=2e-3)
    # The folder around them gives the same; then at another delta.
    assert ask(compare=tmp_path)[0] == answer
    tighter, _ = ask(compare=tmp_path, delta=1e-7)
    assert tighter["runs"][0]["epsilon"] > epsilons[0] and tighter["runs"][1]["delta"] == 1e-7

    # A picture, with a run that is not private, one of the same name, and two without an accuracy.
    leave(tmp_path / "$c$", noise=0.0, delta=None, run=3, results={"test_accuracy": 0.9})
    lacking = leave(tmp_path / "d" / "a", run=4), leave(tmp_path / "e", run=5)
    with mock.patch.object(pictures, "attack_curve", wraps=pictures.attack_curve) as drawn:
        answer, text = ask(compare=tmp_path, plot=tmp_path / "new" / "runs.png")
    with_accuracy = [run["name"] for run in answer["runs"] if run["accuracy"] is not None]
    assert list(drawn.call_args.args[0]) == with_accuracy
    assert "d/a" in [run["name"] for run in answer["runs"]]
    assert "Runs without an accuracy are left out of the picture: 2." in text
    with Image.open(tmp_path / "new" / "runs.png") as picture:
        assert picture.format == "PNG" and len(picture.convert("RGB").getcolors(1 << 20)) > 10
    assert "no run has recorded one" in refusal(account, compare=list(lacking), plot="runs.png")
    assert "two runs at least" in refusal(account, compare=[lacking[0], lacking[0]])
