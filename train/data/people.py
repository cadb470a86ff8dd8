"""Finds the person of each image of a folder from the names of files."""

import collections
import os
import re
import shlex

import numpy as np

from tfdpx.sampling.users import numbered, spelling
from tfdpx.train.errors import UserError, checking_flags, printable

# Values of --user other than regular expressions; the second says that every person has one image.
PARENT_FOLDER, NONE = "parent_folder", "none"
# Match the names of files up to their first separator, and up to their last one.
_PREFIXES = (r"([^-_. /]+)[-_. ][^/]*\.[^./]*$", r"([^/]+)[-_. ][^-_. /]*\.[^./]*$")
_MOST_NAMES = 20  # Number of paths in an error.


class People:
    """The people in a folder of images.

    Args:
        user: "parent_folder", or a regular expression to search for in the path of a file below
            `path`, with "/" between folders. The match of its group, or else of all of it, is the
            person.
        path: `pathlib.Path` of the folder with a folder for each class.

    Raises:
        UserError: If `user` is not a regular expression, or has several groups.
    """

    def __init__(self, user, path):
        self._user, self._path = user, path
        try:
            self._pattern = None if user == PARENT_FOLDER else re.compile(user)
        except re.error as error:
            raise UserError(
                f"Flag --user must be {PARENT_FOLDER} or a regular expression: {error}. Received: "
                f"--user={user}."
            ) from error
        if self._pattern and self._pattern.groups > 1:
            raise UserError(
                "Flag --user must have one group at most, which is the person. Received: "
                f"--user={user}. Write other groups as (?:...)."
            )

    def of(self, files):
        """Returns a dict from each file to its person, bytes in one normal form.

        Args:
            files: List of `pathlib.Path`.

        Raises:
            UserError: If a path names no person, or two names differ only in upper and lower case.
        """
        persons = {file: self._name(file) for file in files}
        if nameless := [file for file, name in persons.items() if not name]:
            paths = [printable(self._relative(file)) for file in nameless[:_MOST_NAMES]]
            paths += ["..."] if len(nameless) > _MOST_NAMES else []
            why = "do not match it" if self._pattern else "are not CLASS/PERSON/NAME"
            raise UserError(
                f"Flag --user must name the person of each image. Received: --user={self._user}, "
                f"and {len(nameless)} of {len(files)} paths {why}: {', '.join(paths)}."
                f"{self._hint(nameless)}"
            )
        persons = {file: os.fsencode(spelling(name)) for file, name in persons.items()}
        with checking_flags():
            numbered(np.array(list(persons.values()), object), len(persons))
        return persons

    def _relative(self, file):
        return file.relative_to(self._path)

    def _name(self, file):
        """Returns the person of a file, a string; None or empty if its path names none."""
        relative = self._relative(file)
        if self._pattern:
            match = self._pattern.search(relative.as_posix())
            return match and match[self._pattern.groups]
        # In deeper folders it is unknown which folder is the person.
        return relative.parent.name if len(relative.parts) == 3 else None

    def _hint(self, nameless):
        """Returns a sentence that suggests to ignore upper and lower case, if that would help."""
        if not self._pattern:
            return ""
        any_case = re.compile(self._user, self._pattern.flags | re.IGNORECASE)
        matching = sum(bool(any_case.search(self._relative(f).as_posix())) for f in nameless)
        if not matching:
            return ""
        return f" Upper and lower case differ in {matching}: --user='(?i){self._user}' takes both."


def suggestion(files, path, num_classes):
    """Returns a sentence if several images seem to be of one person; else an empty string.

    Args:
        files: List of `pathlib.Path`, the images of a run without --user.
        path: `pathlib.Path` of the folder with a folder for each class.
        num_classes: Int.
    """
    for user in (PARENT_FOLDER, *_PREFIXES):
        people = People(user, path)
        names = collections.Counter(filter(None, map(people._name, files)))
        shared = {name: count for name, count in names.items() if count > 1}
        # Numbered images of a class, or of all classes, have names that begin alike, too.
        if len(names) > 2 * num_classes and sum(shared.values()) > len(files) / 2:
            name, count = max(shared.items(), key=lambda item: item[1])
            return (
                f"Several images may be of one person, such as {count} of {printable(name)!r}. "
                "Epsilon then protects one of them alone: to protect people, add "
                f"--user={shlex.quote(user)}."
            )
    return ""
