r"""Pre-trains an image classifier without privacy, for fine-tuning, on public images.

    python -m tfdpx.train.pretrain --recipe=imagenet32 --workdir=/tmp/pretrained
    python -m tfdpx.train.classify --preset=table15/eps1 --init_from=/tmp/pretrained/model.keras

The recipe gives every setting; flags win over it. The working directory receives `model.keras`,
which `--init_from` of `classify` reads, `record.json`, of which the last line of the standard
output is a view, and `report.html`, a page of it with its pictures. Ctrl-C ends a run after the
update under way, saved; it resumes with --workdir=PATH --resume and no other flag. Training takes
one device.
"""

import dataclasses
import math
import pathlib
import sys
import time

import keras
from absl import app, flags

from tfdpx import noise
from tfdpx.accounting import record as records
from tfdpx.accounting.record import Record
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples
from tfdpx.train.config import pretraining, run_flags, setting_flags
from tfdpx.train.config.training import Training
from tfdpx.train.data import identity, images
from tfdpx.train.errors import UserError, checking_flags, in_one_line
from tfdpx.train.report import page
from tfdpx.train.report.record import print_table, to_json
from tfdpx.train.run import (
    checkpoint,
    classifiers,
    devices,
    evaluation,
    finetuning,
    image_input,
    interruption,
    optimization,
    provenance,
    results,
)

_RECIPE = flags.DEFINE_string(
    "recipe", "digits", f"Settings to start from, one of: {', '.join(pretraining.RECIPES)}."
)
# Besides the flags of private training, which name what does not belong here.
for _name in setting_flags.define(pretraining.Pretraining):
    flags.declare_key_flag(_name)


def main(argv):
    """Runs the training that the flags describe; errors of the user become one line."""
    with in_one_line("tfdpx.train.pretrain", argv):
        given = _given()
        base = ("recipe", None if flags.FLAGS["recipe"].using_default_value else _RECIPE.value)
        settings = checkpoint.resumed(pretraining.Pretraining, base, given)
        settings = settings or pretraining.resolve(_RECIPE.value, given)
        path = run_flags.WORKDIR.value or time.strftime(f"runs/{_RECIPE.value}-%Y%m%d-%H%M%S")
        ending = interruption.ending_in_a_line("pretrain", path)
        with ending, run_flags.leaving_no_empty_folder(pathlib.Path(path)):
            workdir = run_flags.make_workdir(path)
            record = train(settings, workdir)
    print(to_json(record), flush=True)


def train(settings, workdir):
    """Trains, writes the model and returns the report, a dict.

    Args:
        settings: A `pretraining.Pretraining`.
        workdir: `pathlib.Path`.
    """
    classifiers.check_name(settings.model)
    asked_for = checkpoint.asked(_RECIPE.value, settings)
    settings = finetuning.check(settings)
    seen = provenance.seen_by(provenance.files(settings), settings.init_data)
    resume, determined_by = run_flags.RESUME.value, dataclasses.asdict(settings)
    folder = checkpoint.RunFolder(workdir, determined_by, resume, asked=asked_for)
    data = images.load_for(settings, run_flags.DATA_DIR.value, run_flags.DOWNLOAD.value)
    print(*data.notes, sep="\n", end="\n" * bool(data.notes))
    saved = checkpoint.LastState(folder, settings.steps)
    keras.utils.set_random_seed(folder.seeds["initial_weights"])
    keras.config.set_dtype_policy(settings.precision)
    model = finetuning.build(settings, data)
    optimization.add_weight_decay(model, settings.weight_decay)
    model.compile(
        optimizer=keras.optimizers.SGD(
            optimization.learning_rates(settings), momentum=settings.momentum
        ),
        loss=optimization.crossentropy(settings.label_smoothing),
        weighted_metrics=["accuracy"],
        jit_compile=settings.keras_jit_compile,
    )
    saved.restore(model)
    start = int(model.optimizer.iterations)
    epoch = min(settings.report_every, settings.steps)
    began = time.perf_counter()
    ending = interruption.SavingInterruption(saved.save)
    with ending.waiting():
        history = model.fit(
            _batches(settings, data, folder.seeds["sampling"], start),
            initial_epoch=start // epoch,
            epochs=math.ceil(settings.steps / epoch),
            steps_per_epoch=epoch,
            validation_data=evaluation.batches(data),
            callbacks=[saved, ending, _StopAfter(settings.steps)],
            shuffle=False,
            verbose=1 if sys.stdout.isatty() else 2,
        )
    seconds = time.perf_counter() - began

    steps = int(model.optimizer.iterations)
    model = devices.on_one_device(model)
    measured = evaluation.measure(model, data)
    found = {
        "test_accuracy": measured.accuracy if data.eval_split == "test" else None,
        "validation_accuracy": measured.accuracy if data.eval_split == "validation" else None,
        "top5_accuracy": measured.top5_accuracy,
        "loss": history.history["loss"][-1],
        "model": settings.model,
        "parameters": model.count_params(),
        "steps": steps,
        "batch_size": settings.batch_size,
        "seconds": seconds,
    }
    record = Record(
        program="pretrain",
        data=identity.of(settings.dataset, data.num_train),
        ledger=provenance.not_private(steps),
        delta=None,
        seen=seen,
        inputs=image_input.of(data),
        settings=provenance.without_secrets(settings),
        results=found,
    )
    results.save_model(model, record, workdir)
    record.save(workdir / records.FILE)
    shown = (measured.labels, measured.predictions, workdir, settings.public_test)
    results.draw_measured(data, *shown)
    page.write_page(workdir)
    report = {**record.view(), "workdir": str(workdir)}
    print_table(report, title=f"{settings.model} on {data.name}, not private")
    folder.remove()
    return report


class _StopAfter(keras.callbacks.Callback):
    """Ends the last epoch, which may be shorter, where the training ends."""

    def __init__(self, steps):
        super().__init__()
        self._steps = steps

    def on_train_batch_end(self, batch, logs=None):
        del batch, logs
        self.model.stop_training = int(self.model.optimizer.iterations) >= self._steps


def _batches(settings, data, seed, start):
    """Batches of a new permutation every epoch, with random views in place of the images."""
    augment, key = optimization.augmentation(settings), noise.make_seed(seed)

    def views(step, batch):
        choices = augment.draw(settings.batch_size, 1, noise.fold_in(key, step))
        return (augment.apply(batch[0], choices)[:, 0], *batch[1:])

    with checking_flags():
        dataset = sampled_batches.shuffled_sampler(
            as_examples(data.train_x, data.train_y),
            batch_size=settings.batch_size,
            capacity=settings.batch_size,
            steps=settings.steps,
            seed=seed,
            start=start,
        ).dataset()
        return dataset if augment is None else dataset.enumerate(start).map(views).prefetch(1)


def _given():
    values = setting_flags.given(Training) | setting_flags.given(pretraining.Pretraining)
    if values["decay_steps"] is not None:
        try:
            values["decay_steps"] = [int(step) for step in values["decay_steps"]]
        except ValueError:
            raise UserError(
                "Flag --decay_steps must be whole numbers. Received: --decay_steps="
                f"{','.join(values['decay_steps'])}."
            ) from None
    return values


if __name__ == "__main__":
    app.run(main)
