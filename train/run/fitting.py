"""Trains a classifier privately: the last layer first if asked to, then all that is to train."""

import dataclasses
import math
import sys

import keras

import tfdpx
from tfdpx.train.config.errors import UserError, checking_flags
from tfdpx.train.run import evaluation, finetuning, individual, interruption, optimization


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
    ledger follows the weights from one to the other: epsilon is that of all updates. Privacy does
    not notice which layers train.

    Args:
        settings: A `training.Training`.
        strategy: The `tf.distribute.Strategy`.
        plan: The `tfdpx.PrivacyPlan` of the run.
        data: `loading.ImageData`.
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
        frozen = finetuning.freeze_all_but_last(model)
        # A run that ended within them makes what is left.
        steps = settings.head_steps - self._saved_head.saved_updates or settings.head_steps
        self._fit(model, settings, self._saved_head, steps, steps, callbacks)
        for layer in frozen:
            layer.trainable = True

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
                    settings, plan, settings.seed, individual.accountant(settings, plan)
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
        with ending.waiting():
            if strategy.num_replicas_in_sync > 1:
                tfdpx.distributed.fit(
                    model,
                    plan,
                    data.train_x,
                    data.train_y,
                    validation_data=data.eval_examples,
                    validation_batch_size=evaluation.BATCH_SIZE,
                    **run,
                )
            else:
                batches = plan.batches(data.train_x, data.train_y, optimizer=model.optimizer)
                # `batches` draws at random already.
                model.fit(batches, shuffle=False, validation_data=evaluation.batches(data), **run)
