"""What a clip policy is: it says at which norm each example is clipped, and may learn from norms.

The private step has one way through. It asks the optimizer's policy in the order of the methods of
`ClipPolicy`: before the gradients where to clip, after the noise what to learn. `ClipPolicy` itself
clips every example at the constant `l2_norm_clip`. `tfdpx.training.automatic_clip` normalizes,
`tfdpx.training.individual_clip` clips each example at its most recently measured norm, and
`tfdpx.training.adaptive_clip` at a noisy quantile of the norms. An optimizer takes a policy of
your own as `l2_norm_clip=`.

Guarantee, which every policy must keep: `factors` times an example's gradient has at most the norm
1/B, whatever the example, and what it depends on is public, noisy, or accounted for. What
`to_release` adds to an update is in its mechanism: `noise_of_gradients` pays for it.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from keras.saving import serialize_keras_object

from tfdpx import mechanism
from tfdpx.sampling.batch_sampler import BatchSampler, sampler_of


def _unchanged(gradients):
    return gradients


@dataclasses.dataclass(frozen=True)
class UpdateClip:
    """What a policy decided for one update.

    Attributes:
        tensors: Tuple of tensors that `factors` takes after those of the rows.
        finish: Function of a list of `mechanism.PrivateGradient` to what the optimizer applies.
    """

    tensors: tuple[tf.Tensor, ...] = ()
    finish: Callable[[list], list] = _unchanged


class ClipPolicy:
    """Clips every example at the constant `l2_norm_clip`, C (De et al. 2022, Eq. 1).

    Args:
        l2_norm_clip: Float, C; infinity without privacy.

    Attributes:
        refreshes_per_epoch: How often an epoch the norms of all examples are measured; 0: never.
    """

    refreshes_per_epoch: float = 0

    def __init__(self, l2_norm_clip: float) -> None:
        self.l2_norm_clip = l2_norm_clip

    def build(self, optimizer: Any) -> None:
        """Called as the optimizer is made: adds variables to it, which Keras's files then hold."""

    def noise_of_gradients(self, noise_multiplier: float) -> float:
        """The noise multiplier of all that is released, where the argument is the optimizer's.

        With it, an update and what `to_release` adds must cost what the optimizer's says.
        """
        return noise_multiplier

    def check_data(self, data: object) -> None:
        """Called with `x` of `model.fit`, before anything is drawn; raises ValueError if unfit."""

    def dataset(self, draws: BatchSampler) -> tf.data.Dataset:
        """The batches that `fit` trains on, in place of those that the user made."""
        return draws.fitted

    def split(self, data: tuple, session: object) -> tuple[tuple, tf.Tensor | None]:
        """The batch as Keras knows it, and the ids of its rows, or None.

        Args:
            data: What the step was given; None outside of `fit`.
            session: The `tfdpx.training.session.Session` under way, or None.
        """
        return data, None

    def of_rows(self, ids: tf.Tensor | None, count: int | tf.Tensor) -> tuple[tf.Tensor, ...]:
        """Tensors [B, ...] that travel with the rows into their microbatches.

        Args:
            ids: As of `split`.
            count: Int or scalar tensor, B.
        """
        return ()

    def begin(
        self, model: Any, engine: Any, rows: Any, y: Any, context: Any, key: Any
    ) -> UpdateClip:
        """Decides the clips of an update.

        Args:
            model: The `keras.Model`.
            engine: The per-example engine.
            rows: Nest of tensors like what the model sees of private examples; not read.
            y: Nest of tensors, targets of private examples; not read.
            context: `tf.distribute.ReplicaContext`.
            key: int64 tensor [2], of random layers.
        """
        return UpdateClip()

    def specs(self, count: int | None) -> tuple[tf.TensorSpec, ...]:
        """Of what `factors` takes for a microbatch of `count` examples."""
        return ()

    def whole(self, count: int) -> tuple[tf.Tensor, ...]:
        """What `factors` takes to clip `count` examples at `l2_norm_clip`."""
        return ()

    def clips(self, of_rows: tuple, update: UpdateClip) -> tuple[tf.Tensor, ...]:
        """What `factors` takes for a microbatch, of its part of `of_rows`."""
        return update.tensors

    def factors(
        self, squared_norms: Any, present: Any, batch_size: int, *clips: tf.Tensor
    ) -> tf.Tensor:
        """float32 [n]: what each gradient is multiplied by; see `mechanism.clip_factors`.

        Absent rows, and norms that are not finite, need no care: `mechanism.counted` follows.
        """
        return mechanism.clip_factors(squared_norms, present, self.l2_norm_clip, batch_size)

    def measured(
        self, squared_norms: Any, present: Any, of_rows: tuple, clips: tuple, count: Any
    ) -> tuple | tf.Tensor:
        """What a microbatch says of norms: a tensor that adds up over microbatches, or `()`.

        Args:
            squared_norms: float32 [n].
            present: bool [n].
            of_rows: The microbatch's part of what the method `of_rows` gave.
            clips: What the method `clips` gave.
            count: Int or scalar tensor, the rows of the batch.
        """
        return ()

    def nothing_measured(self, count: Any) -> tuple | tf.Tensor:
        """`measured` of no microbatch at all."""
        return ()

    def to_share(self, ids: Any, present: Any, measured: Any, context: Any) -> list[tf.Tensor]:
        """Tensors to be added up over replicas before `learn`."""
        return []

    def to_release(self, measured: Any, batch_size: int) -> list[tf.Tensor]:
        """Sums over examples, over B, that get the noise of the gradients, drawn with it."""
        return []

    def learn(self, *learned: tf.Tensor) -> None:
        """Called once an update, with the noisy `to_release` and the sums of `to_share`."""

    def released(self) -> dict[str, float]:
        """Numbers for the logs: what the guarantee covers, and nothing else."""
        return {}

    def state(self) -> dict[str, np.ndarray] | None:
        """What `tfdpx.callbacks.Checkpoint` saves of the policy; None: nothing."""
        return None

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Takes a `state()` back."""

    def arguments(self) -> dict:
        """Arguments of the optimizer that make such a policy, by name, for its `get_config`."""
        plain = type(self) is ClipPolicy
        return {"l2_norm_clip": self.l2_norm_clip if plain else serialize_keras_object(self)}

    def get_config(self) -> dict:
        """Arguments of the constructor."""
        return {"l2_norm_clip": self.l2_norm_clip}

    @classmethod
    def from_config(cls, config: dict) -> "ClipPolicy":
        """The policy of `get_config`."""
        return cls(**config)


def planned(data: object) -> BatchSampler | None:
    """The `BatchSampler` of batches that a plan made, as they were made; None for anything else."""
    draws = sampler_of(data)
    return None if draws is None or draws.plan is None else draws
