"""Tuning within a budget: the best run, its privacy loss, and refusals."""

import keras
import own_images
import pytest

from tfdpx.accounting import record as records
from tfdpx.accounting import selection
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.train import classify, sweep

GIVEN = dict(private_tuning=5.0, model="small_cnn", steps=3, batch_size=64, epsilon=2.0)
GIVEN |= dict(grid="learning_rate=1,2", dataset="digits")


@pytest.fixture
def made_up(monkeypatch):
    """Replaces four runs by ones that train nothing; a list receives their settings."""
    right, chosen, entries, unknown = iter(10 * [500, 1400, 900, 1000]), [], [], []

    def execute(runs, folder, shared, lock):
        del shared, lock
        chosen.append(runs[0].chosen)
        folder = folder / "runs" / runs[0].name
        folder.mkdir(parents=True)
        keras.Sequential([keras.Input([2]), keras.layers.Dense(1)]).save(folder / "model.keras")
        noise_multiplier, number = runs[0].chosen["noise_multiplier"], len(chosen)
        entry = Entry(noise_multiplier, 64 / 1437, 3, run=number)
        ledger = Ledger((entry, *entries), is_complete=not unknown)
        results = {"run": number, "model": "small_cnn", "steps": 3}
        record = Record(
            "classify", DatasetId("sklearn_digits", 1437), ledger, 1e-5, results=results
        )
        record.save(folder / "model.keras")
        record.save(folder / "record.json")
        for name in ("log.txt", "curve.jsonl", "learning_curve.png"):
            (folder / name).write_text("epsilon of a run")
        (folder / "tensorboard").mkdir()
        return {}

    monkeypatch.setattr(sweep, "execute", execute)
    monkeypatch.setattr(sweep, "_count_right", lambda folder, settings: next(right))
    monkeypatch.setattr(selection, "draw_runs", lambda mean: 4)
    return chosen, entries, unknown


@pytest.mark.slow
def test_the_best_of_all_runs_is_kept_alone_and_pays_for_all(run, refusal, tmp_path, made_up):
    report, _ = run(sweep, workdir=tmp_path, **GIVEN)
    assert report["run"] == 2  # 400 images ahead; the noise is about 30.
    assert 0 < abs(1437 * report["noisy_train_accuracy"] - 1400) < 300
    [best] = tmp_path.iterdir()
    texts = ["model_card.md", "privacy_statement.txt", "report.html"]
    files = {"attack.png", "model.keras", "record.json", *texts}
    assert {path.name for path in best.iterdir()} == files
    for name in texts:
        text = " ".join((best / name).read_text().split())
        assert "differential privacy" in text and "5 on average" in text
    assert not {"runs", "number_of_runs", "epsilon_of_a_run"} & set(report)
    # All runs have the same noise, and epsilon follows from the ledger of the best run.
    chosen, entries, unknown = made_up
    [sigma] = {settings["noise_multiplier"] for settings in chosen}
    assert {settings["learning_rate"] for settings in chosen} <= {1.0, 2.0}
    assert all("epsilon" not in settings for settings in chosen)
    for name in ("record.json", "model.keras"):
        record = records.read(best / name)
        [(updates, score)] = record.ledger.selections
        assert (updates.noise_multiplier, updates.steps) == (sigma, 3)
        epsilon = selection.selection_epsilon([updates, score], 1e-5, 5.0)
        assert 1.99 < epsilon == record.epsilon == report["epsilon"] <= 2.0
    assert "holds a tuned run" in refusal(sweep, workdir=tmp_path, **GIVEN)

    # A run with any other or an unknown privacy loss stops the search.
    for other, value in ((entries, Entry(sigma, 64 / 1437, 1, run=99)), (unknown, True)):
        other.append(value)
        assert "not trained as planned" in refusal(sweep, workdir=tmp_path / "more", **GIVEN)
        assert not (tmp_path / "more").exists()
        other.clear()


SHARED = ["batch_size=4,8", "steps=3,4", "epsilon=1,2", "delta=1e-5,1e-4", "accountant=rdp,pld"]
SHARED += ["test_fraction=0.2,0.9", "test_seed=0,1", "skip_broken=0,1"]
REFUSED = [
    *((dict(grid=text), f"all runs share {text.partition('=')[0]}") for text in SHARED),
    (dict(grid="validation=0,0.25"), "--validation=0.25"),
    (dict(grid="individual=false,true"), "--individual=True"),
    (dict(sampling="shuffle"), "--sampling=shuffle"),
    (dict(private=False, epsilon=None), "--private=False"),
    (dict(noise_multiplier=1.0, steps=None), "--noise_multiplier=1.0"),
    (dict(seed=3), "--seed=3"),
    *((more, "exclude each other") for more in (dict(seeds=[0]), dict(jobs=2))),
]


@pytest.mark.slow
def test_other_images_and_releases_are_refused_by_name(refusal, tmp_path):
    images = tmp_path / "images"
    own_images.write(images, {3: 6, 5: 6}, size=8)
    for arguments, message in REFUSED:
        swept = arguments.get("grid", "").partition("=")[0]
        settings = {
            **GIVEN,
            "dataset": f"folder:{images}",
            "batch_size": 8,
            swept: None,
            **arguments,
        }
        settings.pop("", None)
        line = refusal(sweep, workdir=tmp_path / "tuned", **settings)
        assert message in line, (arguments, line)
        assert not (tmp_path / "tuned").exists()


@pytest.mark.nightly
def test_the_program_tunes_the_digits(tmp_path, run, monkeypatch):
    monkeypatch.setattr(selection, "draw_runs", lambda mean: 1)  # Takes always the same time.
    arguments = dict(private_tuning=1.5, grid="learning_rate=10,20", workdir=tmp_path / "tuned")
    record, _ = run(sweep, epsilon=4.0, **arguments)
    assert 3.9 < record["epsilon"] <= 4.0
    assert record["test_accuracy"] > 0.9 and record["noisy_train_accuracy"] > 0.8
    assert (tmp_path / "tuned/best/model.keras").exists()
    assert not (tmp_path / "tuned/best/log.txt").exists()

    # A run that starts from the best run pays for all runs.
    arguments = dict(init_from=str(tmp_path / "tuned/best"))
    on, _ = run(classify, workdir=tmp_path / "on", steps=3, epsilon=1.0, **arguments)
    assert 4.9 < on["epsilon"] <= 5.0
