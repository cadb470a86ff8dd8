"""DP-SGD, DP-Adam and DP-AdamW: Keras optimizers with differentially private updates."""

from __future__ import annotations

import math
from typing import Any

import keras
import tensorflow as tf

from tfdpx._arguments import check_choice, is_number, require
from tfdpx._keras import model_internals
from tfdpx.accounting import IndividualAccountant, PrivacyPlan
from tfdpx.training.clipping import ClipPolicy
from tfdpx.training.private_optimizer import PrivateOptimizer

_register = keras.saving.register_keras_serializable(package="tfdpx")
_register(PrivacyPlan)  # Here, since accounting needs no Keras.
_register(IndividualAccountant)


@_register
class DPSGD(PrivateOptimizer, keras.optimizers.SGD):
    """SGD with per-example clipping and Gaussian noise (DP-SGD).

    A drop-in for `keras.optimizers.SGD` in `model.compile(optimizer=...)`. The gradient that SGD
    receives is Eq. 4 of De et al. 2022 (arXiv:2204.13650),

        1/B * sum_i clip_C(mean over K views of grad l_i) / C + sigma/B * xi,

    where B is the declared `batch_size`, a constant that does not follow the size of the batch.
    Dividing by C keeps the learning rate independent of the clip.

    Guarantee: each update is one Gaussian mechanism of sensitivity 1 and standard deviation sigma
    under adding or removing one example. The cost of many updates depends on how batches are drawn:
    see `tfdpx.PrivacyPlan`. The guarantee holds for the weights; the training loss and metrics that
    Keras shows are functions of the private data. Files that Keras saves hold no seed of noise or
    draws; a loaded or copied optimizer has fresh noise, and its `ledger` continues.

    The arguments below, except those of Keras, are read-only attributes.

    Args:
        learning_rate: Float, a schedule of Keras, or a callable without arguments, as for SGD.
        momentum: Float >= 0, as for SGD.
        nesterov: Bool. Whether momentum is Nesterov's.
        weight_decay: Optional float, as for SGD. It reads no data.
        plan: Optional `tfdpx.PrivacyPlan`, which gives `batch_size` and `noise_multiplier`.
        batch_size: Int, the expected batch size B. Needed without a plan.
        noise_multiplier: Float sigma, noise standard deviation in units of `l2_norm_clip`. Needed
            without a plan. 0 clips without noise: epsilon is infinite.
        l2_norm_clip: Float C, the bound on the l2 norm of each example's gradient. With
            `noise_multiplier=0` it may be infinity: the same step then averages gradients, neither
            clipped nor divided by C. That is training without privacy.
            `"automatic"` divides each gradient by its norm plus 0.01, with C = 1, so that only
            the learning rate needs tuning (`docs/choosing.md`). A `tfdpx.AdaptiveClip` follows the
            norms.
        microbatch_size: Optional int, the number of examples that are in memory at once. It changes
            neither the update (except for rounding) nor its sensitivity. `None` chooses the size of
            least predicted time, from shapes and the plan alone, and half of the batch at most if
            activations are large.
        augment: A `tfdpx.augment` object or a Keras augmentation layer, run on the device.
        augmult: Int K, views of each example. 0 means no augmentation. With `augment=None`, K > 0
            expects inputs of shape [batch, K, ...].
        seed: Optional int, of noise, views and draws, for experiments. Private training needs
            `None`, which takes seeds from the operating system, because noise with a known seed can
            be subtracted.
        individual: Optional `tfdpx.accounting.IndividualAccountant` of the same plan: each example
            is clipped at its most recently measured norm, and its own epsilon is known. Needs
            `fit(x, y)` or `fit(plan.batches(...))`.
        public_validation: Bool. Declares that the examples that `fit` validates on are public.
            Without it, callbacks that act on `val_` metrics are refused, and
            `tfdpx.callbacks.TensorBoard` leaves these metrics out.
        augment_targets: Bool, whether targets that are images of the size of the inputs (masks, for
            example) move with them, by the same draw. An augmentation that interpolates blends
            targets as it blends images, so give it classes as one-hot floats. None refuses such
            targets with an `augment`. Boxes and points do not move.
        **kwargs: Other keyword arguments of `keras.optimizers.SGD`. With `use_ema=True` the average
            warms up, decay = min(ema_momentum, (1+t)/(10+t)), as in appendix C.3 of De et al.

    Raises:
        ValueError: For an argument out of range, one that contradicts `plan`, or a Keras argument
            that would change the mechanism: `clipnorm`, `clipvalue`, `global_clipnorm`,
            `gradient_accumulation_steps`, `loss_scale_factor`.

    Example:
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    >>> optimizer = DPSGD(0.5, batch_size=8, noise_multiplier=1.0, l2_norm_clip=1.0)
    >>> model.compile(optimizer=optimizer, loss="mse")
    >>> history = model.fit(np.ones((8, 4)), np.ones((8, 1)), batch_size=8, verbose=0)
    >>> optimizer.ledger.steps
    1
    """

    def __init__(
        self,
        learning_rate: Any = 0.01,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float | None = None,
        *,
        plan: PrivacyPlan | None = None,
        batch_size: int | None = None,
        noise_multiplier: float | None = None,
        l2_norm_clip: float | str | ClipPolicy = 1.0,
        microbatch_size: int | str | None = None,
        augment: Any = None,
        augmult: int = 0,
        seed: int | None = None,
        individual: IndividualAccountant | None = None,
        public_validation: bool = False,
        augment_targets: bool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            plan=plan,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            l2_norm_clip=l2_norm_clip,
            microbatch_size=microbatch_size,
            augment=augment,
            augmult=augmult,
            seed=seed,
            individual=individual,
            public_validation=public_validation,
            augment_targets=augment_targets,
            **kwargs,
        )


