"""What a user of tables sees: a run from end to end, predictions, and what is refused."""

import csv
import dataclasses
import json
import re
import subprocess
import sys
import zipfile

import keras
import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", exc_type=ImportError)
from pyarrow import parquet  # noqa: E402

from tfdpx.accounting import record as records  # noqa: E402
from tfdpx.accounting.ledger import Ledger  # noqa: E402
from tfdpx.train import classify, predict, tables  # noqa: E402
from tfdpx.train.config.table_settings import TableSettings  # noqa: E402
from tfdpx.train.data import tables as data_tables  # noqa: E402
from tfdpx.train.errors import UserError  # noqa: E402

RARE = "Zwischenwasser"  # In one row alone.


def people(rows=1500):
    """Columns of a table: names with a space and a slash, quotes, missing and absurd values."""
    rng = np.random.default_rng(0)
    age, city = rng.integers(18, 80, rows), rng.choice(['Old "Town"', "Bonn, West"], rows)
    bought = (age + 30 * (city == "Bonn, West") + rng.normal(size=rows) > 64).tolist()
    ages = age.astype(str)
    ages[:4] = "", "1e30", "inf", "NaN"
    city = city.astype(object)
    city[5], city[6:200] = RARE, ""
    income = np.exp(rng.normal(8, 1, rows))
    owns = rng.choice(["true", "false", ""], rows)
    found = {"age in years": ages, "city": city, "income/month": income, "owns": owns}
    return {**found, "constant": [7] * rows, "bought": ["yes" if b else "no" for b in bought]}


def write(path, found, encoding="utf-8", delimiter=","):
    with open(path, "w", newline="", encoding=encoding) as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(found)
        writer.writerows(zip(*found.values(), strict=True))
    return path


def predicted(run, model, rows, path, **given):
    run(predict, model=model, rows=rows, csv=path, **given)
    return list(csv.DictReader(path.open(encoding="utf-8")))


@pytest.fixture(scope="module")
def finished(run, tmp_path_factory):
    """A folder with a table, and a finished run on it."""
    folder = tmp_path_factory.mktemp("table")
    path = write(folder / "people.csv", people(), encoding="utf-8-sig")
    given = dict(target="bought", epsilon=8.0, model="linear", bounds=["income/month:0:20000"])
    run(classify, dataset=f"csv:{path}", workdir=folder / "run", **given)
    return folder


def test_a_run_learns_and_accounts_for_its_preprocessing(finished):
    record = records.read(finished / "run" / "record.json")
    assert record == records.read(finished / "run" / "model.keras")
    assert record.results["test_accuracy"] > 0.85
    assert record.results["releases"] == 4  # Ranges and moments; moments by bounds; city.
    assert record.ledger.steps == record.results["steps"] + 4
    assert record.epsilon == pytest.approx(8.0, rel=1e-3) and record.epsilon <= 8.0
    assert record.is_releasable and record.unit == "row"
    statement = (finished / "run" / "privacy_statement.txt").read_text()
    assert f"{record.data.num_examples:,} rows" in statement
    assert (finished / "run" / "confusion_matrix.png").exists()


def test_nothing_private_is_in_what_is_left(finished):
    record = (finished / "run" / "record.json").read_text()
    for private in (RARE, "Old", "Bonn", str(finished)):
        assert private not in record
    with zipfile.ZipFile(finished / "run" / "model.keras") as archive:
        assert "DPSGD" not in archive.read("config.json").decode()
    model = keras.saving.load_model(finished / "run" / "model.keras")
    layers = model.get_layer("tfdpx.preprocessing").layers
    lookup = next(layer for layer in layers if isinstance(layer, keras.layers.StringLookup))
    assert set(lookup.get_vocabulary(False)) == {'Old "Town"', "Bonn, West", "(missing)"}
    normal = [layer for layer in layers if isinstance(layer, keras.layers.Normalization)]
    # One row of 1e30 moved nothing out of the range of all others.
    assert all(np.all(np.abs(layer.adapt_mean) < 2e4) for layer in normal)


