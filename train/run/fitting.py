"""Trains a classifier privately: the last layer first if asked to, then all that is to train.

Layers that do not train run once, instead of in every update.
"""

import dataclasses
import math
import sys

import keras
import numpy as np

import tfdpx
from tfdpx.layers.private_model import last_layer, train_only
from tfdpx.train.errors import UserError, checking_flags
from tfdpx.train.run import evaluation, individual, interruption, optimization

# Features of all images, of training and to measure on, are kept in memory up to this size.
MOST_BYTES = 2**30


def check_head_steps(settings, plan):
    """Raises UserError unless `head_steps` leaves updates of the plan for all layers."""
    if settings.head_steps >= plan.steps:
        raise UserError(
            f"Flag --head_steps must lie below the updates of the run, {plan.steps}. Received: "
            f"--head_steps={settings.head_steps}. For the last layer alone use --trainable=last."
        )


class Trainer:
    """The calls of `fit` that make a run.

    With `head_steps` there are two, each with an optimizer of its own. They share the plan, and the
    ledger follows the weights from one to the other: epsilon is of all updates. Privacy does
    not notice which layers train.

    Args:
        settings: A `training.Training`.
        strategy: The `tf.distribute.Strategy`.
        plan: The `tfdpx.PrivacyPlan` of the run.
        data: `images.ImageData`.
        folder: The `checkpoint.RunFolder`.
        write: Bool, whether this host writes checkpoints and progress.
    """

    def __init__(self, settings, strategy, plan, data, folder, write):
        self._settings, self._strategy, self._plan, self._data = settings, strategy, plan, data
        self._write = write
        self._saved_head = tfdpx.callbacks.Checkpoint(folder.path / "head", write=write)
        self._saved = tfdpx.callbacks.Checkpoint(folder.path, write=write)

    @property
    def steps_saved(self):
        """Int: the updates of the run so far, as its checkpoints have them.

        Raises:
            UserError: If a checkpoint is damaged.
        """
        with checking_flags():
            return (self._saved if self._saved.exists else self._saved_head).saved_updates

    def fit_head(self, model, callbacks):
        """Trains the last layer for `head_steps` updates, a single Keras epoch.

        Args:
            model: The `keras.Model`, of which all that is to train in the end is trainable.
            callbacks: List of Keras callbacks.
        """
        if self._saved.exists:  # It holds what came of this.
            return
        rate = self._settings.head_learning_rate or self._settings.learning_rate
        settings = dataclasses.replace(self._settings, learning_rate=rate)
        trained = model.trainable_variables
        train_only(model, last_layer(model).trainable_variables)
        # A run that ended within them makes what is left.
        steps = settings.head_steps - self._saved_head.saved_updates or settings.head_steps
        self._fit(model, settings, self._saved_head, steps, steps, callbacks)
        train_only(model, trained)

    def fit(self, model, callbacks):
        """Trains all that is trainable for the rest of the plan.

        Args:
            model: The `keras.Model`.
            callbacks: List of Keras callbacks.
        """
        settings, steps = self._settings, self._plan.steps - self._settings.head_steps
        epoch = min(settings.report_every, steps)
        self._fit(model, settings, self._saved, steps, epoch, callbacks)

    def _fit(self, model, settings, saved, steps, epoch, callbacks):
        """Compiles and fits; `fit` leaves the averaged weights in the model."""
        plan, data, strategy = self._plan, self._data, self._strategy
        with strategy.scope():
            model.compile(
                optimizer=optimization.private_optimizer(
                    settings,
                    plan,
                    settings.seed,
                    individual.accountant(settings, plan),
                    evaluation.is_public(data, settings.public_test),
                ),
                loss=optimization.crossentropy(settings.label_smoothing),
                weighted_metrics=["accuracy"],
                jit_compile=settings.keras_jit_compile,
            )
        averaging = [keras.callbacks.SwapEMAWeights()] if settings.ema_momentum else []
        ending = interruption.SavingInterruption(saved.save)
        run = dict(
            epochs=math.ceil(steps / epoch),
            steps_per_epoch=epoch,
            callbacks=[*averaging, saved, ending, tfdpx.callbacks.PrivacyBudget(plan), *callbacks],
            verbose=0 if not self._write else 1 if sys.stdout.isatty() else 2,
        )
        people = {}
        if data.train_users is not None:
            people = dict(user_ids=data.train_users, examples_per_user=settings.examples_per_user)
        with ending.waiting():
            if strategy.num_replicas_in_sync > 1:
                tfdpx.distributed.fit(
                    model,
                    plan,
                    data.train_x,
                    data.train_y,
                    validation_data=data.eval_examples,
                    validation_batch_size=evaluation.BATCH_SIZE,
                    **people,
                    **run,
                )
            else:
                batches = plan.batches(
                    data.train_x, data.train_y, optimizer=model.optimizer, **people
                )
                # `batches` draws at random already.
                model.fit(batches, shuffle=False, validation_data=evaluation.batches(data), **run)


def head_and_features(settings, model, data):
    """The last layer as a model of its own, and the data as it sees them; else what was given.

    Without augmentation an image has the same features in every update where nothing trains but the
    last layer, so an update on the features is the update on the images, at a fraction of its time.

    Args:
        settings: A `training.Training`.
        model: The classifier that `finetuning.build` made; the head shares its last layer.
        data: `images.ImageData`.

    Returns:
        The `keras.Model` to train, and an `ImageData` whose images are what that takes.
    """
    features = _features(model)
    arrays = [data.train_x, data.eval_x]
    in_memory = all(isinstance(images, np.ndarray) for images in arrays)
    if settings.augmult or settings.head_steps or not in_memory or features is None:
        return model, data
    shape = features.output_shape[1:]
    if 4 * math.prod(shape) * sum(map(len, arrays)) > MOST_BYTES:
        return model, data
    print(f"Computing features of shape {shape} once: the layers before the last do not train.")
    train_x, eval_x = (
        features.predict(images, batch_size=evaluation.BATCH_SIZE, verbose=0)
        if len(images)
        else np.zeros((0, *shape), "float32")
        for images in arrays
    )
    head = keras.Sequential([keras.Input(shape), last_layer(model)], name=model.name)
    return head, dataclasses.replace(data, train_x=train_x, eval_x=eval_x, image_shape=shape)


def _features(model):
    """A model from images to the inputs of the last layer, if that alone trains; else None."""
    last, inner = last_layer(model), model.layers[-1]
    trained = {id(v) for v in model.trainable_variables}
    own = {id(v) for v in last.trainable_variables}
    if not trained or trained != own or not isinstance(inner, keras.Model):
        return None
    if len(inner.inputs) != 1 or inner.outputs[0] is not last.output:
        return None
    body = keras.Model(inner.inputs, last.input)
    return keras.Model(model.inputs, body(model.layers[-2].output))
