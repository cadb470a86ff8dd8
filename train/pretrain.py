r"""Pre-trains an image classifier without privacy, for fine-tuning, on public images.

    python -m tfdpx.train.pretrain --recipe=imagenet32 --workdir=/tmp/pretrained
    python -m tfdpx.train.classify --preset=table15/eps1 --init_from=/tmp/pretrained/model.keras

A recipe has every setting, and flags override it. Recipes follow De et al. 2022 (arXiv:2204.13650),
appendix C.3. The working directory receives `model.keras` for `--init_from` of `classify`,
`record.json`, which is also the last line of the standard output, and `report.html`, a page with
pictures. Ctrl-C ends a run after the current update, and saves it; --workdir=PATH --resume without
other flags continues. Training uses one device.
"""

import tfdpx.train.quiet_start  # noqa: F401 - before TensorFlow is imported.

# isort: split

import dataclasses
import math
import sys
import time

import keras
from absl import app, flags

from tfdpx import _files as files
from tfdpx import noise
from tfdpx._keras import saving_internals
from tfdpx.report import measure, report
from tfdpx.sampling import sampled_batches
from tfdpx.sampling.examples import as_examples
from tfdpx.train import classifiers, devices, output
from tfdpx.train.data import identity, images, inputs
from tfdpx.train.errors import UserError, checking_flags, in_one_line, parse_flags
from tfdpx.train.fitting import augmentation, crossentropy
from tfdpx.train.resume import RunFolder, SavingInterruption, facts, resumed, working_folder
from tfdpx.train.run_flags import DATA_DIR, DOWNLOAD, WORKDIR, define, given
from tfdpx.train.settings import NOT_NEGATIVE, Check, Conflict, RunSettings, Settings, setting
from tfdpx.train.start_from import Start, not_private, without_secrets

# Values that recipes leave out.
_DEFAULTS = dict(momentum=0.9, weight_decay=0.0, report_every=1000)
RECIPES = {
    "digits": dict(
        dataset="digits", model="small_cnn", batch_size=128, steps=600, learning_rate=0.05,
        weight_decay=5e-4, schedule="cosine", warmup_steps=50,
    ),
    "cifar100": dict(
        dataset="cifar100", model="wrn_40_4", batch_size=128, steps=100_000, learning_rate=0.1,
        weight_decay=5e-4, schedule="step", decay_steps=[50_000, 75_000], augment_padding=4,
        augment_flip=True,
    ),
    # The paper holds 10,000 images out (Table 11).
    "imagenet32": dict(
        dataset="imagenet32", validation=10_000, model="wrn_28_10", batch_size=1024, steps=240_000,
        learning_rate=0.3, weight_decay=5e-5, augment_padding=4, augment_flip=True,
    ),
    # For JFT-300M, which is not public: --dataset and --steps (10 epochs) must be set.
    "jft": dict(
        model="nf_resnet_50", batch_size=1024, learning_rate=0.4, weight_decay=1e-6,
        schedule="cosine", warmup_steps=5_000, image_size=224, augment_resize=1.2,
        augment_flip=True,
    ),
}  # fmt: skip
# Flags with a default: the recipe, and the flags of programs that train on several devices.
_NO_SETTINGS = ("recipe", "strategy", "tpu", "cpu_devices")


def _rise(steps):
    """Returns whether all are whole numbers, or texts of these, in rising order."""
    if not all(str(step).isdecimal() for step in steps):
        return False
    return all(int(a) < int(b) for a, b in zip([0, *steps], steps, strict=False))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pretraining(RunSettings):
    """The settings of a run of `pretrain`. Each field is a flag with the same name.

    `momentum` and `weight_decay` are for SGD: `weight_decay` times the weight is added to the
    gradient of every weight, before the momentum.

    Raises:
        UserError: If a value is out of range, or values contradict each other.
    """

    schedule: str = setting(
        "How the learning rate changes: not; to a tenth after each of --decay_steps; or up from 0 "
        "over --warmup_steps and then down to 0 at the end.",
        choices=("constant", "step", "cosine"),
        default="constant",
    )
    warmup_steps: int = setting(
        "Updates of the rise before --schedule=cosine falls.", NOT_NEGATIVE, default=0
    )
    decay_steps: list = setting(
        "Updates after which --schedule=step takes a tenth.",
        Check(_rise, "be whole numbers that rise from above 0"),
        default_factory=list,
    )

    conflicts = (
        *RunSettings.conflicts,
        Conflict(
            lambda s: (
                bool(s.decay_steps) != (s.schedule == "step")
                or (s.warmup_steps and (s.schedule != "cosine" or s.warmup_steps >= s.steps))
            ),
            "schedule decay_steps warmup_steps steps",
            "Flag --schedule=step needs --decay_steps, and no other schedule has them; "
            "--warmup_steps belong to --schedule=cosine and must lie below --steps.",
        ),
    )


