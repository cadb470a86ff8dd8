"""`verify` detects and names files of a run that were edited, damaged, mixed up or left out."""

import contextlib
import dataclasses
import io
import json
import re
import shutil
import zipfile

import h5py
import pytest
from absl import flags
from absl.testing import flagsaver

from tfdpx import _files
from tfdpx.accounting import Ledger
from tfdpx.accounting import record as records
from tfdpx.accounting.record import DatasetId
from tfdpx.report import card, page, words
from tfdpx.train import verify as program

STATEMENT = "privacy_statement.txt"


def ask(*paths, render=None):
    """Returns the exit status, the first line, the last line, and all text without line breaks."""
    output, status = io.StringIO(), 0
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["verify"])
    with contextlib.redirect_stdout(output), flagsaver.flagsaver(render=render):
        try:
            program.main(["verify", *map(str, paths)])
        except SystemExit as error:
            status = error.code
    lines = output.getvalue().splitlines() or ["", "null"]
    return status, lines[0], json.loads(lines[-1]), " ".join(output.getvalue().split())


def edit(path, old, new):
    """Replaces text in a file that has it."""
    content = path.read_bytes()
    assert old.encode() in content, (path, old)
    path.write_bytes(content.replace(old.encode(), new.encode()))


def edit_record(path, change):
    """Changes the JSON of a record, and renews its digest."""
    content = json.loads(path.read_bytes())
    del content["digest"]
    change(content)
    path.write_bytes(_files.sealed(content, indent=1))


