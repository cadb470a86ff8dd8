"""What a pre-training minimises: errors on labels, or what images alone can teach.

Without labels the features before the last layer are trained through a head of its own, which is
then dropped. The last layer of the classifier stays as it was: it starts anew when fine-tuned.
"""

import dataclasses

import keras
import tensorflow as tf

from tfdpx.train.data.views import RandomViews
from tfdpx.train.run import finetuning, optimization

_HIDDEN, _PROJECTED = 128, 64


@dataclasses.dataclass(frozen=True)
class Objective:
    """How a model is pre-trained.

    Attributes:
        model: The `keras.Model` to fit: the classifier, or its features under another head.
        loss: A `keras.losses.Loss`.
        metrics: List of names of metrics.
        augment: What makes the views, as of `tfdpx.augment`; None for the images as they are.
        num_views: Int, the views of each image in a batch.
    """

    model: keras.Model
    loss: keras.losses.Loss
    metrics: list
    augment: object
    num_views: int


def of(settings, classifier, data):
    """The `Objective` of a run.

    Args:
        settings: A `pretraining.Pretraining`.
        classifier: The `keras.Model` to pre-train, from `classifiers.build`.
        data: `loading.ImageData`.
    """
    if settings.generator is None:
        return Objective(
            model=classifier,
            loss=optimization.crossentropy(settings.label_smoothing),
            metrics=["accuracy"],
            augment=optimization.augmentation(settings),
            num_views=1,
        )
    features = finetuning.features(classifier)
    views = RandomViews(flip=settings.augment_flip)
    if settings.objective == "exemplar":
        logits = keras.layers.Dense(data.num_train, dtype="float32", name="exemplars")
        return Objective(
            model=keras.Model(features.input, logits(features.output)),
            loss=optimization.crossentropy(settings.label_smoothing),
            metrics=["accuracy"],
            augment=views,
            num_views=1,
        )
    hidden = keras.layers.Dense(_HIDDEN, "relu", name="hidden")(features.output)
    projected = keras.layers.Dense(_PROJECTED, dtype="float32", name="projected")(hidden)
    return Objective(
        model=keras.Model(features.input, projected),
        loss=NTXent(settings.temperature),
        metrics=[],
        augment=views,
        num_views=2,
    )


@keras.saving.register_keras_serializable(package="tfdpx")
class NTXent(keras.losses.Loss):
    """The normalized temperature-scaled cross-entropy of SimCLR.

    Each view is to pick the other view of its image among all other views of the batch, by the
    cosine of their vectors over the temperature.

    Args:
        temperature: Float > 0.
        **kwargs: Those of `keras.losses.Loss`.

    References:
        - [Chen et al., 2020](https://arxiv.org/abs/2002.05709), "A simple framework for contrastive
          learning of visual representations", equation 1.
    """

    def __init__(self, temperature=0.2, name="nt_xent", **kwargs):
        super().__init__(name=name, **kwargs)
        self.temperature = temperature

    def call(self, y_true, y_pred):
        """Losses of the views.

        Args:
            y_true: Int tensor `[views]` or `[views, 1]`, the number of the image of each. Each
                number comes exactly twice.
            y_pred: Float tensor `[views, dimensions]`.

        Returns:
            Float tensor `[views]`.
        """
        image = tf.reshape(y_true, [-1])
        is_itself = tf.eye(tf.shape(image)[0], dtype=tf.bool)
        is_other = tf.equal(image[:, tf.newaxis], image) & ~is_itself
        vectors = tf.math.l2_normalize(tf.cast(y_pred, tf.float32), axis=-1, epsilon=1e-12)
        logits = tf.matmul(vectors, vectors, transpose_b=True) / self.temperature
        logits = tf.where(is_itself, -1e9, logits)
        return tf.nn.softmax_cross_entropy_with_logits(tf.cast(is_other, tf.float32), logits)

    def get_config(self):
        """Returns the configuration as a JSON-serialisable dict."""
        return {**super().get_config(), "temperature": self.temperature}
