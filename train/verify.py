"""Checks whether the files of a run that you received agree, and who is protected.

    tfdpx verify PATH

PATH is the folder of a run or one of its files: record.json, model.keras, another file of weights
with a ledger, a ledger, report.html, card.md, or privacy_statement.txt. The first line is YES
or NO. The next ones list the files and their problems, the protected people, the strength and the
exceptions of the protection, and the fingerprint of the record. The last line is one JSON object.
The exit status is 0 for YES and 1 for NO. This finds accidents and edits, but not a forger who
makes all files anew, because nothing is signed. Files are only read: Keras neither loads nor runs a
model.
"""

import tfdpx.train.quiet_start  # noqa: F401 - before TensorFlow is imported.

# isort: split

import dataclasses
import itertools
import json
import math
import pathlib
import re
import sys
import zipfile

from absl import app

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import EMPTY, EXAMPLE, USER
from tfdpx.accounting.record import Record
from tfdpx.accounting.statement import rounded_up
from tfdpx.report import card, page
from tfdpx.report import words as plain_words
from tfdpx.report.report import STATEMENT
from tfdpx.train.errors import UserError, in_one_line, printable
from tfdpx.train.output import print_paragraphs, to_json
from tfdpx.train.spent import MODEL, files_below, record_in

_TEXTS = {STATEMENT: Record.statement, card.FILE: card.text}
_FINE = _AGREES, _SAME_EPSILON = "agrees", "states the same epsilon in other words"
_CLAIM = re.compile(r"\(([\d.]+), ([\d.e-]+)\)-differential privacy")
_VERSIONS = Record("verify", None, EMPTY, None).versions


@dataclasses.dataclass
class Verdict:
    """The answer to whether the files of a run agree.

    Attributes:
        record: The `Record` that all files are compared with; None if none could be read.
        files: Dict from the name of each file to "agrees" or another text.
        problems: List of reasons for NO.
        unchecked: List of sentences about omitted checks.
    """

    record: Record | None = None
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)

    def sentences(self) -> list[str]:
        """Returns the answer as a list of paragraphs; the first is YES or NO."""
        lines = [self._first(), "", "Files:"]
        for name, text in self.files.items():
            lines.append(f"- {name}: {text if text in _FINE else 'see Problems'}.")
        if self.problems:
            lines += ["", "Problems. Rely on nothing below before the sender has explained them:"]
            lines += [f"- {text}." for text in self.problems]
        if record := self.record:
            lines += ["", "Who is protected, as recorded:", *plain_words.protected(record)]
            lines += ["", "How well, at worst:", plain_words.attack(record)]
            lines += ["", "What undoes this, or is not protected:"]
            lines += [f"- {text}" for text in plain_words.limits(record)]
            lines += ["", f"Fingerprint of the record: {record.fingerprint}"]
            lines += ["Have the sender read theirs to you by telephone: it must be the same."]
        return [*lines, "", "Not checked:", *(f"- {text}." for text in self.unchecked), ""]

    def _first(self):
        if self.problems:
            more = f" ({len(self.problems) - 1} more below)" * (len(self.problems) > 1)
            return f"NO: {self.problems[0]}{more}."
        record, count = self.record, len(self.files)
        agree = f"the {count} files agree with each other" if count > 1 else "the file is whole"
        if worded := [name for name, text in self.files.items() if text == _SAME_EPSILON]:
            agree += f" but for the words of {', '.join(worded)}, which were not compared"
        who = "each person" if record.ledger.unit == USER else f"each single {record.unit}"
        about = "about " * record.is_approximate
        weak = ", which is weak" * plain_words.is_weak(record)
        return (
            f"YES: {agree}, and nothing recorded forbids a release. Epsilon is {about}"
            f"{rounded_up(record.epsilon)} for {who}{weak}: only you can decide if that is enough. "
            "Nothing is signed: a forger could make all anew."
        )

    def to_dict(self) -> dict[str, object]:
        """Returns the last line, a dict of JSON values."""
        record = self.record
        view = record.view() if record else {}
        units = {USER: "person", EXAMPLE: record and record.unit}
        return {
            "verified": not self.problems,
            "problems": self.problems,
            "unit": units.get(record and record.ledger.unit),
            **{name: view.get(name) for name in ("epsilon", "delta", "attack_bounds")},
            "fingerprint": record and record.fingerprint,
            "files": self.files,
            "not_checked": self.unchecked,
        }


