"""The person of each image of a folder, by the names of files."""

import os
import re

from tfdpx.sampling.users import spelling
from tfdpx.train.errors import UserError, printable

PARENT_FOLDER = "parent_folder"


class People:
    """The people whose images a folder holds.

    Args:
        user: "parent_folder", or a regular expression that is searched for in the path of a file
            below `path`, with "/" between folders: its group, or all of it, is the person.
        path: `pathlib.Path` of the folder that holds a folder for each class.

    Raises:
        UserError: If `user` is no regular expression, or one of several groups.
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

    def of(self, file):
        """Returns the person of a file, bytes; names that are spelled alike are one person.

        Raises:
            UserError: If its path does not say.
        """
        relative = file.relative_to(self._path)
        if self._pattern:
            match = self._pattern.search(relative.as_posix())
            person = match and match[self._pattern.groups]
            why = "its path does not match"
        else:
            # Deeper down it is unknown which of the folders is the person.
            person = relative.parent.name if len(relative.parts) == 3 else None
            why = "the path is not CLASS/PERSON/NAME"
        if not person:
            raise UserError(
                f"Flag --user must say whose each image is. Received: --user={self._user}, and of "
                f"{printable(relative)} {why}."
            )
        return os.fsencode(spelling(person))
