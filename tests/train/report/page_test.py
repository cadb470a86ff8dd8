"""The page of a run: nothing of a user's is code in it, nothing is loaded, nothing is private."""

import dataclasses
import html.parser
import shlex

import numpy as np
import pytest
from absl import flags

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train.config import preset_lookup, pretraining
from tfdpx.train.config.errors import UserError
from tfdpx.train.config.setting_flags import define
from tfdpx.train.config.training import Training
from tfdpx.train.data import loading
from tfdpx.train.report import command_again, page
from tfdpx.train.run import provenance, results

define(pretraining.Pretraining)
ATTACK = (
    "\"'><script>alert(1)</script><img src=https://x.invalid/a onerror=alert(2)>&amp;\udcff\n  \n\n"
)


class Tags(html.parser.HTMLParser):
    """The tags of a page with their attributes, and all text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def record(name="photos", **changed):
    ledger = Ledger((Entry(5.0, 0.1, 20),))
    given = dict(
        program="adamix",
        data=Data(f"folder:{name}", 400, "0" * 32),
        ledger=ledger,
        delta=1e-5,
        settings={"dataset": f"folder:{name}", "epsilon": 1.0},
        results={"test_accuracy": 0.75, "num_measured": 100, "model": name},
        inputs={"class_names": [name, "other"]},
    )
    return Record(**given | changed)


def written(folder, record):
    record.save(folder / "record.json")
    (folder / page.STATEMENT).write_text(record.statement(), errors="backslashreplace")
    for name in (page.CURVE, page.CONFUSION):
        (folder / name).write_bytes(b"\x89PNG")
    page.write_page(folder)
    return Tags((folder / page.FILE).read_text())


def names_of(found):
    return {(tag, frozenset(attrs)) for tag, attrs in found.tags}


def test_what_a_user_named_is_text(tmp_path):
    (tmp_path / "usual").mkdir()
    usual = written(tmp_path / "usual", record())
    attacked = written(
        tmp_path,
        record(
            ATTACK,
            searched=None,
            settings={"dataset": "digits", ATTACK: [ATTACK], "epsilon": ATTACK},
            independence=ATTACK,
            versions={ATTACK: ATTACK},
            date=ATTACK,
        ),
    )
    assert names_of(attacked) == names_of(usual)
    assert "<script>alert(1)</script>" in attacked.text


def test_it_loads_nothing_and_runs_nothing(tmp_path):
    found = written(tmp_path, record())
    assert not {"script", "link", "iframe", "object", "a", "base"} & {tag for tag, _ in found.tags}
    loaded = [attrs[name] for _, attrs in found.tags for name in ("src", "href") if name in attrs]
    assert len(loaded) == 2 and all(each.startswith("data:image/png;base64,") for each in loaded)
    [policy] = [attrs["content"] for _, attrs in found.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")
    text = (tmp_path / page.FILE).read_text()
    assert (
        "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )


HEADLINES = [
    ({}, "75.0% test accuracy, at ("),
    ({}, "for 400 images of folder:photos."),
    ({}, "Releasable: epsilon"),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20, seeded=True),))), "Not releasable: the"),
    (dict(ledger=provenance.not_private(3)), "test accuracy, trained without privacy on 400"),
    (dict(ledger=provenance.not_private(3)), "Not releasable: epsilon is infinite."),
    (dict(searched="30 trials"), "Not releasable: arguments were searched"),
    (dict(results={}), "Not measured, at ("),
    (dict(results={"steps": 9}, ledger=Ledger(), delta=None), "nothing was spent on 400 images"),
    (dict(results={"test_r2": 0.5}, unit="row"), "R² 0.500 on test rows, at"),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20, unit="user"),))), "of 400 people in"),
]


def test_the_headline_says_what_is_promised(tmp_path):
    for changed, said in HEADLINES:
        assert said in written(tmp_path, record(**changed)).text


def test_it_is_made_of_the_folder_alone(tmp_path):
    written(tmp_path, record())
    first = (tmp_path / page.FILE).read_bytes()
    (tmp_path / page.FILE).unlink()
    page.write_page(tmp_path)
    assert (tmp_path / page.FILE).read_bytes() == first
    assert str(tmp_path).encode() not in first
    (tmp_path / "record.json").unlink()
    (tmp_path / page.FILE).unlink()
    with pytest.raises(FileNotFoundError):  # The run has not ended.
        page.write_page(tmp_path)
    assert not (tmp_path / page.FILE).exists()


class Untouchable:
    def __getattr__(self, name):
        raise AssertionError(f"training images were asked for {name}")


def measured_data(name, eval_split="test"):
    images = np.arange(6 * 4, dtype="uint8").reshape(6, 2, 2, 1)
    return loading.ImageData(
        name=name,
        train_x=Untouchable(),
        train_y=Untouchable(),
        eval_x=images,
        eval_y=np.arange(6) % 2,
        num_train=10,
        image_shape=(2, 2, 1),
        eval_split=eval_split,
        class_names=("a", "b"),
        centre=127.5,
        deviation=127.5,
    )


@pytest.mark.parametrize(
    "name, eval_split, public_test, shown",
    [
        ("sklearn_digits:0-1", "test", False, True),
        ("sklearn_digits", "validation", False, False),
        ("sklearn_digits", "validation", True, False),
        ("folder:/photos", "test", False, False),
        ("folder:/photos", "test", True, True),
        ("my_own_builder", "test", False, False),  # It may be private, as a folder.
    ],
)
def test_pictures_are_of_public_test_images_alone(
    tmp_path, monkeypatch, name, eval_split, public_test, shown
):
    drawn = []
    monkeypatch.setattr(results.pictures, "wrong_predictions", lambda *args: drawn.append(args))
    data, predictions = measured_data(name, eval_split), np.array([1, 1, 0, 0, 0, 1])
    (tmp_path / page.WRONG).write_bytes(b"of an earlier run")
    results.draw_measured(data, data.eval_y, predictions, tmp_path, public_test)
    assert bool(drawn) == shown
    if shown:
        [(images, labels, predicted, names, path)] = drawn
        np.testing.assert_array_equal(images, data.eval_x[[0, 3]])
        assert (labels.tolist(), predicted.tolist()) == ([0, 1], [1, 0])
        assert names == ("a", "b") and path == tmp_path / page.WRONG
    else:
        assert not (tmp_path / page.WRONG).exists()


@pytest.mark.parametrize(
    "given",
    [
        dict(epsilon=3.0, seed=7),
        dict(private=False),
        dict(dataset="folder:/a/my photos", public_test=True, init_from="/a/b c/model.keras"),
    ],
)
def test_the_command_asks_for_the_same(given):
    count = 0
    for preset in preset_lookup.names():
        try:
            recorded = provenance.without_secrets(preset_lookup.resolve(preset, given))
        except UserError:  # They do not go together.
            continue
        count += 1
        command = command_again.of(record(program="classify", settings=records.plain(recorded)))
        assert "/a/" not in command and "--seed" not in command
        base = preset_lookup.default_for(recorded["dataset"])
        again = preset_lookup.resolve(base, parsed(command, Training))
        assert provenance.without_secrets(again) == recorded, preset
    assert count > 30


RECIPES = sorted(set(pretraining.RECIPES) - {"jft"})


def test_the_command_of_a_recipe_asks_for_the_same():
    for recipe in RECIPES:
        settings = pretraining.resolve(recipe, {})
        recorded = provenance.without_secrets(settings)
        command = command_again.of(record(program="pretrain", settings=records.plain(recorded)))
        asked = parsed(command, pretraining.Pretraining)
        recipe = asked.pop("recipe")
        assert provenance.without_secrets(pretraining.resolve(recipe, asked)) == recorded


def parsed(command, settings):
    """The values of flags in a command, as the program reads them."""
    fields, found = {field.name for field in dataclasses.fields(settings)}, {}
    for part in shlex.split(command.replace("\\\n", ""))[2:]:
        name, _, text = part.removeprefix("--").partition("=")
        found[name] = flags.FLAGS[name].parser.parse(text) if name in fields else text
    if "decay_steps" in found:
        found["decay_steps"] = list(map(int, found["decay_steps"]))
    return found


def test_a_search_has_no_command():
    assert command_again.of(record(program="sweep", searched="a random number of runs")) is None
