"""A run on a table from end to end, predictions, and refusals."""

import csv
import re
import zipfile

import keras
import numpy as np
import own_tables
import pyarrow as pa
import pytest
from pyarrow import parquet
from sklearn import metrics

from tfdpx.accounting import record as records
from tfdpx.train import classify, predict, run
from tfdpx.train.data import tables as data_tables
from tfdpx.train.errors import UserError
from tfdpx.train.settings import resolve


@pytest.fixture(scope="module")
def workdir(finished_runs):
    """The folder of a finished run on a table."""
    return finished_runs("table").workdir


def write_predictions(run, path, **settings):
    run(predict, csv=path, **settings)
    return list(csv.DictReader(path.open(encoding="utf-8")))


def test_a_run_learns_and_accounts_for_its_preprocessing(workdir):
    record = records.read(workdir / "record.json")
    assert record == records.read(workdir / "model.keras")
    assert record.results["test_accuracy"] > 0.85
    # Ranges; narrower bounds; moments; city; labels.
    assert record.results["releases"] == 5
    assert record.ledger.steps == record.results["steps"] + 5
    assert record.epsilon == pytest.approx(8.0, rel=1e-3) and record.epsilon <= 8.0
    assert record.is_releasable and record.unit == "row"
    statement = (workdir / "privacy_statement.txt").read_text()
    assert f"{record.data.num_examples:,} rows" in statement
    assert (workdir / "confusion_matrix.png").exists() and (workdir / "report.html").exists()


def test_no_private_value_is_in_the_files(workdir):
    record = (workdir / "record.json").read_text()
    for private in (own_tables.RARE, "Old", "Bonn", str(workdir.parent)):
        assert private not in record
    with zipfile.ZipFile(workdir / "model.keras") as archive:
        assert "DPSGD" not in archive.read("config.json").decode()
    layers = (
        keras.saving.load_model(workdir / "model.keras").get_layer("tfdpx.preprocessing").layers
    )
    [lookup] = [layer for layer in layers if isinstance(layer, keras.layers.StringLookup)]
    assert set(lookup.get_vocabulary(False)) == {'Old "Town"', "Bonn, West", "(missing)"}
    # One row of 1e30 moved no mean out of the range of all others.
    normalizations = [x for x in layers if isinstance(x, keras.layers.Normalization)]
    assert all(np.all(np.abs(layer.adapt_mean) < 2e4) for layer in normalizations)


def test_new_rows_are_predicted_whatever_they_hold(workdir, run, refusal, tmp_path):
    rows, path = tmp_path / "new.csv", tmp_path / "out.csv"
    rows.write_text(
        "unused;city;owns;constant;income/month;age in years\n1;Bonn, West;true;;-inf;79\n"
        "2;never seen;;7;1e308;1e308\n3;;false;1e308;;\n"
    )
    lines = write_predictions(run, path, model=workdir, rows=rows, all_classes=True)
    assert lines[0]["bought"] == "yes" and len(lines) == 3
    for line in lines:
        assert float(line["yes"]) + float(line["no"]) == pytest.approx(1, abs=1e-5)
    shares = [float(line["yes"]) for line in lines]
    lines = write_predictions(run, path, model=workdir, rows=rows)
    assert list(lines[0]) == ["bought", "probability"]
    threshold = np.mean(sorted(shares)[:2])
    lines = write_predictions(run, path, model=workdir, rows=rows, threshold=threshold)
    expected = [("yes", share) if share > threshold else ("no", 1 - share) for share in shares]
    assert [line["bought"] for line in lines] == [name for name, _ in expected]
    probabilities = [float(line["probability"]) for line in lines]
    np.testing.assert_allclose(probabilities, [share for _, share in expected], atol=1e-5)
    rows.write_text("city\nx\n")
    assert "no column 'age in years'" in refusal(predict, model=workdir, rows=rows)


@pytest.mark.slow
def test_a_regression_of_a_parquet_file(run, tmp_path):
    x = np.random.default_rng(0).uniform(-1, 1, size=(2000, 2))
    # Columns with names that Keras gives to layers.
    table = {"normalization": x[:, 0], "clip": x[:, 1].astype("float32"), "y": 30 * x[:, 0] + 100}
    path = tmp_path / "numbers.parquet"
    parquet.write_table(pa.table(table), path)
    limits = dict(target_lower=50.0, target_upper=150.0, bounds=["*:-1:1"])
    settings = dict(target="y", epsilon=8.0, workdir=tmp_path / "run", **limits)
    report, _ = run(classify, dataset=f"parquet:{path}", **settings)
    assert report["test_r2"] > 0.9 and report["releases"] == 2  # The ranges are public.
    lines = write_predictions(run, tmp_path / "out.csv", model=tmp_path / "run", rows=path)
    errors = np.array([float(line["y"]) for line in lines]) - table["y"]
    assert np.mean(errors**2) < 6**2


