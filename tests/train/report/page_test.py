"""The page of a run: nothing of a user's is code in it, nothing is loaded, nothing is private."""

import dataclasses
import html.parser
import shlex

import numpy as np

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train.config import preset_lookup
from tfdpx.train.data.images import ImageData
from tfdpx.train.report import command_again, page
from tfdpx.train.run import provenance, results

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


def test_what_a_user_named_is_text_and_nothing_is_loaded_or_run(tmp_path):
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
    names, names_of_usual = (
        {(tag, frozenset(attrs)) for tag, attrs in page_tags.tags}
        for page_tags in (attacked, usual)
    )
    assert names == names_of_usual and "<script>alert(1)</script>" in attacked.text
    assert not {"script", "link", "iframe", "object", "a", "base"} & {tag for tag, _ in names}
    loaded = [
        attrs[name] for _, attrs in attacked.tags for name in ("src", "href") if name in attrs
    ]
    assert len(loaded) == 2 and all(each.startswith("data:image/png;base64,") for each in loaded)
    [policy] = [attrs["content"] for _, attrs in attacked.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")
    text = (tmp_path / "usual" / page.FILE).read_text().replace("http-equiv", "")
    assert not any(word in text for word in ("url(", "@import", "http"))


HEADLINES = [
    ({}, "75.0% test accuracy, at ("),
    ({}, "for 400 images of folder:photos."),
    ({}, "Releasable: epsilon"),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20, seeded=True),))), "Not releasable: the"),
    (dict(ledger=provenance.not_private(3)), "test accuracy, trained without privacy on 400"),
    (dict(searched="30 trials"), "Not releasable: arguments were searched"),
    (dict(results={}), "Not measured, at ("),
    (dict(results={"steps": 9}, ledger=Ledger(), delta=None), "nothing was spent on 400 images"),
    (dict(results={"test_r2": 0.5}, unit="row"), "R² 0.500 on test rows, at"),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20, unit="user"),))), "of 400 people in"),
]


def test_the_headline_says_what_is_promised(tmp_path):
    for changed, said in HEADLINES:
        assert said in written(tmp_path, record(**changed)).text


def measured_data(name, eval_split="test"):
    """Data whose training images nothing may read."""
    fields = dict.fromkeys(field.name for field in dataclasses.fields(ImageData))
    images = np.arange(6 * 4, dtype="uint8").reshape(6, 2, 2, 1)
    fields |= dict(eval_x=images, eval_y=np.arange(6) % 2, class_names=("a", "b"))
    return ImageData(**{**fields, "name": name, "eval_split": eval_split})


WHERE_SHOWN = [
    ("sklearn_digits:0-1", "test", False, True),
    ("sklearn_digits", "validation", True, False),
    ("folder:/photos", "test", False, False),
    ("folder:/photos", "test", True, True),
    ("my_own_builder", "test", False, False),  # It may be private, as a folder.
]


def test_pictures_are_of_public_test_images_alone(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(results.pictures, "wrong_predictions", lambda *args: drawn.append(args))
    predictions = np.array([1, 1, 0, 0, 0, 1])
    for name, eval_split, public_test, shown in WHERE_SHOWN:
        drawn.clear()
        data = measured_data(name, eval_split)
        (tmp_path / page.WRONG).write_bytes(b"of an earlier run")
        results.draw_measured(data, data.eval_y, predictions, tmp_path, public_test)
        assert bool(drawn) == shown == (tmp_path / page.WRONG).exists(), name
        for images, labels, predicted, names, path in drawn:
            np.testing.assert_array_equal(images, data.eval_x[[0, 3]])
            assert (labels.tolist(), predicted.tolist()) == ([0, 1], [1, 0])
            assert names == ("a", "b") and path == tmp_path / page.WRONG


def test_the_command_asks_for_the_same():
    given = dict(
        dataset="folder:/a/my photos", seed=7, epsilon=3.0, l2_norm_clip="automatic", delta=1e-4
    )
    settings = provenance.without_secrets(preset_lookup.resolve("folder", given))
    command = command_again.of(record(program="classify", settings=records.plain(settings)))
    asked = (
        "tfdpx classify 'dataset=folder:my photos' epsilon=3.0 delta=0.0001 l2_norm_clip=automatic"
    )
    assert shlex.split(command.replace("\\\n", "").replace("--", "")) == shlex.split(asked)