class BiasCorrected(PrivateOptimizer):
    """Adam with the noise's variance subtracted from its second moment.

    The square of a noisy gradient is on average the square of the gradient plus the variance of the
    noise, which is public. Under privacy the variance is usually larger, so that Adam divides all
    coordinates by nearly the same number. This class subtracts the variance from each square as it
    enters the average. The result counts as at least a share of the variance, because an average of
    few squares is not exact. Source: Tang et al. 2023, arXiv:2312.14334.

    Guarantee: the same, because moments are computed from noisy gradients and public numbers.
    In the bases it comes before `keras.optimizers.Adam` or a class derived from it.
    """

    def __init__(
        self,
        *args: Any,
        bias_correction: str | None = None,
        least_second_moment: float = 0.1,
        **kwargs: Any,
    ) -> None:
        check_choice("bias_correction", bias_correction, (None, "noise"))
        least = least_second_moment
        is_valid = is_number(least) and 0 < least < math.inf
        require(is_valid, "least_second_moment", least, "be a finite float > 0")
        super().__init__(*args, **kwargs)
        self.bias_correction, self.least_second_moment = bias_correction, float(least)
        if bias_correction is not None and self.amsgrad:
            raise ValueError(
                "Arguments `bias_correction` and `amsgrad` exclude each other: the largest of "
                "noisy averages is no average. Received: amsgrad=True. Leave one of them out."
            )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Makes Adam's update, in one kernel unless `bias_correction` or `amsgrad` is set."""
        is_corrected = self.bias_correction is not None
        if not is_corrected and (self.amsgrad or variable.dtype != tf.float32):
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = self.check_gradient(gradient)
        first, second = model_internals.adam_moments(self, variable)
        # In float32, because 1 - beta_2 would be zero in 16 bits.
        step = tf.cast(self.iterations + 1, "float32")
        rate = tf.cast(learning_rate, "float32")
        if is_corrected:
            self._apply_corrected(gradient, variable, first, second, step, rate)
            return
        # Keras's formula, because its twelve operations would each pass over all weights.
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.value.handle,
            v=second.value.handle,
            grad=gradient.tensor,
            beta1=self.beta_1,
            beta1_power=self.beta_1**step,
            beta2=self.beta_2,
            beta2_power=self.beta_2**step,
            lr=rate,
            epsilon=self.epsilon,
        )

    def _apply_corrected(self, gradient, variable, first, second, step, rate):
        dtype = variable.dtype
        values, variance = tf.cast(gradient.tensor, dtype), tf.cast(gradient.deviation, dtype) ** 2
        self.assign_add(first, (values - first) * (1 - self.beta_1))
        self.assign_add(second, (values**2 - variance - second) * (1 - self.beta_2))
        unbiased = second / tf.cast(1 - self.beta_2**step, dtype)
        moment = tf.maximum(unbiased, self.least_second_moment * variance)
        rate = tf.cast(rate / (1 - self.beta_1**step), dtype)
        self.assign_sub(variable, rate * first / (tf.sqrt(moment) + self.epsilon))

    def get_config(self) -> dict[str, Any]:
        """Returns the configuration as a JSON-serialisable dict."""
        names = ("bias_correction", "least_second_moment")
        return {**super().get_config(), **{name: getattr(self, name) for name in names}}


