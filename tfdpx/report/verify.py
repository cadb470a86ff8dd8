"""Checks whether the files of a run agree: makes the texts from the record, and compares bytes.

The files are not signed, so a forger who makes all of them again is not detected. The files are
only read, never changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import re
import zipfile

from tfdpx.accounting import record as records
from tfdpx.accounting.ledger import EMPTY
from tfdpx.accounting.record import Record
from tfdpx.report import card, page, words
from tfdpx.report.report import STATEMENT
from tfdpx.report.spent import MODEL, files_below, record_in, says_what_was_spent

_TEXTS = {STATEMENT: words.statement, card.FILE: card.text}
_FINE = _AGREES, _OTHER_WORDS = "agrees", "words not checked: read ours"
_CLAIM = re.compile(
    r"\(([\d.]+), ([\d.e-]+)\)-differential privacy .{1,99} differ in ([^,]+), added or removed"
)
_OURS = words.version_of(words.worded(Record("verify", None, EMPTY, None)))


@dataclasses.dataclass
class Verdict:
    """The result of `check`: whether the files of a run agree.

    Attributes:
        record: The `Record` that all files are compared with; None if none could be read.
        files: Dict from the name of each file to "agrees" or another text.
        problems: List of the reasons for the answer NO.
        unchecked: List of sentences about things that were not checked.
        is_folder: Bool, whether a whole folder was checked.
        against: String, the name of the file that contains `record`.
    """

    record: Record | None = None
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    unchecked: list[str] = dataclasses.field(default_factory=list)
    is_folder: bool = True
    against: str = ""

    @property
    def other_words(self) -> list[str]:
        """The names of the files with a text that another version of tfdpx wrote."""
        return [name for name, text in self.files.items() if text == _OTHER_WORDS]

    @property
    def is_yes(self) -> bool:
        """Bool, whether all files agree and this version of tfdpx wrote all texts."""
        return not self.problems and not self.other_words

    def sentences(self) -> list[str]:
        """Returns a list of paragraphs. The first one begins with YES or NO."""
        return words.template("verdict.txt").render(verdict=self, fine=_FINE).split("\n")

    def to_dict(self) -> dict[str, object]:
        """Returns the last line that the program prints, a dict of JSON values."""
        record = self.record
        view = record.view() if record else {}
        return {
            "verified": self.is_yes,
            "problems": self.problems,
            "unit": record and words.protected_one(record),
            **{name: view.get(name) for name in ("epsilon", "delta", "attack_bounds")},
            "fingerprint": record and record.fingerprint,
            "files": self.files,
            "not_checked": self.unchecked,
        }


def check(path: pathlib.Path) -> Verdict:
    """Compares the files of a run with each other.

    Args:
        path: A folder, or one file.

    Raises:
        ValueError: If there is nothing to check, or the folder has several runs.
    """
    files, left_over = _files(path)
    verdict = Verdict(is_folder=path.is_dir())
    for name, file in files.items():
        try:
            verdict.files[name] = _answer(name, file, verdict)
        except Exception as error:  # The file may have any content, so any error is possible.
            reason = " ".join(str(error).split())[:300].rstrip(".")
            verdict.files[name] = f"is damaged, edited, or no file of a run: {reason}"
    verdict.problems += [f"{name} {why}" for name, why in verdict.files.items() if why not in _FINE]
    verdict.problems += [f"{name} is left over from unfinished work" for name in left_over]
    if path.is_dir():
        if records.FILE not in files:
            verdict.problems.append(f"{records.FILE} is missing: ask for the whole folder")
        _note_unchecked(path, files, verdict)
    else:
        verdict.unchecked.append("The other files of the run: only this one was given")
    if MODEL in files:
        verdict.unchecked.append(
            f"The rest of {MODEL}, for example its architecture: only its weights were compared"
        )
    if verdict.record:
        verdict.problems += words.listed("problems", verdict.record)
    return verdict


def _files(path):
    """Returns a dict from names to files to check, and the names of unfinished runs' folders."""
    if path.is_file():
        is_text = path.name in _TEXTS or path.suffix in (".html", ".json")
        if not is_text and not says_what_was_spent(path):
            raise ValueError(
                f"The file {path} is no file of a run. Give the folder of a run (unpack it first "
                f"if it is an archive), or its {records.FILE}, {MODEL} or {page.FILE}."
            )
        return {path.name: path}, ()
    if not path.is_dir():
        raise ValueError(f"There is no file or folder {path}. Give the folder of a run, or a file.")
    files, left_over = files_below(path)
    files += [path / name for name in (*_TEXTS, page.FILE) if (path / name).exists()]
    runs = [str(file.parent) for file in files if file.name == records.FILE]
    if runs and path / records.FILE not in files:
        raise ValueError(f"The runs lie in folders of {path}. Give one: {', '.join(runs)}.")
    if not files and not left_over:
        raise ValueError(f"Nothing in {path} can be checked. Give the folder of a finished run.")
    # All files are compared with the first record that is complete.
    first = [path / name for name in (records.FILE, MODEL, page.FILE)]
    files.sort(key=lambda file: (first.index(file) if file in first else len(first), file))
    names = ([str(file.relative_to(path)) for file in paths] for paths in (files, left_over))
    return {name: path / name for name in next(names)}, next(names)


