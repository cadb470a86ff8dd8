"""Finished runs for tests that read them: each is made once a session, on the first request.

All workers share one folder, and a file lock makes the others wait. A test that changes a run
copies it first.
"""

import contextlib
import dataclasses
import fcntl
import io
import json
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

from tfdpx.train import classify, fitting

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
                settings = KINDS[kind](self)
                with _weights_before_averaging(folder / "weights_before_averaging.npz"):
                    _, output = self.run(classify, workdir=folder / "run", **settings)
                (folder / "output.txt").write_text(output, encoding="utf-8")
        return FinishedRun(folder / "run", (folder / "output.txt").read_text(encoding="utf-8"))

    def run(self, program, **flag_values):
        """Runs a program's `main` in this process.

        Args:
            program: Module, for example `tfdpx.train.classify`.
            **flag_values: Values of its flags, for example `steps=3`. Data sets are prepared in
                `data_dir`.

        Returns:
            The record in the last line, and the whole text that it printed.
        """
        if not flags.FLAGS.is_parsed():
            flags.FLAGS(["test"])
        # Flags of the program itself are parsed as text.
        values, shared = flags.FlagValues(), {}
        separate = hasattr(program, "define_flags")
        if separate:
            program.define_flags(values)
        arguments = [program.__name__]
        for name, value in flag_values.items():
            if name in values:
                text = ",".join(map(str, value)) if isinstance(value, list) else value
                arguments.append(f"--{name}={text}")
            else:
                shared[name] = str(value) if isinstance(value, os.PathLike) else value
        values(arguments)
        of_table = str(flag_values.get("dataset")).startswith(("csv:", "parquet:"))
        if "data_dir" in flags.FLAGS and not of_table:
            shared.setdefault("data_dir", self.data_dir)
        output = io.StringIO()
        with contextlib.redirect_stdout(output), flagsaver.flagsaver(**shared):
            program.main([program.__name__], *[values] * separate)
        text = output.getvalue()
        # JSON has neither NaN nor Infinity, though Python reads them.
        return json.loads(text.splitlines()[-1], parse_constant=pytest.fail), text


@contextlib.contextmanager
def _weights_before_averaging(path):
    """Saves the weights of a network at the end of its last epoch."""
    weights, record_row = [], fitting.Curve.on_epoch_end

    def spy(self, epoch, logs=None):
        weights[:] = self.model.get_weights()
        record_row(self, epoch, logs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting.Curve, "on_epoch_end", spy)
        yield
    np.savez(path, *weights)


def _public(runs):
    """One update without privacy, on the digits."""
    return dict(preset="pretrain/digits", dataset="digits", steps=1, schedule="cosine")


def _photos(runs):
    """Four updates on a folder of images, with a seed."""
    own_images.write(runs.photos, {3: 20, 5: 20, 8: 20}, size=8)
    return dict(dataset=f"folder:{runs.photos}", epsilon=8.0, steps=4, seed=SEED)


def _table(runs):
    """A linear model of a table, without a seed."""
    path = runs.folder / "table" / "people.csv"
    own_tables.write(path, own_tables.people(), encoding="utf-8-sig")
    settings = dict(target="bought", epsilon=8.0, bounds=["income/month:0:20000"], model="linear")
    return dict(dataset=f"csv:{path}", **settings)


def _head(runs):
    """A head on the backbone of the run "private"."""
    path = str(runs("private").workdir / "model.keras")
    return dict(head="least_squares", dataset="digits", epsilon=1.0, init_from=path)


# From the kind to the flags of `classify`.
KINDS = {
    "network": lambda runs: NETWORK,  # Six updates with views, a seed and averaged weights.
    "private": lambda runs: TINY,  # Three updates without a seed: the model can be released.
    "public": _public,
    "photos": _photos,
    "table": _table,
    "head": _head,
}
