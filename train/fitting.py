"""Trains an image classifier: builds its optimizer, loss and augmentation, and calls `fit`."""

import dataclasses
import json
import math
import pathlib
import sys

import keras
import tensorflow as tf

import tfdpx
from tfdpx import _files as files
from tfdpx._keras import model_internals
from tfdpx.accounting.ledger import EMPTY
from tfdpx.checks.callbacks import is_covered
from tfdpx.layers.few_weights import last_layer, train_only
from tfdpx.report import measure
from tfdpx.train import heads
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.objects import AUGMENTATIONS, OPTIMIZERS, SCHEDULES
from tfdpx.train.output import to_json
from tfdpx.train.resume import SavingInterruption
from tfdpx.training.callbacks import epsilon_spent, steps_taken
from tfdpx.training.session import after_save

# If the features of all images need at most this many bytes, they are kept in memory.
MOST_BYTES = 2**30


def private_optimizer(
    settings, plan, image_shape, accountant=None, public_validation=False, steps=None
):
    """Builds the optimizer that the settings name, with or without privacy.

    Args:
        settings: A `settings.Settings`.
        plan: The `tfdpx.PrivacyPlan` of the run.
        image_shape: `(height, width, channels)` of the images that the model takes.
        accountant: `tfdpx.accounting.IndividualAccountant` of the run, or None.
        public_validation: Bool, see `ImageData.is_public`.
        steps: Int, the number of updates over which a learning rate schedule runs; None for all
            updates of the plan.
    """
    rate = settings.learning_rate
    if settings.schedule:
        steps = steps or plan.steps
        rate = SCHEDULES.make(settings.schedule, learning_rate=rate, steps=steps)
    return OPTIMIZERS.make(
        settings.optimizer,
        learning_rate=rate,
        plan=plan,
        individual=accountant,
        public_validation=public_validation,
        l2_norm_clip=settings.l2_norm_clip,
        microbatch_size=settings.microbatch_size,
        augment=augmentation(settings, image_shape),
        augmult=settings.augmult,
        seed=settings.seed,
        use_ema=settings.ema_momentum > 0,
        ema_momentum=settings.ema_momentum,
    )


def augmentation(settings, image_shape):
    """Returns the augmentation of `--augment` for images of shape `image_shape`, or None."""
    return AUGMENTATIONS.make(settings.augment, image_shape) if settings.augment else None


