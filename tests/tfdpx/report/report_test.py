"""The report of a run: strict JSON, and a page that loads nothing and shows no private image."""

import html.parser
import json
import re
import resource
import types

import numpy as np
import pytest

from tfdpx.accounting.ledger import Entry, Ledger
from tfdpx.accounting.record import DatasetId, Record
from tfdpx.report import card, measure, page, pictures, report, words
from tfdpx.train.data.images import ImageData
from tfdpx.train.errors import in_one_line
from tfdpx.train.start_from import not_private

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
        program="adamix", data=DatasetId(f"folder:{name}", 400, "0" * 32), delta=1e-5,
        ledger=Ledger((Entry(5.0, 0.1, 20),)), results={"test_accuracy": 0.75, "model": name},
        settings={"dataset": f"folder:{name}"}, inputs={"class_names": [name, "other"]},
    )  # fmt: skip
    return Record(**arguments | changed)


def write(folder, measured, **arguments):
    data, ledger = DatasetId("photos"), Ledger((Entry(5.0, 0.1, 20),))
    arguments |= {"program": "classify", "delta": 1e-5}
    return report.write(folder, data=data, ledger=ledger, measured=measured, **arguments)


def page_of(folder, record):
    record.save(folder / "record.json")
    (folder / report.STATEMENT).write_text("epsilon = 0.100")  # The page ignores this.
    (folder / page.CONFUSION).write_bytes(b"\x89PNG")
    report.write_page(folder)
    return Page((folder / page.FILE).read_text())


def test_names_of_a_user_are_text_and_nothing_is_loaded_or_run(tmp_path):
    usual = page_of(tmp_path, record())
    text = (tmp_path / page.FILE).read_text().replace("http-equiv", "")
    assert not any(word in text for word in ("url(", "@import", "http"))
    names = dict(independence=ATTACK, versions={ATTACK: ATTACK}, date=ATTACK)
    shown = page_of(tmp_path, record(ATTACK, settings={ATTACK: [ATTACK]}, **names))
    assert "<script>alert(1)</script>" in shown.text
    assert {tag: set(attrs) for tag, attrs in shown.tags} == {
        tag: set(attrs) for tag, attrs in usual.tags
    }
    assert not {"script", "link", "iframe", "object", "a", "base"} & {tag for tag, _ in shown.tags}
    urls = [attrs[name] for _, attrs in shown.tags for name in ("src", "href") if name in attrs]
    assert len(urls) == 2 and all(url.startswith("data:image/png;base64,") for url in urls)
    [policy] = [attrs["content"] for _, attrs in shown.tags if "http-equiv" in attrs]
    assert policy.startswith("default-src 'none'")


RARE = {"test_accuracy": 0.966, "test_accuracy_interval": [0.949, 0.978]}
RARE |= {"test_base_rate": 0.97, "test_most_frequent_class": "<no>", "not_protected": "Exact."}
RARE |= {"warnings": ['The model never predicts "<yes>".']}
PEOPLE = Ledger((Entry(5.0, 0.1, 20, unit="user"),))
SENTENCES = [
    ({}, "Protected: only each single image of folder:photos, not a person with several images."),
    (dict(unit="text"), "a patient, with several texts is protected less"),
    ({}, "whether one image was in the data, is right at most"),
    (dict(unit="row"), "If they wrongly accuse only 1 absent row of 100, they recognise at most"),
    (dict(ledger=Ledger((Entry(1.0, 1.0, 20),))), "Weakly protected: only each single image of"),
    (dict(ledger=PEOPLE), "Protected: each person in folder:photos, with all their images."),
    (dict(ledger=PEOPLE), "whether one person was in the data"),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20, seeded=True),))), "Do not release: the run had a"),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20, seeded=True),))), "someone who knows the seed."),
    (
        dict(ledger=not_private(), delta=None),
        "Not private: the weights may reveal everything about",
    ),
    (dict(ledger=not_private(), delta=None), "Not a single image of folder:photos is protected."),
    (dict(ledger=Ledger((Entry(5.0, 0.1, 20),), is_complete=False)), "It is unknown how well"),
    (dict(sampling="shuffle"), "Epsilon is an approximation, because batches were shuffled. The"),
    (dict(searched="30 trials"), "Do not release: arguments were searched"),
    (dict(searched="30 trials"), "Would be protected: only each single image"),
    (dict(results={"steps": 9}, ledger=Ledger(), delta=None), "Nothing was measured."),
    (dict(results={"steps": 9}, ledger=Ledger(), delta=None), "No training on folder:photos is"),
    (dict(results={"test_r2": 0.0}, unit="row"), "On test rows, R² is 0.000: 1 is perfect"),
    (
        dict(results=RARE),
        "96.6% are classified correctly. On many more of the same kind, the share may be 94.9 to ",
    ),
    (dict(results=RARE), 'To always answer "<no>" would be right for 97.0%.'),
]


def test_the_name_of_the_data_is_shown_in_place_of_their_identity():
    named = record(settings={"data_name": "Skin <photos>, 2026"})
    assert "trained on Skin <photos>, 2026 (N = 400" in words.statement(named)
    assert "images of Skin \\<photos\\>, 2026." in card.text(named)
    assert "<title>Privacy of a model trained on Skin &lt;photos&gt;, 2026" in str(
        page.page(named, {})
    )
    assert named.view()["dataset"] == "folder:photos"


