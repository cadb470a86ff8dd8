"""Whose each image of a folder is, by the names of files, and a split that parts no person."""

import hashlib
import os
import re

from tfdpx.train.config.errors import UserError
from tfdpx.train.data import image_files

PARENT_FOLDER = "parent_folder"


class People:
    """Whose images a folder holds.

    Args:
        user: "parent_folder", or a regular expression that is searched for in the path of a file
            below `path`, with "/" between folders: its first group, or all of it, is the person.
        path: `pathlib.Path` of the folder.
        classes: Depth of the folders of classes below `path`, an int.

    Raises:
        UserError: If `user` is no regular expression.
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

    def of(self, file):
        """The person whose a file is, a string.

        Raises:
            UserError: If its name does not say.
        """
        relative = file.relative_to(self._path)
        if self._pattern is None:
            person = relative.parent.name if len(relative.parts) > self._classes + 1 else ""
            why = "it is in no folder of a person, as PATH/CLASS/PERSON/NAME"
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

        People are taken to test on in the order of a hash of their names, up to `fraction` of all
        images, but for those without whom a class would have no image to train on.
        """
        of_person = {}
        for name, files in found.items():
            for file in files:
                of_person.setdefault(self.of(file), []).append((name, file))

        def key(person):
            return hashlib.blake2b(person, salt=seed.to_bytes(16, "little")).digest()

        left = {name: len(files) for name, files in found.items()}
        room, tested = fraction * sum(left.values()), set()
        for person in sorted(of_person, key=key):
            mine = [name for name, _ in of_person[person]]
            if len(mine) > room or any(left[name] <= mine.count(name) for name in mine):
                continue
            room -= len(mine)
            tested.add(person)
            for name in mine:
                left[name] -= 1
        splits = {"train": {name: [] for name in found}, "test": {name: [] for name in found}}
        for person, pairs in of_person.items():
            for name, file in pairs:
                splits["test" if person in tested else "train"][name].append(file)
        return splits