GOOD = {"x": [1.5, 2.5] * 20, "t": ["a", "b"] * 20}
REFUSALS = [
    (GOOD, dict(target="T"), "no column 'T'.*Columns are: x, t"),
    (GOOD, dict(target=None), "--target=COLUMN"),
    (GOOD, dict(model="wrn_16_4"), "`model` must be one of .*linear.*network"),
    (GOOD, dict(drop=["x"]), "nothing to learn from"),
    (GOOD, dict(classes=["a", "c"]), "--classes must be all of them"),
    (GOOD, dict(target="x"), "numbers with fractions.*--target_lower"),
    (GOOD, dict(target_lower=0.0, target_upper=1.0), "for a target of numbers"),
    (GOOD, dict(bounds=["x:2:1"]), "lower < upper"),
    (GOOD, dict(bounds=["x:0:nan"]), "COLUMN:LOWER:UPPER, with two numbers"),
    (GOOD, dict(bounds=["z:0:1"]), "no column 'z'"),
    (GOOD, dict(epsilon=1.0), "too few to find the ranges.* rows, or epsilon=.*--bounds=x"),
    (GOOD, dict(augmult=4), "--augmult belongs to images"),
    (GOOD | {"day": ["31/12/2024", "1/2/2025"] * 20}, {}, "'day' holds dates.*--drop=day"),
    (GOOD | {"id": [f"p{i}" for i in range(40)]}, {}, "'id' names the rows.*--drop=id"),
    (GOOD | {"id": list(range(100, 140))}, {}, "'id' numbers the rows.*--bounds=id:"),
    (GOOD | {"tfdpx.head": [1.5] * 40}, {}, "'tfdpx.head' needs another name"),
    (GOOD | {"a/b": [1] * 40, "a_b": [1] * 40}, {}, "'/' becomes '_'"),
    (GOOD | {"none": [""] * 40}, {}, "'none' is empty.*--drop=none"),
    (GOOD | {"": [1] * 40}, {}, "a different name"),
    (
        GOOD | {"none": [""] * 40, "id": list(range(40))},
        dict(bounds=["t:0:1"]),
        "'t'.*'none' is empty.*'id' numbers the rows.*all of them: --drop=none,id",
    ),
    (GOOD | {"id": ["a", ""] * 20}, dict(user="id"), "Some rows have no name"),
    (
        GOOD | {"id": ["p1", "P1"] * 20},
        dict(user="id"),
        "only in spaces or in upper and lower case",
    ),
    ({n: v[:1] for n, v in GOOD.items()}, {}, "two to 100 labels"),
    (GOOD | {"t": ["a", ""] * 20}, {}, "no value in the column --target=t"),
    (GOOD | {"owns": ["true"] * 40}, dict(bounds=["owns:0:1"]), "--bounds is for columns of num"),
    (GOOD, dict(dataset="csv:nowhere.csv"), "Cannot read --dataset=csv:nowhere.csv: .*No such"),
    (GOOD, dict(dataset="parquet:bad.csv"), "parquet:PATH if it ends in .parquet"),
]


def test_a_refusal_is_one_line_and_leaves_no_folder(tmp_path, refusal):
    path = tmp_path / "bad.csv"
    for columns, settings, words in REFUSALS:
        own_tables.write(path, columns)
        settings = dict(dataset=f"csv:{path}", target="t", workdir=tmp_path / "run") | settings
        assert re.search(words, refusal(classify, **settings)), words
        assert not (tmp_path / "run").exists()
    path.write_text("a,a,t\n1,2,x\n3,4,y\n")
    assert "'a', double" in refusal(classify, dataset=f"csv:{path}", target="t")
    path.write_text("köln,t\n1,x\n2,y\n", encoding="latin-1")
    assert "Cannot read" in refusal(classify, dataset=f"csv:{path}", target="t")


def test_errors_quote_no_value(tmp_path, workdir, refusal):
    """Tries rows of another length, and values of another kind."""
    columns = {name: [own_tables.RARE] for name in own_tables.people(9)}
    parquet.write_table(pa.table(columns), tmp_path / "bad.parquet")
    text = refusal(predict, model=workdir, rows=tmp_path / "bad.parquet")
    assert re.search("'age in years' .* is not of number values", text)
    text += refusal(predict, model=workdir, rows=own_tables.write(tmp_path / "bad.csv", columns))
    assert "Cannot read --rows" in text
    (tmp_path / "bad.csv").write_text(f"x,t\n1,a\n2,b,{own_tables.RARE}\n")
    text += refusal(classify, dataset=f"csv:{tmp_path / 'bad.csv'}", target="t")
    assert "Row #3: Expected 2 columns, got 3" in text and own_tables.RARE not in text


def load(path, columns, **settings):
    own_tables.write(path, columns)
    return data_tables.load(resolve(None, dict(dataset=f"csv:{path}", target="t", **settings)))


def rows_of(path, columns, **settings):
    table = load(path, columns, **settings)
    return set(table.train.columns["x"]), set(table.test.columns["x"])


