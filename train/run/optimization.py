"""The optimizer, the loss and the augmentation that the settings of a run name."""

import keras

import tfdpx
from tfdpx.train.errors import checking_flags


def augmentation(settings):
    """The `tfdpx.augment` object that the settings describe, or None."""
    if settings.augment_resize > 1:
        return tfdpx.augment.ResizeCropFlip(
            settings.image_size, scale=settings.augment_resize, flip=settings.augment_flip
        )
    if settings.augment_padding or settings.augment_flip:
        return tfdpx.augment.RandomCropFlip(settings.augment_padding, settings.augment_flip)
    return None


def views(settings):
    """What makes the views of a private training: the augmentation, and mixtures if asked for.

    Args:
        settings: A `training.Training` with `augmult`.
    """
    alone = augmentation(settings)
    if not settings.augment_mix:
        return alone
    alpha = 0.2 if settings.augment_mix_alpha is None else settings.augment_mix_alpha
    return tfdpx.augment.MixViews(alone, settings.augment_mix, alpha)


def private_optimizer(settings, plan, seed, individual=None, public_validation=False):
    """The private optimizer that the settings name, or the same step without privacy.

    Args:
        settings: A `training.Training`.
        plan: The `tfdpx.PrivacyPlan` of the run.
        seed: Int, of the noise and the views.
        individual: `tfdpx.accounting.IndividualAccountant` of the run, or None.
        public_validation: Bool, see `evaluation.is_public`.
    """
    common = dict(
        plan=plan,
        individual=individual,
        public_validation=public_validation,
        l2_norm_clip=settings.l2_norm_clip,
        microbatch_size=settings.microbatch_size,
        augment=views(settings) if settings.augmult else None,
        augmult=settings.augmult,
        seed=seed,
        use_ema=settings.ema_momentum > 0,
        ema_momentum=settings.ema_momentum,
    )
    with checking_flags():
        if settings.optimizer == "dpsgd":
            return tfdpx.DPSGD(settings.learning_rate, momentum=settings.momentum, **common)
        if settings.optimizer == "dpadam":
            return tfdpx.DPAdam(settings.learning_rate, **common)
        decay = 0.004 if settings.weight_decay is None else settings.weight_decay
        return tfdpx.DPAdamW(settings.learning_rate, weight_decay=decay, **common)


def crossentropy(label_smoothing):
    """The loss of logits and class indices.

    Args:
        label_smoothing: Float in [0, 1), the weight of the uniform distribution over all classes
            in the target. It is a part of each example's own loss, so privacy does not notice it.
    """
    if not label_smoothing:
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return SmoothedCrossentropy(label_smoothing)


@keras.saving.register_keras_serializable(package="tfdpx")
class SmoothedCrossentropy(keras.losses.Loss):
    """`keras.losses.CategoricalCrossentropy(from_logits=True)` for class indices.

    Args:
        label_smoothing: Float in [0, 1).
        **kwargs: Those of `keras.losses.Loss`.
    """

    def __init__(self, label_smoothing, name="smoothed_crossentropy", **kwargs):
        super().__init__(name=name, **kwargs)
        self.label_smoothing = label_smoothing

    def call(self, y_true, y_pred):
        """Losses `[batch]` of classes `[batch]` or `[batch, 1]` and logits `[batch, classes]`."""
        classes = keras.ops.reshape(y_true, [-1])
        targets = keras.ops.one_hot(classes, y_pred.shape[-1], dtype=y_pred.dtype)
        return keras.losses.categorical_crossentropy(
            targets, y_pred, from_logits=True, label_smoothing=self.label_smoothing
        )

    def get_config(self):
        """Returns the configuration as a JSON-serialisable dict."""
        return {**super().get_config(), "label_smoothing": self.label_smoothing}
