"""DP-SGD, DP-Adam and DP-AdamW: Keras optimizers with differentially private updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from tfdpx._keras import model_internals
from tfdpx.accounting import IndividualAccountant, PrivacyPlan
from tfdpx.training.arguments import PrivateArguments
from tfdpx.training.private_optimizer import PrivateOptimizer

if TYPE_CHECKING:  # Python has `Unpack` from 3.11 on.
    from typing_extensions import Unpack

_register = keras.saving.register_keras_serializable(package="tfdpx")
_register(PrivacyPlan)  # Registered here, because `accounting` does not import Keras.
_register(IndividualAccountant)


@_register
class DPSGD(PrivateOptimizer, keras.optimizers.SGD):
    """SGD with per-example clipping and Gaussian noise (DP-SGD).

    Use it in place of `keras.optimizers.SGD` in `model.compile(optimizer=...)`. The gradient that
    SGD receives is Eq. 4 of De et al. 2022 (arXiv:2204.13650),

        1/B * sum_i clip_C(mean over K views of grad l_i) / C + sigma/B * xi,

    where B is the declared `batch_size`, a constant that does not follow the size of the batch.
    Dividing by C keeps the learning rate independent of the clip.

    Guarantee: each update is one Gaussian mechanism of sensitivity 1 and standard deviation sigma
    under adding or removing one example. The cost of many updates depends on how batches are drawn:
    see `tfdpx.PrivacyPlan`. The guarantee holds for the weights; the training loss and metrics that
    Keras shows are functions of the private data. Files that Keras saves hold no seed of noise or
    draws; a loaded or copied optimizer has fresh noise, and its `ledger` continues.

    The arguments of privacy are `plan`, `batch_size`, `noise_multiplier`, `l2_norm_clip`,
    `microbatch_size`, `augment`, `augmult`, `augment_targets`, `seed`, `individual` and
    `public_validation`; `help(tfdpx.training.arguments.PrivateArguments)` describes them. Each is a
    read-only attribute, too. With Keras's `use_ema=True`, the decay of the average warms up: at
    update t it is min(ema_momentum, (1+t)/(10+t)), as in appendix C.3 of De et al.

    Args:
        learning_rate: Float, a schedule of Keras, or a callable without arguments, as for SGD.
        momentum: Float >= 0, as for SGD.
        nesterov: Bool, whether to use Nesterov's momentum.
        weight_decay: Optional float, as for SGD. It reads no data.

    Raises:
        ValueError: For an argument that is out of range or contradicts `plan`, or for a Keras
            argument that would change the mechanism: `clipnorm`, `clipvalue`, `global_clipnorm`,
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
        **private: Unpack[PrivateArguments],
    ) -> None:
        super().__init__(
            learning_rate,
            momentum=momentum,
            nesterov=nesterov,
            weight_decay=weight_decay,
            **private,
        )


class OneKernelAdam(PrivateOptimizer):
    """A mixin that makes the update of `keras.optimizers.Adam` in one kernel."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Makes Adam's update. For `amsgrad`, and for weights not in float32, Keras makes it."""
        if self.amsgrad or variable.dtype != tf.float32:
            super().update_step(gradient, variable, learning_rate)
            return
        gradient = self.check_gradient(gradient)
        first, second = model_internals.adam_moments(self, variable)
        step = tf.cast(self.iterations + 1, "float32")
        # The formula is Keras's. Keras's code has twelve operations, and each passes over all
        # weights.
        tf.raw_ops.ResourceApplyAdam(
            var=variable.handle,
            m=first.value.handle,
            v=second.value.handle,
            grad=gradient.tensor,
            beta1=self.beta_1,
            beta1_power=self.beta_1**step,
            beta2=self.beta_2,
            beta2_power=self.beta_2**step,
            lr=tf.cast(learning_rate, "float32"),
            epsilon=self.epsilon,
        )


@_register
class DPAdam(OneKernelAdam, keras.optimizers.Adam):
    """Adam on privatized gradients.

    Adam's moments are computed from the clipped and noisy gradient that `DPSGD` describes.
    Computations after the noise cost no privacy, so the guarantee is the same as for `DPSGD`. The
    arguments of privacy are the same, too.

    Args:
        learning_rate: Float, a schedule of Keras, or a callable without arguments, as for Adam.
        beta_1: Float, the decay of the first moment.
        beta_2: Float, the decay of the second moment.
        epsilon: Float, the small constant in Adam's denominator, not a privacy budget. The privacy
            budget is an argument of the plan.
        amsgrad: Bool, whether to divide by the largest second moment so far (AMSGrad).
        weight_decay: Optional float, as for Adam. It reads no data.

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
        **private: Unpack[PrivateArguments],
    ) -> None:
        super().__init__(
            learning_rate,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            weight_decay=weight_decay,
            **private,
        )


@_register
class DPAdamW(OneKernelAdam, keras.optimizers.AdamW):
    """Adam on privatized gradients, with decoupled weight decay, which reads no data.

    The guarantee and the arguments of privacy are the same as for `DPSGD`.

    Args:
        learning_rate: See `DPAdam`.
        weight_decay: Float, as for AdamW.
        beta_1: See `DPAdam`.
        beta_2: See `DPAdam`.
        epsilon: See `DPAdam`.
        amsgrad: See `DPAdam`.

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
        **private: Unpack[PrivateArguments],
    ) -> None:
        super().__init__(
            learning_rate,
            weight_decay=weight_decay,
            beta_1=beta_1,
            beta_2=beta_2,
            epsilon=epsilon,
            amsgrad=amsgrad,
            **private,
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
        optimizer's arguments and the arguments of `tfdpx.DPSGD`. Every call returns the same class.

    Raises:
        TypeError: If `optimizer_class` is not a Keras optimizer class, wraps other optimizers, or
            is private already.

    Example:
    >>> make_private(keras.optimizers.Lion)(1e-3, batch_size=256, noise_multiplier=1.0).name
    'dp_lion'
    """
    if not (
        isinstance(optimizer_class, type)
        and issubclass(optimizer_class, keras.optimizers.Optimizer)
        and not issubclass(optimizer_class, PrivateOptimizer)
        # Optimizers that wrap others, such as `LossScaleOptimizer`, do not define `update_step`.
        and optimizer_class.update_step is not keras.optimizers.Optimizer.update_step
    ):
        raise TypeError(
            "`make_private` takes an optimizer class of Keras that wraps no other and has an "
            f"`update_step`. Received: {optimizer_class!r}. Write "
            "`make_private(keras.optimizers.Lion)(1e-3, plan=plan)`, or, for a model, "
            "`make_private_model(model, ...)`."
        )
    if optimizer_class not in _private_classes:
        name = optimizer_class.__name__
        docstring = f"`keras.optimizers.{name}` on privatized gradients; see `tfdpx.DPSGD`."
        contents = {"__doc__": docstring, "__module__": __name__}
        private = type(f"DP{name}", (PrivateOptimizer, optimizer_class), contents)
        _private_classes[optimizer_class] = _register(private)
    return _private_classes[optimizer_class]