def test_a_row_moves_no_other(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "t.csv"
    columns = {"x": rng.normal(size=200), "t": rng.choice(["b", "c"], 200)}
    train, test = rows_of(path, columns)
    assert 20 <= len(test) <= 60 and len(train) + len(test) == 200
    fewer = rows_of(path, {name: values[1:] for name, values in columns.items()})
    assert fewer[0] <= train and fewer[1] <= test
    # One row with a new label, which sorts before the others.
    more = rows_of(path, {"x": [*columns["x"], 5.0], "t": [*columns["t"], "a"]})
    assert train <= more[0] and test <= more[1]
    assert rows_of(path, columns, test_seed=1)[1] != test
    assert 40 <= len(load(path, {"x": [1, 2] * 200, "t": ["a", "b"] * 200}).test) <= 120


def test_a_person_moves_no_other(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "t.csv"
    people = rng.integers(0, 40, 200)
    columns = {"id": people, "x": rng.normal(size=200), "t": rng.choice(["b", "c"], 200)}

    def sides(left_out=None):
        remaining = {name: values[people != left_out] for name, values in columns.items()}
        table = load(path, remaining, user="id", test_fraction=0.5)
        assert table.train.num_protected == len(set(table.train.people)) > 1
        return *(set(rows.columns["x"]) for rows in (table.train, table.test)), table

    train, test, table = sides()
    assert set(table.kinds) == {"x"} and len(train) + len(test) == 200
    for person in (2, 3, 5, 7):
        owned = set(columns["x"][people == person])
        assert owned <= train or owned <= test
        fewer = sides(person)
        assert (fewer[0], fewer[1]) == (train - owned, test - owned)


def test_a_column_of_people_is_asked_about(tmp_path):
    columns = {"customerID": np.arange(40) // 2, "valid": np.arange(40) % 3 + 0.5, **GOOD}
    with pytest.raises(UserError, match="20 values in 40 rows.* add --user=customerID. If .*=none"):
        load(tmp_path / "t.csv", columns)
    for settings in ({"user": "customerID"}, {"drop": ["customerID"]}, {"user": "none"}):
        is_used = settings.get("user") == "none"
        assert ("customerID" in load(tmp_path / "t.csv", columns, **settings).kinds) == is_used


@pytest.mark.slow
def test_a_run_protects_people(run, tmp_path):
    columns = own_tables.people(2_000) | {"owner": [i // 4 for i in range(2_000)]}
    path = own_tables.write(tmp_path / "t.csv", columns)
    report, _ = run(
        classify, dataset=f"csv:{path}", target="bought", user="owner", epsilon=8.0, steps=3,
        bounds=["*:0:100"], workdir=tmp_path / "run",
    )  # fmt: skip
    assert report["neighbours"] == "add_or_remove_user" and report["epsilon"] <= 8
    assert 350 <= report["num_examples"] <= 450
    text = " ".join((tmp_path / "run" / "privacy_statement.txt").read_text().split())
    assert "all rows of one person" in text


def test_whole_numbers_are_categories_on_demand(tmp_path):
    columns = {"zip": ["01234", "99999"] * 20, "t": [0, 10] * 20}
    table = load(tmp_path / "t.csv", columns)
    assert table.kinds == {"zip": "number"} and table.class_names == ("0", "10")
    table = load(tmp_path / "t.csv", columns, categorical=["zip"])
    assert set(table.train.columns["zip"]) == {"01234", "99999"}


def test_the_order_of_the_flag_chooses_no_positive_class(tmp_path):
    columns = {"x": [1.5, 2.5] * 20, "t": ["yes", "no"] * 20}
    for classes in (["yes", "no"], ["no", "yes"], None):
        table = load(tmp_path / "t.csv", columns, classes=classes)
        assert table.class_names == ("no", "yes")
    table = load(tmp_path / "t.csv", columns | {"t": [9, 10] * 20}, classes=["10", "9"])
    assert table.class_names == ("9", "10")


def test_a_clip_reaches_the_estimator(tmp_path):
    settings = dict(epsilon=8.0, steps=2, bounds=["*:-4:4"])
    table = load(tmp_path / "t.csv", {"x": [1.5, 2.5] * 20, "t": ["a", "b"] * 20}, **settings)
    for clip in (2.0, "automatic"):
        asked = dict(dataset="csv:x", target="t", l2_norm_clip=clip, **settings)
        assert run.fit_table(table, resolve(None, asked)).training_.l2_norm_clip == clip


@pytest.mark.slow
def test_a_rare_label_has_its_probability():
    """Automatic clipping would bring all probabilities near 0."""
    rng = np.random.default_rng(0)
    columns = {f"number {i}": rng.normal(size=20_000) for i in range(8)}
    score = 1.5 * sum(columns.values()) / 8**0.5 + rng.logistic(size=20_000)
    rows = data_tables.Rows(columns, (score > np.quantile(score, 0.97)).astype("int64"))
    table = data_tables.Table(dict.fromkeys(columns, "number"), ("no", "yes"), rows, rows)
    asked = dict(dataset="csv:x", target="t", epsilon=3.0, bounds=["*:-40:40"])
    estimator = run.fit_table(table, resolve(None, asked))
    yes = estimator.predict_proba(columns)[:, 1]
    assert np.mean(yes) == pytest.approx(0.03, rel=0.2)
    assert metrics.roc_auc_score(rows.target, yes) > 0.82