def main(argv):
    """Checks a path, prints the answer, and exits with 1 if it is NO."""
    with in_one_line("tfdpx.train.verify"):
        if len(argv) != 2:
            received = " ".join(argv[1:]) or "nothing"
            raise UserError(f"Give one path: tfdpx verify PATH. Received: {received}.")
        try:
            verdict = check(pathlib.Path(argv[1]).expanduser())
        except OSError as error:
            raise UserError(f"Cannot read {argv[1]}: {error}.") from error
    first, *others = verdict.sentences()
    print(printable(" ".join(first.split())))
    print_paragraphs(others)
    print(to_json(verdict.to_dict()), flush=True)
    if verdict.problems:
        sys.exit(1)


def check(path: pathlib.Path) -> Verdict:
    """Compares the files of a run with each other.

    Args:
        path: A folder, or one file.

    Raises:
        UserError: If there is nothing to check, or the folder has several runs.
    """
    files, left_over = _files(path)
    verdict, read = Verdict(), {}
    for name, file in files.items():
        try:
            read[name] = _read(file)
        except Exception as error:  # The file may have any content.
            reason = " ".join(str(error).split())[:300].rstrip(".")
            verdict.files[name] = f"is damaged, edited, or no file of a run: {reason}"
    whole = {name: record for name, record in read.items() if record and record.data}
    against = next((name for name in (records.FILE, MODEL, *whole) if name in whole), None)
    verdict.record = whole.get(against)
    for name, record in read.items():
        try:
            reason = _disagreement(name, files[name], record, against, verdict)
        except Exception as error:
            reason = f"cannot be compared: {error}"
        verdict.files[name] = reason or _AGREES
    verdict.problems += [f"{name} {why}" for name, why in verdict.files.items() if why not in _FINE]
    verdict.problems += [f"{name} is left of unfinished work" for name in left_over]
    if path.is_dir():
        if records.FILE not in files:
            verdict.problems.append(f"{records.FILE} is missing: ask for the whole folder")
        _note_unchecked(path, files, verdict)
    else:
        verdict.unchecked.append("The other files of the run: only this one was given")
    if MODEL in files:
        verdict.unchecked.append(
            f"How {MODEL} computes, its architecture: only its weights were compared"
        )
    if verdict.record and not verdict.record.is_releasable:
        verdict.problems += verdict.record.problems or ["epsilon is infinite"]
    return verdict


def _files(path):
    """Returns a dict from names to the files to check, and folders of unfinished work."""
    if path.is_file():
        return {path.name: path}, ()
    if not path.is_dir():
        raise UserError(f"There is no file or folder {path}. Give the folder of a run, or a file.")
    files, left_over = files_below(path)
    files += [path / name for name in (*_TEXTS, page.FILE) if (path / name).exists()]
    runs = [str(file.parent) for file in files if file.name == records.FILE]
    if runs and path / records.FILE not in files:
        raise UserError(f"The runs lie in folders of {path}. Give one: {', '.join(runs)}.")
    if not files and not left_over:
        raise UserError(f"Nothing in {path} can be checked. Give the folder of a finished run.")
    names = ([str(file.relative_to(path)) for file in paths] for paths in (files, left_over))
    return {name: path / name for name in sorted(next(names))}, next(names)


def _read(file):
    """Returns the `Record` in a file; None for a text. A damaged file may raise any exception."""
    if file.name in _TEXTS:
        return None
    record = page.record_in(file.read_bytes()) if file.suffix == ".html" else record_in(file)
    if file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            if (entry := archive.testzip()) is not None:
                raise ValueError(f"Its entry {entry} is not what was saved.")
    if record.data is not None:
        page.page(record, {})  # Raises an error if a value has the wrong type for its words.
    return record