_RECIPE = flags.DEFINE_string(
    "recipe", "digits", f"Settings to start from, one of: {', '.join(RECIPES)}."
)
define(Pretraining)  # Flags of private training are defined, too, for errors.
for _name in ("dataset", "model", "steps", "batch_size", "learning_rate", "workdir", "resume"):
    flags.declare_key_flag(_name)


def main(argv):
    """Runs the training that the flags describe; errors of the user become one line."""
    with in_one_line("tfdpx.train.pretrain", argv):
        asked = given(Settings) | given(Pretraining)
        chosen = [name for name in _NO_SETTINGS if not flags.FLAGS[name].using_default_value]
        asked |= {name: flags.FLAGS[name].value for name in chosen}
        base = ("recipe", asked.pop("recipe", None))
        settings = resumed(Pretraining, base, asked) or resolve(_RECIPE.value, asked)
        path = WORKDIR.value or time.strftime(f"runs/{_RECIPE.value}-%Y%m%d-%H%M%S")
        with working_folder("pretrain", path) as workdir:
            record = train(settings, workdir)
    print(output.to_json(record), flush=True)


def resolve(recipe, overrides):
    """Returns the `Pretraining` of a recipe with some values replaced.

    Args:
        recipe: One of `RECIPES`.
        overrides: Dict from names of flags to values; None means not set.

    Raises:
        UserError: If there is no such recipe, a value is out of range, or a flag is for private
            training or several devices.
    """
    if recipe not in RECIPES:
        raise UserError(
            f"There is no recipe {recipe!r}. Received: --recipe={recipe}. Use one of: "
            f"{', '.join(RECIPES)}."
        )
    overrides = {name: value for name, value in overrides.items() if value is not None}
    foreign = sorted(set(overrides) - {field.name for field in dataclasses.fields(Pretraining)})
    if foreign:
        raise UserError(
            "Pre-training is not private, takes one view of each image, and runs on one device: "
            f"leave out {', '.join('--' + name for name in foreign)}."
        )
    values = {**_DEFAULTS, **RECIPES[recipe], **overrides}
    for name in ("dataset", "model", "batch_size", "steps", "learning_rate"):
        if name not in values:
            raise UserError(f"Flag --{name} must be given: the recipe does not say it.")
    for name, schedule in (("decay_steps", "step"), ("warmup_steps", "cosine")):
        if values.get("schedule") != schedule and name not in overrides:
            values.pop(name, None)
    return Pretraining(**values)


