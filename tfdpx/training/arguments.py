"""The arguments that private optimizers add to Keras's, and arguments of Keras that they refuse."""

import collections
import copy
import inspect
import math
from typing import Any, TypedDict

from tfdpx import noise
from tfdpx._arguments import (
    agreed,
    has_arrays,
    is_integer,
    is_number,
    refuse_elsewhere,
    require,
    shortened,
)
from tfdpx._warnings import warn
from tfdpx.accounting.accountants import check_noise_multiplier
from tfdpx.accounting.individual import IndividualAccountant
from tfdpx.accounting.ledger import USER
from tfdpx.accounting.plan import PrivacyPlan
from tfdpx.augment.layer_views import get as as_views
from tfdpx.per_example.rounding import SMALLEST_CLIP
from tfdpx.training.clipping import AUTOMATIC, AutomaticClip, ClipPolicy, IndividualClip

# Keras arguments that would change the mechanism, and what to use instead.
REFUSED = {
    "clipnorm": "use `l2_norm_clip`, which bounds each example",
    "clipvalue": "use `l2_norm_clip`, which bounds each example",
    "global_clipnorm": "use `l2_norm_clip`, which bounds each example",
    "gradient_accumulation_steps": "use `microbatch_size`: a step is one update of the whole batch",
    "loss_scale_factor": "use the `mixed_bfloat16` policy, which needs no loss scaling",
}

# A larger `epsilon` of Adam is probably a privacy budget: Keras's default is 1e-7.
_MOST_EPSILON_OF_ADAM = 1e-2


class KerasArguments(TypedDict, total=False):
    """The arguments that private optimizers share with all Keras optimizers; see Keras's docs."""

    name: str | None
    use_ema: bool
    ema_momentum: float
    ema_overwrite_frequency: int | None


class PrivateArguments(KerasArguments, total=False):
    """The arguments of every private optimizer: some are Keras's, the others set the privacy.

    Attributes:
        plan: Optional `tfdpx.PrivacyPlan`, which gives `batch_size` and `noise_multiplier`.
        batch_size: Int, the expected batch size B. Needed without a plan.
        noise_multiplier: Float sigma, the standard deviation of the noise in units of
            `l2_norm_clip`. Needed without a plan. With 0, gradients are clipped but get no noise,
            and epsilon is infinite.
        l2_norm_clip: Float C, the bound on the l2 norm of each example's gradient. With
            `noise_multiplier=0`, C may be infinity. Training without privacy then averages the
            gradients, but neither clips them nor divides them by C. `"automatic"` divides each
            gradient by its norm plus 0.01, with C = 1, so that only the learning rate needs tuning
            (`docs/choosing.md`). A `tfdpx.AdaptiveClip` is a clip that follows the norms of the
            gradients. The default is 1.0.
        microbatch_size: Optional int, the number of examples that are in memory at once. It changes
            neither the update (except for rounding) nor its sensitivity. With `None`, tfdpx chooses
            the size with the least predicted time. If activations are large, this size is at most
            half of the batch. The choice depends only on shapes and the plan.
        augment: An augmentation that runs on the device: a `tfdpx.augment` object or a Keras
            augmentation layer.
        augmult: Int K, the number of augmented views of each example. 0, the default, means no
            augmentation. With `augment=None`, K > 0 expects inputs of shape [batch, K, ...].
        seed: Optional int for experiments, the seed of the noise, of the augmented views and of the
            draws of examples. Anyone who knows the seed can subtract the noise, so private training
            needs `None`, which takes fresh seeds from the operating system.
        individual: Optional `tfdpx.accounting.IndividualAccountant` of the same plan, which
            computes an epsilon for each example. Each example is then clipped at its most recently
            measured norm. Needs `fit(x, y)` or `fit(plan.batches(...))`.
        public_validation: Bool. True declares that the validation examples of `fit` are public.
            With False, callbacks that act on `val_` metrics are refused, and
            `tfdpx.callbacks.TensorBoard` leaves these metrics out.
        augment_targets: Bool, whether to augment targets that are images of the same size as the
            inputs, for example masks. They get the same random choices as the inputs. If the
            augmentation interpolates, it blends the values of targets, too. So pass classes as
            one-hot floats. With None, such targets are an error if there is an `augment`. Boxes and
            points are never augmented.
    """

    plan: PrivacyPlan | None
    batch_size: int | None
    noise_multiplier: float | None
    l2_norm_clip: float | str | ClipPolicy
    microbatch_size: int | None
    augment: Any
    augmult: int
    seed: int | None
    individual: IndividualAccountant | None
    public_validation: bool
    augment_targets: bool | None