def _answer(name, file, verdict):
    """Compares a file with the record of the run. Returns "agrees" or describes the difference.

    The first record that can be read is the record of the run. A damaged file may raise any
    exception.
    """
    held = verdict.record
    if file.name in _TEXTS:
        if held is None:
            return "is only a text, so nothing can be checked: ask for the folder of its run"
        text = _TEXTS[file.name](held).encode("utf-8", "backslashreplace")
        return _compared(text, file.read_bytes(), held)
    is_page = file.suffix == ".html"
    record = page.record_in(file.read_bytes()) if is_page else record_in(file)
    if file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            if (entry := archive.testzip()) is not None:
                raise ValueError(f"Its entry {entry} is not what was saved.")
    if record.data is None:
        if held is None:
            return "has only a ledger, without data and delta: ask for the folder of its run"
        if record.ledger == held.ledger:
            return _AGREES
        return f"has another ledger than {verdict.against}: it is of another run, or was trained on"
    page.page(record, {})  # Raises an error if a value has the wrong type for its sentence.
    if held is None:
        held = verdict.record = record
        verdict.against = name
    if record.fingerprint != held.fingerprint:
        ours, theirs = dataclasses.asdict(held), dataclasses.asdict(record)
        differing = [key for key in ours if ours[key] != theirs[key]]
        return (
            f"and {verdict.against} are of different runs, or one was edited: they differ in "
            f"{', '.join(differing)}"
        )
    if file.suffix == ".json":
        return _misstated(file.read_bytes(), held) or _AGREES
    if not is_page:
        return _AGREES
    recorded, shown, text = page.take_apart(file.read_bytes())
    beside = page.pictures_of(file.parent) if verdict.is_folder else {}
    if changed := [key for key in beside if beside[key] != shown.get(key)]:
        return f"does not show the pictures in its folder: {', '.join(changed)}"
    if alone := ", ".join(sorted(shown.keys() - beside.keys())):
        verdict.unchecked.append(f"Pictures on {name}, because they are not in its folder: {alone}")
    ours = page.take_apart(page.page(held, shown))[2]
    return _misstated(recorded, held) or _compared(ours, text, held)


def _misstated(content, record):
    """Returns an error if numbers in a JSON record contradict the record's ledger, else None."""
    stated, ours = (json.loads(text)["derived"] for text in (content, record.to_json()))
    names = ours if words.version_of(record) == _OURS else ("epsilon", "delta", "neighbours")
    wrong = [n for n in names if n in stated and not _is_close(stated[n], ours[n])]
    if not wrong:
        return None
    return f"states numbers that do not follow from its ledger: {', '.join(wrong)}"


def _is_close(one, other):
    """Returns whether two JSON values are equal up to rounding."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_is_close(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_is_close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-3)
    return one == other


def _compared(ours, theirs, record):
    """Compares a file's text with the text that this version of tfdpx makes from the record.

    If another version wrote the file, only epsilon, delta and unit are compared. Returns the
    result as a sentence.

    Args:
        ours: Bytes, the text that this version makes.
        theirs: Bytes, the text in the file.
        record: `Record`.
    """
    theirs = theirs.replace(b"\r\n", b"\n")
    if words.version_of(record) == _OURS:
        return _AGREES if ours == theirs else "was edited, or is of another run"
    texts = (" ".join(text.decode("utf-8", "replace").split()) for text in (ours, theirs))
    claim, stated = map(_CLAIM.search, texts)
    if claim and stated:
        numbers = zip(claim.groups()[:2], stated.groups()[:2], strict=True)
        are_close = all(_is_close(float(one), float(other)) for one, other in numbers)
        if not are_close or claim[3] != stated[3]:
            return f"states what its record does not: {stated[0]}"
    return _OTHER_WORDS


def _note_unchecked(folder, files, verdict):
    """Adds sentences to `verdict.unchecked` about the files of a folder that were not checked."""
    if MODEL not in files:
        verdict.unchecked.append(f"Weights: there is no {MODEL}")
    compared = {folder / name for name in page.pictures_of(folder) if page.FILE in files}
    unchecked_files = (
        {file for file in folder.rglob("*") if file.is_file()} - compared - {*files.values()}
    )
    if names := sorted({file.relative_to(folder).parts[0] for file in unchecked_files}):
        verdict.unchecked.append(f"Other files or folders: {', '.join(names)}")