def test_new_rows_are_predicted_whatever_they_hold(finished, run, refusal, tmp_path):
    rows = write(
        tmp_path / "new.csv",
        {
            "unused": [1, 2, 3],
            "city": ["Bonn, West", "never seen", ""],
            "owns": ["true", "", "false"],
            "constant": ["", 7, 1e308],
            "income/month": ["-inf", "1e308", ""],
            "age in years": [79, "1e308", ""],
        },
        delimiter=";",
    )
    asked = finished / "run", rows, tmp_path / "out.csv"
    found = predicted(run, *asked, all_classes=True)
    assert [row["bought"] for row in found][0] == "yes" and len(found) == 3
    for row in found:
        assert float(row["yes"]) + float(row["no"]) == pytest.approx(1, abs=1e-5)
    write(tmp_path / "few.csv", {"city": ["x"]})
    said = refusal(predict, model=finished / "run", rows=tmp_path / "few.csv")
    assert "no column 'age in years'" in said


@pytest.mark.slow
def test_the_program_predicts(finished, tmp_path):
    """In a process of its own: flags of other programs must not come with it."""
    given = [f"--model={finished / 'run'}", f"--rows={finished / 'people.csv'}"]
    command = [sys.executable, "-m", "tfdpx.train.predict", *given]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1])["rows"] == 1500, done.stderr
    assert (tmp_path / "predictions.csv").read_text().startswith("bought,probability\n")


@pytest.mark.slow
def test_a_regression_of_a_parquet_file(run, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(2000, 2))
    # Columns that are called as Keras calls layers.
    table = {"normalization": x[:, 0], "clip": x[:, 1].astype("float32"), "y": 30 * x[:, 0] + 100}
    path = tmp_path / "numbers.parquet"
    parquet.write_table(pa.table(table), path)
    given = dict(target="y", task="regression", target_lower=50.0, target_upper=150.0, epsilon=8.0)
    given |= dict(dataset=f"parquet:{path}", bounds=["*:-1:1"], workdir=tmp_path / "run")
    found, _ = run(classify, **given)
    assert found["test_r2"] > 0.9 and found["releases"] == 1  # The bounds say the ranges.
    rows = predicted(run, tmp_path / "run", path, tmp_path / "out.csv")
    errors = np.array([float(row["y"]) for row in rows]) - table["y"]
    assert np.sqrt(np.mean(errors**2)) < 6


NOT_UTF8 = {"köln": [1, 2] * 20, "t": ["a", "b"] * 20}
GOOD = {"x": [1.5, 2.5] * 20, "t": ["a", "b"] * 20}


BAD_INPUT = [
    (GOOD, dict(target="T"), "no column 'T'.*Columns are: x, t"),
    (GOOD, dict(target=None), "--target=COLUMN"),
    (GOOD, dict(drop=["x"]), "nothing to learn from"),
    (GOOD, dict(classes=["a", "c"]), "all of them in --classes"),
    (GOOD, dict(target="x"), "--task=regression"),
    (GOOD, dict(task="regression"), "--target_lower"),
    (GOOD, dict(target_lower=0.0), "does not belong"),
    (GOOD, dict(bounds=["x:2:1"]), "COLUMN:LOWER:UPPER"),
    (GOOD, dict(bounds=["z:0:1"]), "no column 'z'"),
    (GOOD, dict(epsilon=1.0), "too few to find the ranges.*--bounds=x"),
    (GOOD, dict(augmult=4), "--augmult belongs to images"),
    (GOOD, dict(resume=True), "--resume belongs to images"),
    (GOOD | {"day": ["2024-01-02"] * 40}, {}, "'day' is of type date.*--drop=day"),
    (GOOD | {"id": [f"p{i}" for i in range(40)]}, {}, "'id' names the rows.*--drop=id"),
    (GOOD | {"id": list(range(100, 140))}, {}, "'id' numbers the rows.*--bounds=id:"),
    (GOOD | {"day": ["31/12/2024", "1/2/2025"] * 20}, {}, "'day' is of dates.*--drop=day"),
    (GOOD | {"tfdpx.head": [1.5] * 40}, {}, "'tfdpx.head' needs another name"),
    (GOOD | {"none": [""] * 40}, {}, "'none' is empty.*--drop=none"),
    (GOOD | {"": [1] * 40}, {}, "name of its own"),
    (GOOD | {"a/b": [1] * 40, "a_b": [1] * 40}, {}, "'/' becomes '_'"),
    ({n: v[:1] for n, v in GOOD.items()}, {}, "two to 100 labels"),
    ({n: [] for n in GOOD}, {}, "no row"),
    ({**GOOD, "t": ["a", ""] * 20}, {}, "no value in the column --target=t"),
    (NOT_UTF8, {}, "Cannot read"),
]


