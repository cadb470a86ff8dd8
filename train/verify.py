"""Checks whether the files of a run that you received agree, and who is protected.

    tfdpx verify PATH [--render=FOLDER]

PATH is the folder of a run or one of its files: record.json, model.keras, another file of weights
with a ledger, a file of `Ledger.save`, report.html, model_card.md, or privacy_statement.txt. The
first line of the output begins with YES or NO. If another version of tfdpx wrote a text, the first
line says that the wording of the text was not checked. The next lines list the files and their
problems, the protected people, the strength of the protection, its exceptions, and the fingerprint
of the record. The last line is one JSON object. The exit status is 0 for YES, and 1 otherwise.

The program finds accidents and edits. The files are not signed, so it cannot detect a forger who
makes all of them again. The program only reads the files: Keras neither loads nor runs a model.

With --render=FOLDER, the program makes statement, page and card from the record and writes them to
that folder. Read these files instead of the sender's.
"""

import tfdpx.train.startup  # noqa: F401 - before TensorFlow is imported.

# isort: split

import pathlib
import sys

from absl import flags

from tfdpx.report import report, verify
from tfdpx.train.errors import UserError, in_one_line, printable, start_program
from tfdpx.train.output import print_paragraphs, to_json

_RENDER = flags.DEFINE_string("render", None, "Folder for texts made from the record.")


def main(argv):
    """Checks a path, prints the answer, and exits with 1 unless it is YES."""
    with in_one_line("tfdpx.train.verify"):
        if len(argv) != 2:
            received = " ".join(argv[1:]) or "nothing"
            raise UserError(f"Give one path: tfdpx verify PATH. Received: {received}.")
        try:
            verdict = verify.check(pathlib.Path(argv[1]).expanduser())
            if _RENDER.value and verdict.record:
                report.render(verdict.record, _RENDER.value)
        except (OSError, ValueError) as error:
            raise UserError(f"Cannot verify {argv[1]}: {error}") from error
    first, *others = verdict.sentences()
    print(printable(" ".join(first.split())))
    print_paragraphs(others)
    print(to_json(verdict.to_dict()), flush=True)
    if not verdict.is_yes:
        sys.exit(1)


if __name__ == "__main__":
    start_program(main)