@_register
class DPAdam(BiasCorrected, keras.optimizers.Adam):
    """Adam on privatized gradients.

    Adam's moments are computed from the clipped and noisy gradient that `DPSGD` describes, so the
    guarantee is the same, because computations after the noise cost nothing.

    Args:
        learning_rate: Float, a schedule of Keras, or a callable without arguments, as for Adam.
        beta_1: Float, the decay of the first moment.
        beta_2: Float, the decay of the second moment.
        epsilon: Float, the small constant in Adam's denominator. A privacy budget is an argument of
            the plan.
        amsgrad: Bool. Whether the largest second moment is taken.
        weight_decay: Optional float, as for Adam. It reads no data.
        bias_correction: `"noise"` subtracts the noise's variance, which is public, from the second
            moment (Tang et al. 2023, arXiv:2312.14334), so that coordinates are scaled by their
            gradients and not by the noise. None does as Keras.
        least_second_moment: Float > 0, the minimum of a corrected second moment, in units of that
            variance. Smaller values make longer steps where the noise is larger than gradients.
        **kwargs: Other keyword arguments of `keras.optimizers.Adam`, and `plan`, `batch_size`,
            `noise_multiplier`, `l2_norm_clip`, `microbatch_size`, `augment`, `augmult`, `seed`,
            `individual`, `public_validation` and `augment_targets` of `DPSGD`.

    Raises:
        ValueError: As `DPSGD`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        weight_decay: float | None = None,
        *,
        plan: PrivacyPlan | None = None,
        batch_size: int | None = None,
        noise_multiplier: float | None = None,
        l2_norm_clip: float | str | ClipPolicy = 1.0,
        microbatch_size: int | str | None = None,
        augment: Any = None,
        augmult: int = 0,
        seed: int | None = None,
        individual: IndividualAccountant | None = None,
        public_validation: bool = False,
        augment_targets: bool | None = None,
        bias_correction: str | None = None,
        least_second_moment: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            weight_decay=weight_decay,
            plan=plan,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            l2_norm_clip=l2_norm_clip,
            microbatch_size=microbatch_size,
            augment=augment,
            augmult=augmult,
            seed=seed,
            individual=individual,
            public_validation=public_validation,
            augment_targets=augment_targets,
            bias_correction=bias_correction,
            least_second_moment=least_second_moment,
            **kwargs,
        )


@_register
class DPAdamW(BiasCorrected, keras.optimizers.AdamW):
    """Adam on privatized gradients, with decoupled weight decay, which reads no data.

    Guarantee: the same as `DPSGD`.

    Args:
        learning_rate: See `DPAdam`.
        weight_decay: Float, as for AdamW.
        beta_1: See `DPAdam`.
        beta_2: See `DPAdam`.
        epsilon: See `DPAdam`.
        amsgrad: See `DPAdam`.
        bias_correction: See `DPAdam`.
        least_second_moment: See `DPAdam`.
        **kwargs: Other keyword arguments of `keras.optimizers.AdamW`, and those of `DPAdam`.

    Raises:
        ValueError: As `DPSGD`.
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        weight_decay: float = 0.004,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-7,
        amsgrad: bool = False,
        *,
        plan: PrivacyPlan | None = None,
        batch_size: int | None = None,
        noise_multiplier: float | None = None,
        l2_norm_clip: float | str | ClipPolicy = 1.0,
        microbatch_size: int | str | None = None,
        augment: Any = None,
        augmult: int = 0,
        seed: int | None = None,
        individual: IndividualAccountant | None = None,
        public_validation: bool = False,
        augment_targets: bool | None = None,
        bias_correction: str | None = None,
        least_second_moment: float = 0.1,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay=weight_decay,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            plan=plan,
            batch_size=batch_size,
            noise_multiplier=noise_multiplier,
            l2_norm_clip=l2_norm_clip,
            microbatch_size=microbatch_size,
            augment=augment,
            augmult=augmult,
            seed=seed,
            individual=individual,
            public_validation=public_validation,
            augment_targets=augment_targets,
            bias_correction=bias_correction,
            least_second_moment=least_second_moment,
            **kwargs,
        )


_private_classes = {
    base: private for private in (DPSGD, DPAdam, DPAdamW) for base in [private.__bases__[1]]
}


def make_private(optimizer_class: type[keras.optimizers.Optimizer]) -> type:
    """Returns the differentially private variant of a Keras optimizer class.

    Args:
        optimizer_class: A subclass of `keras.optimizers.Optimizer` such as
            `keras.optimizers.Lion`.

    Returns:
        A subclass named `DP<name>`, registered with Keras as `tfdpx>DP<name>`, that takes the
        optimizer's arguments and those of `tfdpx.DPSGD`. The same class on every call.

    Raises:
        TypeError: If `optimizer_class` is no such class, wraps other optimizers, or is private.

    Example:
    >>> make_private(keras.optimizers.Lion)(1e-3, batch_size=256, noise_multiplier=1.0).name
    'dp_lion'
    """
    if not (
        isinstance(optimizer_class, type)
        and issubclass(optimizer_class, keras.optimizers.Optimizer)
        and not issubclass(optimizer_class, PrivateOptimizer)
        # `LossScaleOptimizer` and `MultiOptimizer`, which wrap others, define none.
        and optimizer_class.update_step is not keras.optimizers.Optimizer.update_step
    ):
        raise TypeError(
            "`make_private` takes an optimizer class of Keras that wraps no other and has an "
            f"`update_step`, such as keras.optimizers.Lion. Received: {optimizer_class!r}"
        )
    if optimizer_class not in _private_classes:
        name = optimizer_class.__name__
        docstring = f"`keras.optimizers.{name}` on privatized gradients; see `tfdpx.DPSGD`."
        contents = {"__doc__": docstring, "__module__": __name__}
        private = type(f"DP{name}", (PrivateOptimizer, optimizer_class), contents)
        _private_classes[optimizer_class] = _register(private)
    return _private_classes[optimizer_class]