def test_bad_input_is_one_line(tmp_path, refusal):
    for found, given, words in BAD_INPUT:
        encoding = "latin-1" if found is NOT_UTF8 else "utf-8"
        path = write(tmp_path / "bad.csv", found, encoding=encoding)
        given = {"target": "t", "workdir": tmp_path / "run", **given}
        assert re.search(words, refusal(classify, dataset=f"csv:{path}", **given)), words
        assert not (tmp_path / "run").exists()
    path.write_text("a,a,t\n1,2,x\n3,4,y\n")
    assert "'a', double" in refusal(classify, dataset=f"csv:{path}", target="t")


def test_errors_quote_no_value(tmp_path, finished, refusal):
    """Of a row of another length, and of a value of another kind."""
    path = tmp_path / "bad.csv"
    path.write_text(f"x,t\n1,a\n2,b,{RARE}\n")
    said = [refusal(classify, dataset=f"csv:{path}", target="t")]
    assert "Row #3: Expected 2 columns, got 3" in said[0]
    write(path, {**{name: values[:1] for name, values in people(9).items()}, "owns": [RARE]})
    said.append(refusal(predict, model=finished / "run", rows=path))
    assert "Cannot read --rows" in said[1]
    parquet.write_table(pa.table({"x": [RARE, "1"]}), tmp_path / "bad.parquet")
    with pytest.raises(UserError, match="'x' .* is not of number values") as error:
        data_tables.read(tmp_path / "bad.parquet", {"x": "number"})
    assert not any(RARE in text for text in (*said, str(error.value)))


def loaded(path, **given):
    return data_tables.load(TableSettings(dataset=f"csv:{path}", target="t", **given))


def test_a_row_less_moves_no_other(tmp_path):
    rng = np.random.default_rng(0)
    found = {"x": rng.normal(size=200), "t": rng.choice(["a", "b"], 200)}
    all_rows = loaded(write(tmp_path / "all.csv", found))
    fewer = loaded(write(tmp_path / "fewer.csv", {n: v[1:] for n, v in found.items()}))
    assert len(all_rows.train) + len(all_rows.test) == 200
    for split in ("train", "test"):
        more, less = (set(getattr(t, split).columns["x"]) for t in (all_rows, fewer))
        assert less <= more and len(more - less) <= 1
    assert 20 <= len(all_rows.test) <= 60
    alike = loaded(write(tmp_path / "alike.csv", {"x": [1, 2] * 200, "t": ["a", "b"] * 200}))
    assert 40 <= len(alike.test) <= 120
    other = loaded(tmp_path / "all.csv", test_seed=1)
    assert set(other.test.columns["x"]) != set(all_rows.test.columns["x"])


def test_whole_numbers_are_categories_on_demand(tmp_path):
    path = write(tmp_path / "t.csv", {"zip": ["01234", "99999"] * 20, "t": [0, 10] * 20})
    table = loaded(path)
    assert table.kinds == {"zip": "number"} and table.class_names == ("0", "10")
    table = loaded(path, categorical=["zip"])
    assert set(table.train.columns["zip"]) == {"01234", "99999"}


def test_bounds_alone_cost_nothing_where_rows_are_few():
    columns = {f"c{i}": np.linspace(0, 1, 140) for i in range(13)}
    kinds = dict.fromkeys(columns, "number")
    layers, spent = tables.adapt(columns, kinds, {"*": (0.0, 1.0)}, 1.0, 1e-5)
    assert not spent.entries and layers.output_shape == (None, 13)


def test_the_share_of_the_preprocessing():
    """A tenth of the squared mu of the budget, by Gaussian differential privacy."""
    rng = np.random.default_rng(0)
    columns = {"a": rng.normal(size=10_000), "b": rng.choice(["x", "y"], 10_000)}
    _, spent = tables.adapt(columns, {"a": "number", "b": "category"}, {}, 3.0, 1e-5)
    squared_mu = sum(entry.steps / entry.noise_multiplier**2 for entry in spent.entries)
    noise = (10 * squared_mu) ** -0.5
    alone = dataclasses.replace(spent.entries[0], noise_multiplier=noise, steps=1)
    assert type(spent)((alone,)).epsilon(1e-5) == pytest.approx(3.0, rel=5e-3)


@pytest.mark.parametrize(
    "rows, model, steps", [(142, "linear", 60), (400, "linear", 180), (5000, "network", 180)]
)
def test_the_rule_of_epsilon_times_rows(rows, model, steps):
    settings = TableSettings(dataset="", target="t", epsilon=1.0, accountant="gdp")
    name, plan, _ = tables.choose(settings, rows, Ledger())
    assert (name, plan.steps) == (model, steps)