# The names of the arguments for privacy.
NAMES = [n for n in PrivateArguments.__annotations__ if n not in KerasArguments.__annotations__]
_DEFAULTS = {"l2_norm_clip": 1.0, "augmult": 0, "public_validation": False}
Settings = collections.namedtuple("Settings", [*NAMES, "policy"])  # type: ignore[misc]


def refuse(optimizer_class, keras_arguments):
    """Raises an error for the arguments that no private optimizer takes.

    These are arguments that would change the privacy mechanism, arguments named as in other
    libraries, and arguments that hold data.

    Args:
        optimizer_class: The private optimizer class.
        keras_arguments: Dict of the arguments that the optimizer would pass to Keras.
    """
    refuse_elsewhere(optimizer_class.__name__, keras_arguments)
    for argument, remedy in REFUSED.items():
        if keras_arguments.get(argument) is not None:
            raise ValueError(
                f"Argument `{argument}` would change the privacy mechanism; {remedy}. "
                f"Received: {argument}={shortened(keras_arguments[argument])}"
            )
    for argument, value in keras_arguments.items():
        if has_arrays(value) and not _takes(optimizer_class, argument):
            raise ValueError(
                f"Argument `{argument}` holds data, which an optimizer does not take. Received: "
                f"{argument}={shortened(value)}. Pass private data to `fit`. A few public examples "
                "help the classifier `tfdpx.AdaMix`."
            )


def refuse_epsilon(optimizer_class, arguments):
    """Raises ValueError if `epsilon` looks like a privacy budget, which belongs to the plan.

    Args:
        optimizer_class: The private optimizer class.
        arguments: Dict from names to values: the arguments or the attributes of an optimizer.
    """
    epsilon, name = arguments.get("epsilon"), optimizer_class.__name__
    takes_epsilon = _takes(optimizer_class, "epsilon")
    if not is_number(epsilon) or takes_epsilon and epsilon <= _MOST_EPSILON_OF_ADAM:
        return
    hint = f"; for {name} `epsilon` is the small constant in a denominator, such as 1e-7"
    hint *= takes_epsilon
    raise ValueError(
        "A privacy budget is an argument of the plan: "
        f"`{name}(..., plan=tfdpx.PrivacyPlan(..., epsilon={epsilon}, delta=...))`{hint}. "
        f"Received: {name}(epsilon={epsilon})."
    )


def _takes(optimizer_class, argument):
    """Returns whether the constructor of a class or of a base class takes `argument`."""
    constructors = (c.__init__ for c in optimizer_class.__mro__)
    return any(argument in inspect.signature(c).parameters for c in constructors)