def crossentropy(label_smoothing):
    """Returns the cross-entropy loss for logits `[batch, classes]` and integer labels `[batch]`.

    Args:
        label_smoothing: Float in [0, 1), the weight of the uniform distribution over all classes in
            the target. Smoothing does not affect privacy, as it changes only the loss of each
            example.
    """
    if not label_smoothing:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def smoothed(y_true, y_pred):
        classes = keras.ops.reshape(y_true, [-1])
        targets = keras.ops.one_hot(classes, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(
            targets, y_pred, from_logits=True, label_smoothing=label_smoothing
        )

    return smoothed


def check(settings, plan, image_shape):
    """Raises UserError if the augmentation does not fit the images, or `head_steps` is too large.

    The first `head_steps` updates train only the last layer.
    """
    augment = augmentation(settings, image_shape)
    if hasattr(augment, "draw"):  # tfdpx.augment checks sizes of images only when it is called.
        with checking_flags():
            choices = augment.draw(1, settings.augmult, tf.zeros(2, tf.int64))
            augment.apply(tf.zeros([1, *image_shape], tf.uint8), choices)
    if settings.head_steps >= plan.steps:
        raise UserError(
            f"Flag --head_steps must lie below the updates of the run, {plan.steps}. Received: "
            f"--head_steps={settings.head_steps}. For only the last layer, use --trainable=last."
        )


def checkpoints(folder, write=True):
    """Returns two `Checkpoint`s: for the whole run, and for its first `head_steps` updates.

    Args:
        folder: `pathlib.Path` of the checkpoints.
        write: Bool, whether this host writes the files.
    """
    paths = folder, folder / "head"
    return [tfdpx.callbacks.Checkpoint(path, write=write) for path in paths]


def updates_saved(folder):
    """Returns the number of updates that the checkpoints of a run contain, an int.

    Raises:
        UserError: If a checkpoint is damaged.
    """
    with checking_flags():
        return next((one.saved_updates for one in checkpoints(folder) if one.exists), 0)


def train(model, settings, strategy, plan, data, folder, callbacks, write):
    """Trains a model with the updates of a plan. The first `head_steps` train only the last layer.

    The head steps are a separate call of `fit`, with another optimizer and a single Keras epoch.
    Epsilon counts the updates of both calls, because the ledger belongs to the weights. Privacy
    does not depend on which layers are trained. After the training the model has the averaged
    weights.

    Args:
        model: The `keras.Model`. The weights to train after the head steps must be trainable.
        settings: A `settings.Settings`.
        strategy: The `tf.distribute.Strategy`.
        plan: The `tfdpx.PrivacyPlan` of the run.
        data: `images.ImageData`.
        folder: `pathlib.Path` of the checkpoints.
        callbacks: List of Keras callbacks; the first one is also called in head steps.
        write: Bool, whether this host writes checkpoints and progress.
    """
    saved, saved_head = checkpoints(folder, write)
    if settings.head_steps and not saved.exists:  # If `saved` exists, it has their result.
        rate = settings.head_learning_rate or settings.learning_rate
        head_settings = dataclasses.replace(settings, learning_rate=rate, schedule=None)
        trained = model.trainable_variables
        train_only(model, last_layer(model).trainable_variables)
        # If the run was interrupted in the head steps, only the remaining ones are made.
        steps = settings.head_steps - saved_head.saved_updates or settings.head_steps
        run = (strategy, plan, data, saved_head, steps, steps, callbacks[:1], write)
        _fit(model, head_settings, *run)
        train_only(model, trained)
    steps = plan.steps - settings.head_steps
    epoch = min(settings.report_every, steps)
    _fit(model, settings, strategy, plan, data, saved, steps, epoch, callbacks, write)


def _fit(model, settings, strategy, plan, data, saved, steps, epoch, callbacks, write):
    accountant = None
    if settings.individual:
        accountant = tfdpx.accounting.IndividualAccountant(
            plan, refreshes_per_epoch=settings.individual_refreshes
        )
    with strategy.scope():
        is_public = data.is_public(settings.public_test)
        model.compile(
            optimizer=private_optimizer(
                settings, plan, data.image_shape, accountant, is_public, steps
            ),
            loss=crossentropy(settings.label_smoothing),
            weighted_metrics=["accuracy", *([AUC()] if data.num_classes == 2 else [])],
            jit_compile="auto" if settings.jit_compile is None else settings.jit_compile,
        )
    averaging = [keras.callbacks.SwapEMAWeights()] if settings.ema_momentum else []
    budget = tfdpx.callbacks.PrivacyBudget(plan)
    run = dict(
        epochs=math.ceil(steps / epoch),
        steps_per_epoch=epoch,
        callbacks=[*averaging, saved, SavingInterruption(saved.save), budget, *callbacks],
        verbose=0 if not write else 1 if sys.stdout.isatty() else 2,
    )
    people = {}
    if data.train_users is not None:
        people = dict(user_ids=data.train_users, examples_per_user=settings.examples_per_user)
    if strategy.num_replicas_in_sync > 1:
        tfdpx.distributed.fit(
            model,
            plan,
            data.train_x,
            data.train_y,
            validation_data=data.eval_examples,
            validation_batch_size=measure.BATCH_SIZE,
            **people,
            **run,
        )
    else:
        batches = plan.batches(data.train_x, data.train_y, optimizer=model.optimizer, **people)
        # Keras need not shuffle, because `batches` draws examples at random.
        model.fit(batches, shuffle=False, validation_data=measure.batches(data), **run)


def head_and_features(settings, model, data):
    """Returns the model to train and its data: if possible, only the last layer and its inputs.

    If only the last layer is trained, without augmentation, an image has the same features in every
    update. Then the features are computed once, and updates on them are equal to updates on the
    images, but much faster. In all other cases, and if the features need too much memory, the
    model and the data are returned unchanged.

    Args:
        settings: A `settings.Settings`.
        model: The classifier from `start_from.Start.build`. A returned head shares its last layer.
        data: `images.ImageData`.

    Returns:
        The `keras.Model` to train, and the `ImageData` with its inputs.
    """
    features = features_of(model)
    if settings.augmult or settings.head_steps or features is None:
        return model, data
    shape = features.output_shape[1:]
    if 4 * math.prod(shape) * (data.num_train + data.num_eval) > MOST_BYTES:
        return model, data
    print(f"Computing features of shape {shape} once: the layers before the last do not train.")
    train_x, train_y = heads.computed(features, data.train_x, data.train_y)
    eval_x, eval_y = heads.computed(features, *data.eval_examples)
    head = keras.Sequential([keras.Input(shape), last_layer(model)], name=model.name)
    examples = dict(train_x=train_x, train_y=train_y, eval_x=eval_x, eval_y=eval_y)
    return head, dataclasses.replace(data, **examples, image_shape=shape)


def features_of(model):
    """Returns a model from images to the last layer's inputs; None if other layers are trained.

    Args:
        model: The classifier from `start_from.Start.build`.
    """
    last, inner = last_layer(model), model.layers[-1]
    trained = {id(v) for v in model.trainable_variables}
    if not trained or trained != {id(v) for v in last.trainable_variables}:
        return None
    if not isinstance(inner, keras.Model) or len(inner.inputs) != 1:
        return None
    if inner.outputs[0] is not last.output:
        return None
    body = keras.Model(inner.inputs, last.input)
    return keras.Model(model.inputs, body(model.layers[-2].output))


class Curve(keras.callbacks.Callback):
    """Writes a line of JSON after every Keras epoch: epsilon and, on public examples, accuracy.

    A resumed run first reads the rows of the interrupted run from the file. If `fit` also has a
    `Checkpoint`, a row is written only after the checkpoint has saved the row's last update.

    Args:
        path: Path of the file to write.
        plan: `tfdpx.PrivacyPlan`, from which epsilon is computed.
        steps: Int, the number of updates of the restored model. If the file has rows for later
            updates, they are dropped.
        before: `Ledger` of earlier trainings on the same data.

    Attributes:
        rows: List of dicts with `step` (the number of updates) and `epsilon` (the epsilon spent by
            these updates). If the optimizer has `public_validation=True` or no noise, each dict
            also has `accuracy` and, for two classes, `auc`, measured on the validation data of
            `fit`.
    """

    def __init__(self, path, plan, steps, before=EMPTY):
        super().__init__()
        self._path, self._plan, self._before = pathlib.Path(path), plan, before
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        rows = [{**row, "epsilon": float(row["epsilon"])} for row in map(json.loads, lines)]
        self.rows = [row for row in rows if row["step"] <= steps]

    def on_epoch_end(self, epoch, logs=None):
        """Appends a row for the updates so far, with `val_accuracy` and `val_auc` from `logs`."""
        del epoch
        optimizer = self.model.optimizer
        epsilon = epsilon_spent(optimizer, self._plan, self._before)
        row = {"step": steps_taken(optimizer), "epsilon": epsilon}
        if is_covered("val_accuracy", model_internals.innermost(optimizer)):
            shown = {"accuracy": "val_accuracy", "auc": "val_auc"}.items()
            row |= {name: float(logs[key]) for name, key in shown if key in logs}
        self.rows.append(row)
        after_save(self.model, self._write)

    def _write(self):
        lines = "".join(to_json(row) + "\n" for row in self.rows)
        files.write(self._path, lines.encode(), mode=0o644)


@keras.saving.register_keras_serializable(package="tfdpx")
class AUC(keras.metrics.AUC):
    """`keras.metrics.AUC` for logits of two classes, which also works if one class is rare.

    By default Keras compares probabilities with evenly spaced thresholds. Such thresholds cannot
    rank the small probabilities of a rare class. Here the 2,000 thresholds are evenly spaced in `m
    / (1 + |m|)`, where m is the log-odds of the second class.
    """

    def __init__(self, name="auc", **kwargs):
        super().__init__(num_thresholds=2000, name=name, **kwargs)

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds a batch of labels `[batch]` and logits `[batch, 2]` to the metric."""
        margins = keras.ops.cast(y_pred[:, 1] - y_pred[:, 0], "float32")
        ranks = 0.5 + 0.5 * margins / (1 + keras.ops.abs(margins))
        super().update_state(keras.ops.reshape(y_true, [-1]), ranks, sample_weight)
