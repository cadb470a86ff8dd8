"""Damages any byte of a checkpoint's file, which must then be refused or do no harm."""

import io
import zipfile

from hypothesis import strategies as st

from tfdpx import _files as files
from tfdpx.callbacks import Checkpoint

CHECKPOINT = "tfdpx-checkpoint.zip"


@st.composite
def damage(draw, size):
    """Draws a change to about this many bytes, for example a cut or a flipped byte."""
    kind = draw(st.sampled_from(["cut", "flip", "flip", "insert", "remove", "other"]))
    place = draw(st.integers(0, max(size - 1, 0)))
    more = draw(st.binary(min_size=1, max_size=40))
    return kind, place, more


def damaged(content, how):
    """Returns `content` after a `damage`."""
    kind, place, more = how
    place = min(place, max(len(content) - 1, 0))
    if kind == "cut":
        return content[:place]
    if kind == "flip":
        return content[:place] + bytes([content[place] ^ (more[0] or 1)]) + content[place + 1 :]
    if kind == "insert":
        return content[:place] + more + content[place:]
    if kind == "remove":
        return content[:place] + content[place + len(more) :]
    return more


def check_checkpoint(whole, folder, how):
    """A damaged checkpoint is refused, or the saved values are restored.

    Args:
        whole: Path of a folder with a whole checkpoint.
        folder: Path of another folder for the damaged copy.
        how: A `damage`.
    """
    content = (whole / CHECKPOINT).read_bytes()
    (folder / CHECKPOINT).write_bytes(damaged(content, how))
    try:
        record, restored = Checkpoint(folder)._read()
    except ValueError as error:
        assert "is damaged: " in str(error), repr(error)
        return
    saved = parts(content)
    assert record == files.opened(saved.pop("record.json"), record["format"])
    assert restored == saved


def parts(content):
    """Returns `{name: bytes}` of the members of a checkpoint's file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}