def test_protection_is_named_by_the_right_guesses_rounded_up():
    rates = {0.54: "strong", 0.541: "moderate", 0.74: "moderate", 0.741: "weak", 0.75: "weak"}
    for rate, name in rates.items():
        assert words.strength(types.SimpleNamespace(right_guesses=rate)) == name, rate


def test_the_page_says_who_is_protected_and_from_what(tmp_path):
    for changed, text in SENTENCES:
        content = Page(page.page(record(**changed), {}).decode()).text
        assert text in " ".join(content.split()) and "Releasable" not in content
    rare = record(results=RARE)
    text = page_of(tmp_path, rare).text
    parts = (*RARE["warnings"], "Protected: only", "right at most", "96.6%", "Exact.", "A seed:")
    places = [text.index(part) for part in (*parts, "tfdpx verify", "For specialists")]
    assert places == sorted(places) and text.index("Statement of differential") > places[-1]
    assert rare.fingerprint in text


def test_a_full_disk_at_the_page_is_one_sentence_and_the_record_stays(tmp_path):
    """The kernel limits every file to a number of bytes."""
    expected = record()
    page_of(tmp_path, expected)
    whole = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for most in (0, 60_000):  # Too few for a picture, and for the page.
        assert most < len(whole[page.FILE])
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
        try:
            with pytest.raises(SystemExit) as ended, in_one_line("classify"):
                report.write_page(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "\n" not in (text := str(ended.value)) and repr(str(tmp_path / page.FILE)) in text
        assert "File too large" in text and "were saved before and are whole" in text
        for name in ("record.json", page.FILE, report.STATEMENT):
            assert (tmp_path / name).read_bytes() == whole[name]
    command = re.search('`python -c "(.*)"`', text)[1]
    exec(command)
    assert (tmp_path / page.FILE).read_bytes() == whole[page.FILE]


def test_the_page_holds_the_record_and_follows_from_it_alone(tmp_path):
    expected = record(ATTACK, results=RARE)
    page_of(tmp_path, expected)
    content = (tmp_path / page.FILE).read_bytes()
    assert page.record_in(content) == expected and b"= 0.100" not in content
    assert page.page(expected, page.pictures_of(tmp_path)) == content
    (tmp_path / page.ATTACK).unlink()
    assert page.page(expected, page.pictures_of(tmp_path)) != content
    for edited, reason in ((b"", "holds no record"), (content.replace(b"0.966", b"0.999"), "edit")):
        with pytest.raises(ValueError, match=reason):
            page.record_in(edited)


def test_a_model_card_has_the_header_of_hubs_and_no_private_metrics():
    _, header, text = card.text(record(ATTACK)).split("---\n", 2)
    lines = dict(line.split(": ", 1) for line in header.splitlines())
    lines = {name: json.loads(value) for name, value in lines.items()}
    assert lines["library_name"] == "keras" and "differential-privacy" in lines["tags"]
    assert lines["pipeline_tag"] == "image-classification" and "datasets" not in lines
    [run] = lines["model-index"]
    assert run["name"] == ATTACK and run["results"][0]["metrics"][0]["value"] == 0.75
    assert '"name": "folder:\U0001f600"' in card.text(record("\U0001f600"))
    assert "75.0%" in text and "right at most" in text and "<script>" not in text.split("## St")[0]
    public = record("", data=DatasetId("cifar10"), unit="row", results={"test_r2": 0.5})
    assert 'pipeline_tag: "tabular-regression"' in card.text(public)
    private = card.text(record(results=RARE, ledger=not_private(), delta=None))
    assert "96.6" not in private and "0.966" not in private and "never" not in private
    assert "differential-privacy" not in private and "**Not private:" in private


WHERE_SHOWN = [
    ("sklearn_digits:0-1", "test", False, True),
    ("sklearn_digits", "validation", True, False),
    ("folder:/photos", "test", False, False),
    ("folder:/photos", "test", True, True),
    ("my_own_builder", "test", False, False),  # It may be private, like a folder.
]


@pytest.mark.parametrize(("name", "split", "public_test", "is_shown"), WHERE_SHOWN)
def test_pictures_are_of_public_test_images_only(
    tmp_path, monkeypatch, name, split, public_test, is_shown
):
    drawn, labels, images = [], np.arange(6) % 2, np.arange(6, dtype="uint8").reshape(6, 1, 1, 1)
    data = types.SimpleNamespace(
        name=name, eval_split=split, eval_examples=(images, labels), class_names=("a", "b")
    )
    monkeypatch.setattr(pictures, "wrong_predictions", lambda *args: drawn.append(args))
    model = types.SimpleNamespace(predict_on_batch=lambda x: np.eye(2)[[1, 1, 0, 0, 0, 1]])
    measured = measure.measure(model, data, ImageData.is_public(data, public_test))
    write(tmp_path, measured, examples=data.eval_examples)
    assert (tmp_path / page.CONFUSION).exists() and len(drawn) == is_shown
    assert measured.results()["not_protected"] == (None if is_shown else words.NOT_PROTECTED)
    for pixels, *classes, _, _ in drawn:
        assert pixels.ravel().tolist() == [0, 3]
        np.testing.assert_array_equal(classes, [[0, 1], [1, 0]])
