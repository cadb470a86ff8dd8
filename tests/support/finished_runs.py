"""Finished runs for tests that read them: each is made once a session, on the first request.

All workers share one folder, and a file lock makes the others wait. A test that changes a run
copies it first.
"""

import contextlib
import dataclasses
import fcntl
import io
import os
import pathlib
import shutil
import typing

import numpy as np
import own_images
import own_tables
import pytest
from absl import flags
from absl.testing import flagsaver

SEED = 918_273_645
NETWORK = dict(
    model="small_cnn", steps=6, report_every=4, batch_size=64, augmult=2, seed=3,
    augment="RandomCropFlip:padding=1,flip=false",
)  # fmt: skip
TINY = dict(model="small_cnn", steps=3, batch_size=64, noise_multiplier=0.82)


class FinishedRun(typing.NamedTuple):
    """A run that has ended.

    Attributes:
        workdir: `pathlib.Path`, its folder.
        output: String, the text that it printed.
    """

    workdir: pathlib.Path
    output: str


@dataclasses.dataclass(frozen=True)
class FinishedRuns:
    """The finished runs of a session.

    Attributes:
        folder: `pathlib.Path`, shared by all workers.
    """

    folder: pathlib.Path

    @classmethod
    def of_session(cls, tmp_path_factory):
        """Returns the runs of all workers of a session."""
        base = tmp_path_factory.getbasetemp()
        return cls((base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "finished")

    @property
    def data_dir(self):
        """String, the folder of prepared data sets."""
        return str(self.folder / "data")

    @property
    def photos(self):
        """`pathlib.Path`, the images that the run "photos" is trained on."""
        return self.folder / "photos" / "images" / "digits"

    def __call__(self, kind):
        """Returns the run of a kind, and makes it if no worker has.

        Args:
            kind: String, one of `KINDS`, for example "private".

        Returns:
            A `FinishedRun`.
        """
        folder = self.folder / kind
        folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"{kind}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "output.txt").exists():
                shutil.rmtree(folder)  # A test before this one may have failed to make it.
                folder.mkdir()
                output = KINDS[kind](self, folder)
                (folder / "output.txt").write_text(output, encoding="utf-8")
        return FinishedRun(folder / "run", (folder / "output.txt").read_text(encoding="utf-8"))


def run(program, workdir, **settings):
    """Runs a program's `main` in this process.

    Args:
        program: Module, for example `tfdpx.train.classify`.
        workdir: `pathlib.Path`.
        **settings: Values of its flags, for example `steps=3`.

    Returns:
        String, the text that it printed.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS(["test"])
    output = io.StringIO()
    with contextlib.redirect_stdout(output), flagsaver.flagsaver(workdir=str(workdir), **settings):
        program.main([program.__name__])
    return output.getvalue()


def _network(runs, folder):
    """Six updates of a network with views, a seed and averaged weights."""
    from tfdpx.train import classify, fitting

    weights, record_row = [], fitting.Curve.on_epoch_end

    def spy(self, epoch, logs=None):
        weights[:] = self.model.get_weights()
        record_row(self, epoch, logs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting.Curve, "on_epoch_end", spy)
        output = run(classify, folder / "run", data_dir=runs.data_dir, **NETWORK)
    np.savez(folder / "weights_before_averaging.npz", *weights)
    return output


def _private(runs, folder):
    """Three updates without a seed: the model can be released."""
    from tfdpx.train import classify

    return run(classify, folder / "run", data_dir=runs.data_dir, **TINY)


def _public(runs, folder):
    """One update without privacy, on the digits."""
    from tfdpx.train import classify

    settings = dict(preset="pretrain/digits", dataset="digits", steps=1, schedule="cosine")
    return run(classify, folder / "run", data_dir=runs.data_dir, **settings)


def _photos(runs, folder):
    """Four updates on a folder of images, with a seed."""
    from tfdpx.train import classify

    own_images.write(runs.photos, {3: 20, 5: 20, 8: 20}, size=8)
    settings = dict(epsilon=8.0, steps=4, seed=SEED)
    return run(classify, folder / "run", dataset=f"folder:{runs.photos}", **settings)


def _table(runs, folder):
    """A linear model of a table, without a seed."""
    from tfdpx.train import classify

    path = own_tables.write(folder / "people.csv", own_tables.people(), encoding="utf-8-sig")
    settings = dict(target="bought", epsilon=8.0, bounds=["income/month:0:20000"], model="linear")
    return run(classify, folder / "run", dataset=f"csv:{path}", **settings)


def _head(runs, folder):
    """A head on the backbone of the run "private"."""
    from tfdpx.train import classify

    settings = dict(head="least_squares", dataset="digits", epsilon=1.0, data_dir=runs.data_dir)
    path = str(runs("private").workdir / "model.keras")
    return run(classify, folder / "run", init_from=path, **settings)


KINDS = {
    "network": _network,
    "private": _private,
    "public": _public,
    "photos": _photos,
    "table": _table,
    "head": _head,
}