def check_settings(arguments):
    """Checks a dict of privacy arguments, and returns `Settings` with defaults filled in.

    Warns if there is no noise, or if there is a seed.

    Raises:
        ValueError: If an argument is out of range, or contradicts `plan`.
    """
    settings = Settings(**{**dict.fromkeys([*NAMES, "policy"]), **_DEFAULTS, **arguments})
    plan, individual, policy = settings.plan, settings.individual, settings.l2_norm_clip
    if policy == AUTOMATIC or isinstance(policy, ClipPolicy):
        clip = AutomaticClip().l2_norm_clip if policy == AUTOMATIC else policy.l2_norm_clip
        settings = settings._replace(l2_norm_clip=clip, policy=policy)
    settings = settings._replace(
        batch_size=agreed("batch_size", settings.batch_size, plan),
        noise_multiplier=agreed("noise_multiplier", settings.noise_multiplier, plan),
    )
    _check_ranges(settings)
    if individual is not None and settings.policy is not None:
        raise ValueError(
            "Argument `individual` sets the clip policy, but `l2_norm_clip` is a clip policy too. "
            f"Received: l2_norm_clip={type(policy).__name__}. Leave one of them out."
        )
    if individual is not None and plan is not None and plan.unit == USER:
        raise ValueError(
            "Argument `individual` accounts for single examples, and the plan for people. "
            f'Received: plan.unit="{USER}". Leave it out, or make a plan of examples.'
        )
    if individual is not None:
        _check_individual(individual, plan, settings.l2_norm_clip)
    if settings.noise_multiplier == 0:
        warn(
            f"`noise_multiplier=0`: no noise is added (`l2_norm_clip={settings.l2_norm_clip}`). "
            "There is no privacy guarantee; epsilon is infinite.",
        )
    if settings.seed is not None:
        warn(
            "The optimizer is made with a `seed`: whoever knows it can take the noise away, so its "
            "weights are for experiments and must not be released. Leave `seed` out for private "
            "training."
        )
    size = settings.microbatch_size
    return settings._replace(
        # A config cannot hold NumPy's numbers.
        batch_size=int(settings.batch_size),
        noise_multiplier=float(settings.noise_multiplier),
        l2_norm_clip=float(settings.l2_norm_clip),
        microbatch_size=None if size is None else int(size),
        augment=as_views(settings.augment),
        augmult=int(settings.augmult),
    )


def _check_ranges(settings):
    """Raises ValueError if a value of `Settings` is out of range."""
    size, clip, sigma = settings.batch_size, settings.l2_norm_clip, settings.noise_multiplier
    require(is_integer(size, 1), "batch_size", size, "be an int >= 1")
    check_noise_multiplier(sigma)
    size, augmult = settings.microbatch_size, settings.augmult
    is_valid = size is None or is_integer(size, 1)
    require(is_valid, "microbatch_size", size, "be an int >= 1 or None")
    requirement = f'be a float > 0, "{AUTOMATIC}" or a clip policy'
    require(is_number(clip) and clip > 0, "l2_norm_clip", clip, requirement)
    if clip == math.inf and sigma:
        raise ValueError(
            "Argument `l2_norm_clip` must be finite for noise to hide an example. Received: "
            f"l2_norm_clip=inf, noise_multiplier={sigma}. Training without privacy takes "
            "noise_multiplier=0."
        )
    require(is_integer(augmult, 0), "augmult", augmult, "be an int >= 0 (0: no augmentation)")
    noise.make_seed(settings.seed)  # Raises an error if it is out of range.
    is_public, moves = settings.public_validation, settings.augment_targets
    require(isinstance(is_public, bool), "public_validation", is_public, "be True or False")
    require(moves in (None, True, False), "augment_targets", moves, "be True, False or None")


def clip_policy(settings, account):
    """Returns the `ClipPolicy` of an optimizer.

    Args:
        settings: `Settings`.
        account: The optimizer's `tfdpx.account.Account`.
    """
    if settings.individual is not None:
        return IndividualClip(settings.individual, account, settings.l2_norm_clip)
    if settings.policy == AUTOMATIC:
        return AutomaticClip()
    if settings.policy is not None:
        return copy.copy(settings.policy)  # A user may pass one policy to several optimizers.
    return ClipPolicy(settings.l2_norm_clip)


def _check_individual(individual, plan, l2_norm_clip):
    requirement = "be a tfdpx.accounting.IndividualAccountant"
    require(isinstance(individual, IndividualAccountant), "individual", individual, requirement)
    if individual.plan != plan:
        raise ValueError(
            "Argument `individual` accounts for another plan than the optimizer's. Received: "
            f"plan={plan}, individual.plan={individual.plan}. Give both the same: "
            "`DPSGD(plan=plan, individual=IndividualAccountant(plan))`."
        )
    if individual.fractions[0] * l2_norm_clip < SMALLEST_CLIP:
        raise ValueError(
            "Argument `l2_norm_clip` is too small: the least clip of an example, "
            f"{individual.fractions[0]:.3g} times it, must be at least {SMALLEST_CLIP}, or the "
            f"squares of gradients are lost in float32. Received: l2_norm_clip={l2_norm_clip}. "
            "Multiply the loss and `l2_norm_clip` by one constant: the update stays the same."
        )