def _disagreement(name, file, record, against, verdict):
    """Returns the problem of a file; None if it agrees with the record of `against`."""
    held = verdict.record
    if held is None:
        what = "is a text alone" if record is None else "has a ledger alone, without data and delta"
        return f"{what}, so that nothing can be checked: ask for the folder of its run"
    if record is None:
        text = file.read_bytes().decode("utf-8", "replace")
        return _difference(_TEXTS[file.name](held), text, file, verdict)
    if record.data is None:
        if record.ledger == held.ledger:
            return None
        return f"has another ledger than {against}: it is of another run, or was trained on"
    if record.fingerprint != held.fingerprint:
        ours, theirs = dataclasses.asdict(held), dataclasses.asdict(record)
        differing = [key for key in ours if ours[key] != theirs[key] and key != "weights"]
        return (
            f"and {against} are of different runs, or one was edited: they differ in "
            f"{', '.join(differing)}"
        )
    if file.suffix == ".json":
        return _misstated(file.read_bytes(), held)
    if file.suffix != ".html":
        return None
    recorded, shown, text = page.take_apart(file.read_bytes())
    beside = {} if against == name else page.pictures_of(file.parent)
    if changed := [key for key in beside if beside[key] != shown.get(key)]:
        return f"does not show the pictures beside it: {', '.join(changed)}"
    if alone := ", ".join(sorted(shown.keys() - beside.keys())):
        verdict.unchecked.append(f"Pictures on {name}, because they are not beside it: {alone}")
    ours = page.take_apart(page.page(held, shown))[2].decode("utf-8", "replace")
    text = text.decode("utf-8", "replace")
    return _misstated(recorded, held) or _difference(ours, text, file, verdict)


def _misstated(content, record):
    """Returns the problem if numbers of a JSON record do not follow from its ledger; else None."""
    stated, ours = (json.loads(text)["derived"] for text in (content, record.to_json()))
    names = ours if _is_of_this_version(record) else ("epsilon", "delta")
    wrong = [n for n in names if n in stated and not _is_close(stated[n], ours[n])]
    if not wrong:
        return None
    return f"states numbers that do not follow from its ledger: {', '.join(wrong)}"


def _is_close(one, other):
    """Returns whether two JSON values are equal up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(one[k], other[k]) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3)
    return one == other


def _is_of_this_version(record):
    """Returns whether a record is of the versions that determine the words of texts."""
    return all(record.versions.get(n) == _VERSIONS[n] for n in ("tfdpx", "dp-accounting"))


def _difference(ours, theirs, file, verdict):
    """Returns the first difference between a text and the text of the record; else None.

    A text by another version may have other words, but must state the same epsilon.
    """
    ours = ours.encode("utf-8", "backslashreplace").decode()  # Encoded as in the file.
    theirs = theirs.replace("\r\n", "\n")
    if ours == theirs:
        return None
    pairs = enumerate(itertools.zip_longest(ours, theirs))
    at = next(i for i, (one, other) in pairs if one != other)
    says, expected = (" ".join(t[max(0, at - 40) : at + 40].split()) for t in (theirs, ours))
    claims = (itertools.chain(*_CLAIM.findall(" ".join(t.split()))) for t in (ours, theirs))
    pairs = itertools.zip_longest(*(map(float, claim) for claim in claims), fillvalue=0.0)
    is_same = all(math.isclose(*pair, rel_tol=1e-3) for pair in pairs)
    if _is_of_this_version(verdict.record) or not is_same:
        return f"was edited, or is of another run: it has '{says}' in place of '{expected}'"
    verdict.unchecked.append(
        f"The words of {file.name}: tfdpx {verdict.record.versions.get('tfdpx')} made it, not this "
        f"version. It has '{says}' in place of '{expected}'"
    )
    return _SAME_EPSILON


def _note_unchecked(folder, files, verdict):
    """Notes the files of a folder that were not checked."""
    if MODEL not in files:
        verdict.unchecked.append(f"Weights: there is no {MODEL}")
    compared = {folder / name for name in page.pictures_of(folder) if page.FILE in files}
    unchecked_files = (
        {file for file in folder.rglob("*") if file.is_file()} - compared - {*files.values()}
    )
    if names := sorted({file.relative_to(folder).parts[0] for file in unchecked_files}):
        verdict.unchecked.append(f"Other files or folders: {', '.join(names)}")


if __name__ == "__main__":
    app.run(main)
