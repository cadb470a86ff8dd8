"""The page of a run: user's names are text, nothing is loaded, no private image is shown."""

import dataclasses
import html.parser
import shlex

import numpy as np
import pytest

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import Data, Record
from tfdpx.train import report, settings, start_from
from tfdpx.train.data.images import ImageData

ATTACK = "\"'><script>alert(1)</script><img src=https://x.invalid/a onerror=b>&amp;$a\udcff\n \n\n"


class Page(html.parser.HTMLParser):
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
    arguments = dict(
        program="adamix",
        data=Data(f"folder:{name}", 400, "0" * 32),
        ledger=Ledger((Entry(5.0, 0.1, 20),)),
        delta=1e-5,
        settings={"dataset": f"folder:{name}", "epsilon": 1.0},
        results={"test_accuracy": 0.75, "num_measured": 100, "model": name},
        inputs={"class_names": [name, "other"]},
    )
    return Record(**arguments | changed)


def page_of(folder, record):
    record.save(folder / "record.json")
    (folder / report.STATEMENT).write_text(record.statement(), errors="backslashreplace")
    for name in (report.CURVE, report.CONFUSION):
        (folder / name).write_bytes(b"\x89PNG")
    report.write_page(folder)
    return Page((folder / report.FILE).read_text())


def test_names_of_a_user_are_text_and_nothing_is_loaded_or_run(tmp_path):
    usual = page_of(tmp_path, record())
    text = (tmp_path / report.FILE).read_text().replace("http-equiv", "")
    assert not any(word in text for word in ("url(", "@import", "http"))
    settings = {"dataset": "digits", ATTACK: [ATTACK], "epsilon": ATTACK}
    names = dict(independence=ATTACK, versions={ATTACK: ATTACK}, date=ATTACK)
    attacked = page_of(tmp_path, record(ATTACK, settings=settings, **names))
    assert "<script>alert(1)</script>" in attacked.text
    tags, usual_tags = (
        {(tag, frozenset(attrs)) for tag, attrs in page.tags} for page in (attacked, usual)
    )
    assert tags == usual_tags
    assert not {"script", "link", "iframe", "object", "a", "base"} & {tag for tag, _ in tags}
    loaded = [attrs[n] for _, attrs in attacked.tags for n in ("src", "href") if n in attrs]
    assert len(loaded) == 2 and all(url.startswith("data:image/png;base64,") for url in loaded)
    [policy] = [attrs["content"] for _, attrs in attacked.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({}, "75.0% test accuracy, at ("),
        ({}, ")-differential privacy for the images of folder:photos."),
        ({}, "Releasable: epsilon"),
        (dict(ledger=Ledger((Entry(5.0, 0.1, 20, seeded=True),))), "Not releasable: the run had"),
        (dict(ledger=start_from.not_private(3)), "accuracy, trained without privacy on the images"),
        (dict(searched="30 trials"), "Not releasable: arguments were searched"),
        (
            dict(results={"steps": 9}, ledger=Ledger(), delta=None),
            "Not measured, nothing was spent",
        ),
        (dict(results={"test_r2": 0.0}, unit="row"), "R² 0.000 on test rows, at"),
    ],
)
def test_the_page_says_what_is_guaranteed(tmp_path, changed, text):
    assert text in page_of(tmp_path, record(**changed)).text


@pytest.mark.parametrize(
    ("name", "eval_split", "public_test", "is_shown"),
    [
        ("sklearn_digits:0-1", "test", False, True),
        ("sklearn_digits", "validation", True, False),
        ("folder:/photos", "test", False, False),
        ("folder:/photos", "test", True, True),
        ("my_own_builder", "test", False, False),  # It may be private, as a folder.
    ],
)
def test_pictures_are_of_public_test_images_only(
    tmp_path, monkeypatch, name, eval_split, public_test, is_shown
):
    drawn = []
    monkeypatch.setattr(report.pictures, "wrong_predictions", lambda *args: drawn.append(args))
    fields = dict.fromkeys(field.name for field in dataclasses.fields(ImageData))
    images = np.arange(6 * 4, dtype="uint8").reshape(6, 2, 2, 1)
    fields |= dict(eval_x=images, eval_y=np.arange(6) % 2, class_names=("a", "b"))
    data = ImageData(**fields | dict(name=name, eval_split=eval_split))
    predictions = np.array([1, 1, 0, 0, 0, 1])
    report.draw_measured(data, data.eval_y, predictions, tmp_path, public_test)
    assert bool(drawn) == is_shown and (tmp_path / report.CONFUSION).exists()
    for shown, labels, predicted, names, path in drawn:
        np.testing.assert_array_equal(shown, images[[0, 3]])
        assert (labels.tolist(), predicted.tolist()) == ([0, 1], [1, 0])
        assert names == ("a", "b") and path == tmp_path / report.WRONG


@pytest.mark.parametrize(
    ("asked", "arguments"),
    [
        (
            dict(epsilon=3.0, l2_norm_clip="automatic", delta=1e-4),
            "--epsilon=3.0 --delta=0.0001 --l2_norm_clip=automatic",
        ),
        (dict(private=False, steps=9, batch_size=8), "--private=false --steps=9 --batch_size=8"),
    ],
)
def test_the_command_asks_for_the_same(asked, arguments):
    values = settings.resolve("folder", dict(asked, dataset="folder:/a/my photos", seed=7))
    values = records.plain(start_from.without_secrets(values))
    command = report.command_again(record(program="classify", settings=values))
    words = set(shlex.split(command.replace("\\\n", "")))
    expected = {"tfdpx", "classify", "--dataset=folder:my photos", *arguments.split()}
    assert words - {"--delta=1e-05"} == expected
    assert report.command_again(record(program="classify", searched="30 trials")) is None