def rewrite(path, change, without=()):
    """Rewrites a `.keras` archive: `change` receives its weights, an open h5py file."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist() if name not in without}
    weights = io.BytesIO(entries["model.weights.h5"])
    with h5py.File(weights, "r+") as file:
        change(file)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in (entries | {"model.weights.h5": weights.getvalue()}).items():
            archive.writestr(name, content)


def add_one(file):
    """Changes a weight of an open h5py file."""
    names = []
    file.visit(names.append)
    name = next(name for name in names if isinstance(file[name], h5py.Dataset))
    file[name][...] = file[name][...] + 1


def make_anew(folder, **changed):
    """Renews all files of a run from a changed record, without pictures."""
    record = dataclasses.replace(records.read(folder / records.FILE), **changed)
    record = record if "versions" in changed else words.worded(record)
    record = record.save(folder / "model.keras")
    record.save(folder / records.FILE)
    for name in page.pictures_of(folder):
        (folder / name).unlink()
    (folder / STATEMENT).write_text(words.statement(record))
    (folder / card.FILE).write_text(card.text(record))
    (folder / page.FILE).write_bytes(page.page(record, {}))


def entries(folder, **changed):
    """Returns the ledger of a run with changed entries."""
    ledger = records.read(folder / records.FILE).ledger
    changed_entries = tuple(dataclasses.replace(entry, **changed) for entry in ledger.entries)
    return dataclasses.replace(ledger, entries=changed_entries)


def other_run(folder):
    """Makes another run of the same settings: other weights and other random numbers."""
    other = shutil.copytree(folder, folder.with_name("other"))
    rewrite(other / "model.keras", add_one)
    make_anew(other, ledger=entries(folder, run=5), date="2026-01-01")
    return other


def take(name):
    """Returns a mix-up: one file is from another run of the same settings."""
    return lambda folder: shutil.copy(other_run(folder) / name, folder / name)


def flip_a_bit_of_the_layers(folder):
    content = bytearray((folder / "model.keras").read_bytes())
    content[content.find(b"config.json") + 60] ^= 4
    (folder / "model.keras").write_bytes(content)


def spent(content):
    """Changes the noise in a record."""
    content["ledger"]["entries"][0]["noise_multiplier"] *= 2


def swapped(folder):
    shutil.copy(folder / page.CURVE, folder / page.CONFUSION)


def saved_by_keras(folder):
    rewrite(folder / "model.keras", lambda file: None, without=["tfdpx_record.json"])


def digest_taken_out(folder):
    """Puts other weights in, and takes the digest out of the record next to them."""
    path, record = folder / "model.keras", records.read(folder / records.FILE)
    rewrite(path, add_one, without=["tfdpx_record.json"])
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("tfdpx_record.json", record.to_json())


def digest_renewed(folder):
    """Puts other weights in, and renews the digest in the record next to them."""
    rewrite(folder / "model.keras", add_one)
    records.read(folder / records.FILE).save(folder / "model.keras")


def unfinished(folder):
    (folder / "checkpoint").mkdir()
    (folder / "checkpoint" / "settings.json").write_text('{"format": "tfdpx.Settings/1"}')
    (folder / records.FILE).unlink()


# From a name to a change of the run, and the file and reason in the error.
TAMPERED = {
    "weights": (lambda f: rewrite(f / "model.keras", add_one), "model.keras .*weights are not"),
    "weights without digest": (digest_taken_out, "model.keras .*weights are not those"),
    "weights with their digest": (digest_renewed, "model.keras and record.json .* in weights"),
    "a byte of the layers": (flip_a_bit_of_the_layers, "Its entry config.json is not"),
    "noise in the record": (
        lambda f: edit(f / records.FILE, '"noise_multiplier": 0.82', '"noise_multiplier": 1.82'),
        "record.json is damaged, edited.*does not fit its digest",
    ),
    "people in the record, with its digest": (
        lambda f: edit_record(f / records.FILE, lambda c: c.update(unit="person")),
        "model.keras and record.json are of different runs, or one was edited: .* in unit",
    ),
    "noise in the record, with its digest": (
        lambda f: edit_record(f / records.FILE, spent),
        "model.keras and record.json are of different runs, .* in ledger",
    ),
    "epsilon in the record, with its digest": (
        lambda f: edit_record(
            f / records.FILE, lambda c: c["derived"].update(epsilon=0.98 * c["derived"]["epsilon"])
        ),
        "record.json states numbers that do not follow from its ledger: epsilon",
    ),
    "size in the record, with its digest": (
        lambda f: edit_record(f / records.FILE, lambda c: c["data"].update(num_examples=10**6)),
        "model.keras and record.json .* differ in data",
    ),
    "epsilon in the statement": (
        lambda f: edit(f / STATEMENT, "have (1.99", "have (0.19"),
        "privacy_statement.txt was edited, or is of another run",
    ),
    "epsilon on the page": (
        lambda f: edit(f / page.FILE, "epsilon, 1.99", "epsilon, 0.19"),
        "report.html was edited, or is of another run",
    ),
    "record in the page": (
        lambda f: edit(f / page.FILE, "noise_multiplier&#34;: 0.82", "noise_multiplier&#34;: 9"),
        "report.html is damaged, edited",
    ),
    "an entry of the record in the page twice": (
        lambda f: edit(f / page.FILE, "{\n &#34;", "{&#34;unit&#34;: &#34;<b>&#34;,\n &#34;"),
        "report.html is damaged, edited.*an entry twice",
    ),
    "a picture": (
        swapped,
        "report.html does not show the pictures in its folder: confusion_matrix",
    ),
    "page of another run": (take(page.FILE), "report.html and record.json are of different runs"),
    "model of another run": (take("model.keras"), "model.keras and record.json .* differ in ledg"),
    "model saved again by Keras": (saved_by_keras, "model.keras .*holds neither the record"),
    "card": (
        lambda f: edit(f / card.FILE, "Caution: a person", "A person"),
        "model_card.md was edited",
    ),
    "ledger of another run": (
        lambda f: entries(f, run=5).save(f / "ledger5.json"),
        "ledger5.json has another ledger than",
    ),
    "record removed": (lambda f: (f / records.FILE).unlink(), "record.json is missing"),
    "unfinished": (
        unfinished,
        "checkpoint is left over from unfinished work.*record.json is missing",
    ),
    "a seed": (lambda f: make_anew(f, ledger=entries(f, seeded=True)), "the run had a seed"),
    "noise so low that epsilon is infinite": (
        lambda f: make_anew(f, ledger=entries(f, noise_multiplier=1e-3)),
        "epsilon is infinite",
    ),
    "incomplete ledger": (
        lambda f: make_anew(f, ledger=Ledger(entries(f).entries, is_complete=False)),
        "a part of what its weights have spent is unknown",
    ),
    "unpaid search": (
        lambda f: make_anew(f, searched="9 runs"),
        "searched .*does not count the search",
    ),
    "other weights beside": (
        lambda f: (f / "extra.weights.h5").write_bytes(b"\x89HDF"),
        "extra.weights.h5 is damaged, edited, or no file of a run",
    ),
    "another run below": (
        lambda f: shutil.move(other_run(f), f / "other"),
        "other/record.json and record.json are of different runs",
    ),
}


@pytest.fixture
def folder(finished_runs, tmp_path):
    return shutil.copytree(finished_runs("private").workdir, tmp_path / "run")


@pytest.mark.parametrize("case", TAMPERED)
def test_tampering_is_noticed_and_named(folder, case):
    tamper, named = TAMPERED[case]
    tamper(folder)
    status, first, last, text = ask(folder)
    assert status == 1 and first.startswith("NO: ") and last["verified"] is False
    assert re.search(named, "; ".join(last["problems"])), last["problems"]
    assert re.search(named.partition(".*")[0], text)


def test_a_whole_run_and_each_of_its_files(folder):
    record = records.read(folder / records.FILE)
    status, first, last, text = ask(folder)
    assert status == 0 and first.startswith("YES: the 5 files agree") and not last["problems"]
    assert (last["epsilon"], last["delta"], last["unit"]) == (record.epsilon, 1e-5, "image")
    assert last["attack_bounds"] == record.attack_bounds().to_dict()
    assert last["fingerprint"] == record.fingerprint and record.fingerprint in text
    assert set(last["files"].values()) == {"agrees"} and "a person with several images" in text
    assert (
        words.say("guesses", record.attack_bounds(), "image") in text
        and "Other files or folders: curve.jsonl, tensorboard." in text
    )
    record.ledger.save(folder / "ledger.json")
    assert ask(folder)[1].startswith("YES: the 6 files agree")
    for name in last["files"]:
        status, first, last, _ = ask(folder / name)
        is_text = name.endswith((".txt", ".md"))
        assert status == is_text and list(last["files"]) == [name]
        assert is_text or first.startswith(
            f"YES, of this {'page' if name == page.FILE else 'file'}"
        )
        assert ("Pictures on report.html" in str(last["not_checked"])) == (name == page.FILE)
        assert "only a text" in first if is_text else last["fingerprint"] == record.fingerprint


def test_known_limits_of_what_is_noticed(folder):
    # A forger who renews all files; the fingerprint is another.
    before = ask(folder)[2]
    make_anew(folder, ledger=entries(folder, noise_multiplier=50.0, unit="user"))
    status, first, last, text = ask(folder)
    assert status == 0 and last["epsilon"] < 0.1 and last["unit"] == "person"
    assert "for each person" in first and "a forger could make all files again" in first
    assert last["fingerprint"] != before["fingerprint"]
    # Other weights under the same texts have another fingerprint, too.
    digest_renewed(folder)
    make_anew(folder)
    assert ask(folder)[0] == 0 and ask(folder)[2]["fingerprint"] != last["fingerprint"]
    # A lone record with a renewed digest; weights of other kinds next to it are only named.
    alone = folder / "alone"
    alone.mkdir()
    (folder / records.FILE).rename(alone / records.FILE)
    edit_record(alone / records.FILE, lambda content: content.update(unit="scan"))
    (alone / "model.h5").write_bytes(b"weights")
    status, first, last, text = ask(alone)
    assert status == 0 and first.startswith("YES, of the texts: ask for the model.")
    assert "all their scans" in text and "people. Compare this number" in text
    assert "Other files or folders: model.h5." in text and "there is no model.keras" in text


def test_words_of_another_version_are_never_yes_and_ours_are_rendered(folder, tmp_path):
    sent = ("privacy_statement.txt", "model_card.md", "report.html")
    make_anew(folder, versions={"tfdpx": "9.9", "words": "0", "dp-accounting": "9.9"})
    status, first, last, text = ask(folder, render=str(tmp_path / "ours"))
    assert status == 1 and last["verified"] is False and not last["problems"]
    assert first.startswith("Words not checked: read ours. Another version of tfdpx worded")
    assert {last["files"][name] for name in sent} == {"words not checked: read ours"}
    assert last["files"]["model.keras"] == "agrees" and all(name in first for name in sent)
    assert {path.name for path in (tmp_path / "ours").iterdir()} == {
        *sent, "record.json", "attack.png"
    }  # fmt: skip
    assert ask(tmp_path / "ours", render=str(tmp_path / "ours"))[0].startswith(
        "tfdpx.train.verify: Cannot verify"
    )
    edit(folder / STATEMENT, "Anyone can write", "Everyone can write")
    assert ask(folder)[1].startswith("Words not checked")
    for old, new in (("have (1.99", "have (0.19"), ("in one", "in a million")):
        statement = (folder / STATEMENT).read_bytes()
        edit(folder / STATEMENT, old, new)
        status, first, last, _ = ask(folder)
        assert status == 1 and "privacy_statement.txt states what its record does not" in first
        (folder / STATEMENT).write_bytes(statement)
    (folder / STATEMENT).write_text("It is private.")
    assert ask(folder)[1].startswith("Words not checked")


def malformed(folder):
    """Yields files with contents that tfdpx would not write."""
    record = json.loads((folder / records.FILE).read_bytes())
    deep = b"[" * 100_000
    for content in (b"", b"\xff\x00", b"{}", b"null", deep, b'{"format": "tfdpx.Record/3"}'):
        for name in (records.FILE, "ledger.json", "model.keras", "report.html", "a.weights.h5"):
            yield name, content
    wrong = {"data": 3, "delta": "x", "results": {"test_accuracy": "x"}, "seen": 1}
    wrong |= {"versions": [], "settings": None, "inputs": "x", "delta ": -1.0, "results ": []}
    for name, value in wrong.items():
        content = {key: value for key, value in record.items() if key != "digest"}
        content[name.strip()] = value
        yield records.FILE, _files.sealed(content)


def test_malformed_files_are_named_in_one_line(folder, tmp_path):
    for name, content in malformed(folder):
        path = tmp_path / name
        path.write_bytes(content)
        status, first, last, text = ask(path)
        assert status == 1 and first.startswith(f"NO: {name} "), (name, content[:40], first)
        assert len(first) < 500 and last["verified"] is False
    make_anew(folder, data=DatasetId("\x1b[2J\nYES: all is well", 400))
    _, first, _, text = ask(folder)
    assert first.startswith("YES: the 5 files") and "\x1b" not in text


def test_errors_of_the_user(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    shutil.make_archive(folder, "zip", folder)
    folder = folder.rename(tmp_path / "run\x1b[2J")
    for paths, reason in [
        ([], "Give one path: tfdpx verify PATH. Received: nothing."),
        ([folder, folder], "Give one path"),
        ([tmp_path / "nowhere"], "There is no file or folder .*nowhere"),
        ([tmp_path / "empty"], "Nothing in .*empty can be checked"),
        ([tmp_path / "run.zip"], r"run.zip is no file of a run. Give .*unpack it first if"),
        ([tmp_path], r"The runs lie in folders of .*. Give one: .*run\\x1b"),
    ]:
        status, _, last, _ = ask(*paths)
        assert re.search(f"^tfdpx.train.verify: .*{reason}", status) and last is None