def train(settings, workdir):
    """Trains, writes the model and returns the report, a dict.

    Args:
        settings: A `Pretraining`.
        workdir: `pathlib.Path`.
    """
    classifiers.check_name(settings.model)
    start = Start(settings)
    trainings = start.seen
    data = images.load_for(settings, DATA_DIR.value, DOWNLOAD.value)
    print(*data.notes, sep="\n", end="\n" * bool(data.notes))
    trained_on = identity.of(settings.dataset, data.num_train)
    determined = facts(data, trained_on, start.files)
    folder = RunFolder(workdir, _RECIPE.value, settings, start.settings, determined)
    keras.utils.set_random_seed(folder.seeds["initial_weights"])
    keras.config.set_dtype_policy(settings.precision)
    # The published value of NF-ResNets; De et al. use 1 for private training from scratch.
    model = start.build(data, skip_init=0.0)
    add_weight_decay(model, settings.weight_decay)
    model.compile(
        optimizer=keras.optimizers.SGD(learning_rates(settings), momentum=settings.momentum),
        loss=crossentropy(settings.label_smoothing),
        weighted_metrics=["accuracy"],
        jit_compile=settings.keras_jit_compile,
    )
    saved = LastState(folder, settings.steps)
    saved.restore(model)
    first, epoch = int(model.optimizer.iterations), min(settings.report_every, settings.steps)

    def stop(batch, logs):  # The last epoch may be shorter.
        del batch, logs
        model.stop_training = int(model.optimizer.iterations) >= settings.steps

    began, ending = time.perf_counter(), SavingInterruption(saved.save)
    with ending.waiting():
        history = model.fit(
            _batches(settings, data, folder.seeds["sampling"], first),
            initial_epoch=first // epoch,
            epochs=math.ceil(settings.steps / epoch),
            steps_per_epoch=epoch,
            validation_data=measure.batches(data),
            callbacks=[saved, ending, keras.callbacks.LambdaCallback(on_train_batch_end=stop)],
            shuffle=False,
            verbose=1 if sys.stdout.isatty() else 2,
        )
    seconds = time.perf_counter() - began

    model, steps = devices.on_one_device(model), int(model.optimizer.iterations)
    measured = measure.measure(model, data, data.is_public(settings.public_test))
    record = report.write(
        workdir,
        program="pretrain",
        data=trained_on,
        ledger=not_private(steps),
        model=model,
        measured=measured,
        examples=data.eval_examples,
        seen=trainings,
        inputs=inputs.of(data),
        settings=without_secrets(settings),
        results={
            "loss": history.history["loss"][-1],
            "model": settings.model,
            "steps": steps,
            "batch_size": settings.batch_size,
            "seconds": seconds,
        },
    )
    view = {**record.view(), "workdir": str(workdir)}
    output.print_table(view, title=f"{settings.model} on {data.name}, not private")
    folder.remove()
    return view


class LastState(keras.callbacks.Callback):
    """Saves the model and the optimizer after every Keras epoch.

    The state after the last update is not saved. If a run is interrupted between that update and
    its report, it repeats its last epoch.

    Args:
        folder: The `resume.RunFolder`.
        steps: Int, the number of updates of the whole run.
    """

    def __init__(self, folder, steps):
        super().__init__()
        self._folder, self._steps = folder, steps
        self._weights = folder.path / "latest.weights.h5"

    def restore(self, model):
        """Loads the last saved state, if any, into a compiled model."""
        if self._weights.exists():
            model.optimizer.build(model.trainable_variables)
            model.load_weights(self._weights)

    def on_train_begin(self, logs=None):
        """Begins the folder."""
        del logs
        self._folder.begin()

    def on_epoch_end(self, epoch, logs=None):
        """Saves the state, except at the end of the run."""
        del epoch, logs
        if int(self.model.optimizer.iterations) < self._steps:
            self.save()

    def save(self):
        """Saves the state between two updates."""
        files.write(self._weights, saving_internals.weights_file(self.model))


def learning_rates(settings):
    """Returns the learning rate of a `Pretraining`, a float or a Keras `LearningRateSchedule`."""
    rate, warmup = settings.learning_rate, settings.warmup_steps
    if settings.schedule == "step":
        # Keras uses the value before a boundary up to and including that boundary.
        boundaries = [int(step) - 1 for step in settings.decay_steps]
        rates = [rate / 10**i for i in range(len(boundaries) + 1)]
        return keras.optimizers.schedules.PiecewiseConstantDecay(boundaries, rates)
    if settings.schedule == "cosine":
        return keras.optimizers.schedules.CosineDecay(
            0.0, settings.steps - warmup, warmup_target=rate, warmup_steps=warmup
        )
    return rate


def add_weight_decay(model, weight_decay):
    """Regularizes each trained weight, with the gradient `weight_decay` times the weight."""
    if weight_decay:
        for variable in model.trainable_variables:
            variable.regularizer = keras.regularizers.L2(weight_decay / 2)


def _batches(settings, data, seed, start):
    """Returns batches of random views of images, in a new order every epoch."""
    augment, key = augmentation(settings), noise.make_seed(seed)

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


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags)
