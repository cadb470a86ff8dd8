"""Whose each image of a folder is, by the names of files, and a split that parts no person."""

import hashlib
import os
import re

from tfdpx.sampling.users import spelling
from tfdpx.train.data import image_files
from tfdpx.train.errors import UserError

PARENT_FOLDER = "parent_folder"


class People:
    """Whose images a folder holds.

    Args:
        user: "parent_folder", or a regular expression that is searched for in the path of a file
            below `path`, with "/" between folders: its group, or all of it, is the person.
        path: `pathlib.Path` of the folder.
        classes: Depth of the folders of classes below `path`, an int.

    Raises:
        UserError: If `user` is no regular expression, or one of several groups.
    """

    def __init__(self, user, path, classes):
        self._user, self._path, self._classes = user, path, classes
        try:
            self._pattern = None if user == PARENT_FOLDER else re.compile(user)
        except re.error as error:
            raise UserError(
                f"Flag --user must be {PARENT_FOLDER} or a regular expression: {error}. Received: "
                f"--user={user}."
            ) from error
        if self._pattern is not None and self._pattern.groups > 1:
            raise UserError(
                "Flag --user must have one group at most, which is the person. Received: "
                f"--user={user}. Write other groups as (?:...)."
            )

    def of(self, file):
        """The person whose a file is, a string.

        Raises:
            UserError: If its name does not say.
        """
        relative = file.relative_to(self._path)
        if self._pattern is None:
            # Deeper down nobody knows which of the folders is the person.
            person = relative.parent.name if len(relative.parts) == self._classes + 2 else ""
            why = "the path is not CLASS/PERSON/NAME"
        else:
            found = self._pattern.search(relative.as_posix())
            person = found and (found[1] if self._pattern.groups else found[0])
            why = "its path does not match"
        if not person:
            raise UserError(
                f"Flag --user must say whose each image is. Received: --user={self._user}, and of "
                f"{image_files.printable(relative)} {why}."
            )
        return os.fsencode(person)

    def part(self, found, fraction, seed):
        """Two splits of `found`, a dict from class to files, each such a dict: no person in both.

        Whether a person is tested on follows from the seed and the name alone: one person more or
        less moves no other.

        Raises:
            UserError: If nothing is left to train on of a class.
        """
        splits = {"train": {name: [] for name in found}, "test": {name: [] for name in found}}
        for name, files in found.items():
            for file in files:
                split = "test" if self._is_tested(file, fraction, seed) else "train"
                splits[split][name].append(file)
        if empty := [name for name, files in splits["train"].items() if not files]:
            raise UserError(
                f"Flag --test_seed={seed} has all people with images of class {empty[0]} tested "
                "on. Give another, or a smaller --test_fraction."
            )
        return splits

    def _is_tested(self, file, fraction, seed):
        salt = seed.to_bytes(16, "little")
        # Spelled alike, and so refused, they must not be parted: nobody would see it.
        name = spelling(self.of(file)).encode("utf-8", "surrogateescape")
        digest = hashlib.blake2b(name, digest_size=8, salt=salt).digest()
        return int.from_bytes(digest, "big") < fraction * 2**64
