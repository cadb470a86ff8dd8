"""Clip policies, which choose the norm at which each example's gradient is clipped.

In every update the private step calls the methods of the policy in this order:

1. `clips` before gradients are computed, and `before_weights` if there are class weights;
2. `clip` for the factors that scale the gradients;
3. `after_weights` and `measure` when all norms are known;
4. `update` after the noise.

Class weights multiply gradients after clipping. All methods except `before_weights` and
`after_weights` ignore class weights. To use another policy, pass it as `l2_norm_clip=`.

Guarantee, which every policy must keep: after scaling by the factor of `clip`, an example's
gradient has a norm of at most 1/B, where B is the declared batch size. The factor depends only on
the example's norm and on numbers that are noisy or accounted for. The private step adds noise with
`gradient_noise_multiplier` to the gradients and to `NormStatistics.noisy`. This noise must suffice
for both together.
"""

import math
import typing
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfdpx import mechanism
from tfdpx._arguments import is_number, require
from tfdpx._keras.variables import value_of, variable
from tfdpx.account import attach
from tfdpx.per_example.rounding import SMALLEST_CLIP, UNIT
from tfdpx.training import replicas

AUTOMATIC = "automatic"
# A root, a sum, two quotients and the product with a gradient are rounded, each by at most UNIT.
_ROUNDED = 1.0 - 8 * UNIT
_LARGEST_CLIP = _LARGEST_NOISE = 1e9
# The default noise on the adaptive clip's count: this share of the batch size, as the paper
# advises, but at least this many times sigma. At this minimum, gradients get 3% more noise.
_OF_BATCH, _OF_SIGMA = 1 / 20, 2.0
# An indicator falls from 1 to 0 over this fraction of the clip. With a step function, one more
# example could flip many indicators: it would move other examples to other rows, where their norms
# are rounded differently.
_RAMP = 0.1


class NormStatistics(typing.NamedTuple):
    """The statistics that a policy computes in one update from this replica's examples.

    Attributes:
        noisy: List of float32 scalars, each a sum over examples divided by B. The private step adds
            these sums up over replicas, and adds noise to them as to the gradients.
        exact: List of float32 tensors that are added up over replicas, without noise.
    """

    noisy: list = []
    exact: list = []


@keras.saving.register_keras_serializable(package="tfdpx")
class ClipPolicy:
    """Clips every example's gradient at a constant norm, C (De et al. 2022, Eq. 1).

    Args:
        l2_norm_clip: Float, C; infinity for training without privacy.

    Attributes:
        gradient_noise_multiplier: Float, the noise multiplier for the gradients and
            for `NormStatistics.noisy`. An update must cost no more than one Gaussian mechanism with
            the optimizer's noise multiplier. So a policy that releases noisy statistics needs a
            larger number than the optimizer's.
    """

    def __init__(self, l2_norm_clip: float) -> None:
        self.l2_norm_clip = l2_norm_clip

    def init(self, optimizer: Any) -> None:
        """Prepares the policy for `optimizer`, and may add variables to it, which Keras saves."""
        self.gradient_noise_multiplier = optimizer.noise_multiplier

    def clips(self, ids: tf.Tensor | None, count: int | tf.Tensor) -> tf.Tensor | None:
        """Returns the clip of each example, float32 [count]; None if no other method needs it.

        The result is only passed to other methods of the policy, so its unit is up to the policy.

        Args:
            ids: int32 [count], the indices of the examples in the data set. None if the indices are
                unknown, or if the rows are dummy data.
            count: Int or scalar tensor, the number of examples.
        """
        return None

    def before_weights(self, clips: Any, weights: tf.Tensor) -> Any:
        """Returns the clips for `clip` if class weights multiply gradients after clipping.

        By default, class weights do not change the clips. A policy may allow larger clips for
        examples whose gradients will be multiplied by a weight below 1.

        Args:
            clips: float32 [count] or None, the result of `self.clips`.
            weights: float32 [count], the class weights, in [0, 1] or NaN.
        """
        return clips

    def after_weights(self, squared_norms: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        """Returns the squared norms that `measure` gets, float32 [n].

        By default, these are the norms before clipping and weighting. A policy may return the norms
        that gradients have after clipping and weighting.

        Args:
            squared_norms: float32 [n], the squared norm of each gradient.
            weights: float32 [n], the class weights, in [0, 1] or NaN.
        """
        return squared_norms

    def clip(self, squared_norms: Any, present: Any, batch_size: int, clips: Any) -> tf.Tensor:
        """Returns the factors that scale gradients, float32 [n]; see `mechanism.clip_factors`.

        The factors of absent rows and of non-finite norms do not matter: `mechanism.zero_invalid`
        sets them to zero afterwards.

        Args:
            squared_norms: float32 [n], the squared norm of each gradient.
            present: bool [n], whether a row holds an example.
            batch_size: Int, B.
            clips: The result of `clips` for these examples.
        """
        return mechanism.clip_factors(squared_norms, self.l2_norm_clip, batch_size)

    def measure(self, ids: Any, present: Any, squared_norms: Any, clips: Any) -> NormStatistics:
        """Returns the statistics of a batch's norms that `update` needs, a `NormStatistics`.

        Arguments are as for `clip` and `clips`. Rows that are not present must not change the
        result. Some norms may be infinite or NaN.
        """
        return NormStatistics()

    def update(self, measured: NormStatistics) -> None:
        """Prepares the policy for the next update, for example changes the clip.

        `measured` holds the sums of the statistics over all replicas. The sums in `measured.noisy`
        already have noise.
        """

    def released(self) -> dict[str, float]:
        """Returns a dict of numbers to log by name, which the guarantee must cover."""
        return {}

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return {"l2_norm_clip": self.l2_norm_clip}

    @classmethod
    def from_config(cls, config: dict) -> "ClipPolicy":
        """Returns a policy made from the result of `get_config()`."""
        return cls(**config)


@keras.saving.register_keras_serializable(package="tfdpx")
class AutomaticClip(ClipPolicy):
    """Normalizes every gradient (Bu et al. 2022, arXiv:2206.07136).

    The optimizer's argument `l2_norm_clip="automatic"` chooses this policy.

    An update is `1/B sum_i g_i / (|g_i| + stability) + sigma/B xi`. Long and short gradients have
    nearly the same weight, so there is no clip to choose. The attribute `l2_norm_clip` of this
    policy is 1, the bound on the norm of a normalized gradient.

    Guarantee: the same as for a constant clip of 1, because an example adds at most `|g| / (|g| +
    stability) / B < 1/B`.

    Args:
        stability: Float >= 1e-9. Gradients with norms far below `stability` keep their relative
            lengths. For gradients with norms far above it, only the direction counts.

    Raises:
        ValueError: If `stability` is out of range.
    """

    def __init__(self, stability: float = 0.01) -> None:
        super().__init__(1.0)
        is_valid = is_number(stability) and SMALLEST_CLIP <= stability < math.inf
        require(is_valid, "stability", stability, f"be a finite float >= {SMALLEST_CLIP}")
        self.stability = float(stability)

    def clip(self, squared_norms, present, batch_size, clips):
        """Returns `1 / (B (norm + stability))`, float32 [n], minus a bound on rounding errors."""
        return _ROUNDED / (tf.sqrt(squared_norms) + self.stability) / float(batch_size)

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        return {"stability": self.stability}


@keras.saving.register_keras_serializable(package="tfdpx")
class AdaptiveClip(ClipPolicy):
    """A clip that follows a quantile of the norms: `DPSGD(l2_norm_clip=tfdpx.AdaptiveClip())`.

    After each update the clip C becomes `C exp(-learning_rate (b - quantile))` (Andrew et al. 2021,
    arXiv:1905.03871), where b is the noisy share of the examples with a norm of at most C. The clip
    is a variable of the optimizer: Keras's files, `Checkpoint` and copies keep it, and the logs
    show it as `l2_norm_clip`. The optimizer's learning rate needs no change, because the update is
    divided by the clip.

    Guarantee: an update costs the same as one Gaussian mechanism with the optimizer's noise
    multiplier sigma, and the ledger counts the update as one. Each update releases two noisy sums:

    - the sum of clipped gradients, with noise multiplier z, where
      1/z^2 = 1/sigma^2 - 1/(2 sigma_b)^2;
    - the sum of (indicator - 1/2), with noise of standard deviation sigma_b. The indicator of an
      example falls from 1 to 0 as its norm rises from 0.95 C to 1.05 C.

    After the second sum is multiplied by z/sigma_b, its noise multiplier is z, too. One example
    then moves both sums together by at most sqrt(1 + (z / (2 sigma_b))^2) = z/sigma.

    Args:
        initial: Float from 1e-9 to 1e9, the clip of the first update. It need not be close: at
            `learning_rate=0.2` the clip moves by a factor of 10 in about 23 updates.
        quantile: Float between 0 and 1, the target share of norms that are at most the clip.
        learning_rate: Float > 0, the step size for the logarithm of the clip.
        noise_multiplier: Optional float sigma_b, the standard deviation of the noise on the number
            of examples with a norm of at most C. It must exceed half of the optimizer's noise
            multiplier. None means a twentieth of the batch size, but at least twice the optimizer's
            noise multiplier.

    Attributes:
        l2_norm_clip: Float, the current clip.

    Raises:
        ValueError: If an argument is out of range. The optimizer raises this error, too, if
            `noise_multiplier` is too small for the optimizer's noise multiplier.
    """

    def __init__(
        self,
        initial: float = 1.0,
        quantile: float = 0.5,
        learning_rate: float = 0.2,
        noise_multiplier: float | None = None,
    ) -> None:
        is_valid = is_number(initial) and SMALLEST_CLIP <= initial <= _LARGEST_CLIP
        require(is_valid, "initial", initial, f"lie in [{SMALLEST_CLIP}, {_LARGEST_CLIP:g}]")
        is_valid = is_number(quantile) and 0 < quantile < 1
        require(is_valid, "quantile", quantile, "lie strictly between 0 and 1")
        is_valid = is_number(learning_rate) and 0 < learning_rate < math.inf
        require(is_valid, "learning_rate", learning_rate, "be a finite float > 0")
        noise = noise_multiplier
        is_valid = noise is None or is_number(noise) and 0 <= noise <= _LARGEST_NOISE
        require(is_valid, "noise_multiplier", noise, f"lie in [0, {_LARGEST_NOISE:g}], or be None")
        self.initial, self.quantile = float(initial), float(quantile)
        self.learning_rate = float(learning_rate)
        self.noise_multiplier = None if noise is None else float(noise)
        self._clip: Any = None

    @property
    def l2_norm_clip(self) -> float:  # type: ignore[override]
        """Float, the current clip, or the initial clip before an optimizer uses the policy."""
        if self._clip is None:
            return self.initial
        clip = float(keras.ops.convert_to_numpy(self._clip))
        return min(max(clip, SMALLEST_CLIP), _LARGEST_CLIP)

    def init(self, optimizer: Any) -> None:
        """Adds the clip to the optimizer's variables, and computes the noise of the two sums."""
        sigma, noise = optimizer.noise_multiplier, self.noise_multiplier
        if noise is None:
            noise = max(_OF_BATCH * optimizer.batch_size, _OF_SIGMA * sigma)
        ratio = sigma / (2 * noise) if noise else float(sigma > 0)
        if ratio >= 1:
            raise ValueError(
                "Argument `noise_multiplier` of AdaptiveClip must exceed half of the optimizer's, "
                f"{sigma / 2:.6g}: the count alone would reveal what both may. Received: "
                f"noise_multiplier={noise}. Give {_OF_SIGMA * sigma:.3g} or more, or leave it out."
            )
        # This is z in the guarantee. Without noise, any weight of the count will do.
        self.gradient_noise_multiplier = sigma / math.sqrt(1 - ratio**2)
        self._weight = self.gradient_noise_multiplier / noise if sigma else 1.0
        self._batch_size = optimizer.batch_size
        initializer = keras.initializers.Constant(self.initial)
        self._clip = optimizer.add_variable([], initializer, "float32", name="l2_norm_clip")

    def clips(self, ids: tf.Tensor | None, count: int | tf.Tensor) -> tf.Tensor:
        """Returns the current clip, repeated for each example, float32 [count]."""
        return tf.fill([count], self._bounded_clip())

    def clip(self, squared_norms: Any, present: Any, batch_size: int, clips: Any) -> tf.Tensor:
        """Returns the factors that clip at the current clip; see `mechanism.clip_factors`."""
        return mechanism.clip_factors(squared_norms, clips, batch_size)

    def measure(self, ids: Any, present: Any, squared_norms: Any, clips: Any) -> NormStatistics:
        """Returns the second sum in the class's guarantee, times z/sigma_b and divided by B."""
        excess = tf.sqrt(squared_norms) / clips - 1.0
        indicators = tf.clip_by_value(0.5 - excess / _RAMP, 0.0, 1.0)
        # A norm that is not finite counts as above the clip.
        indicators = tf.where(tf.math.is_finite(excess), indicators, 0.0)
        total = tf.reduce_sum(tf.where(present, indicators - 0.5, 0.0))
        return NormStatistics(noisy=[total * (self._weight / self._batch_size)])

    def update(self, measured: NormStatistics) -> None:
        """Multiplies the clip by a factor that moves it towards the quantile."""
        share = 0.5 + measured.noisy[0] / self._weight
        self._clip.assign(
            self._bounded_clip() * tf.exp(-self.learning_rate * (share - self.quantile))
        )

    def released(self) -> dict[str, float]:
        """Returns the current clip for the logs, as `{"l2_norm_clip": clip}`."""
        return {"l2_norm_clip": self.l2_norm_clip}

    def get_config(self) -> dict:
        """Returns the arguments of the constructor."""
        names = ("initial", "quantile", "learning_rate", "noise_multiplier")
        return {name: getattr(self, name) for name in names}

    def _bounded_clip(self):
        """Returns the clip, a float32 scalar, limited to the range in which float32 can clip."""
        clip = tf.convert_to_tensor(self._clip.value)
        return tf.clip_by_value(clip, SMALLEST_CLIP, _LARGEST_CLIP)


class IndividualClip(ClipPolicy):
    """Clips each example at its most recently measured norm, for an `IndividualAccountant`.

    The accountant has an ascending list of fractions f_1, f_2, ... of the clip C. An example at
    level n is clipped at the norm f_n C. This policy counts how many steps each example spent at
    each level. It updates the counts of an example only when the example's level may change.

    The norms are functions of the private data, so neither Keras nor `tf.train.Checkpoint` saves
    them. Only `tfdpx.callbacks.Checkpoint` saves the levels and counts that follow from the norms.

    Args:
        accountant: `tfdpx.accounting.IndividualAccountant`, which reads each example's steps from
            this policy.
        account: The optimizer's `tfdpx.account.Account`.
        l2_norm_clip: Float, C.
    """

    def __init__(self, accountant, account, l2_norm_clip):
        super().__init__(l2_norm_clip)
        accountant.attach(self)
        self.refreshes_per_epoch = accountant.refreshes_per_epoch
        self.plan, self._account = accountant.plan, account
        self._fractions = accountant.fractions
        # Clips are rounded down: in float32, none may exceed the fraction that is accounted for.
        rounded = self._fractions.astype("float32")
        clips = np.where(rounded > self._fractions, np.nextafter(rounded, np.float32(0)), rounded)
        self._clips = tf.constant(clips)
        self._count, count = self.plan.num_examples, self.plan.num_examples + 1
        # The last row is for absent examples. Counts are small integers in float32, because
        # TensorFlow keeps int32 off GPUs.
        worst = len(self._fractions)
        self._variables = {
            "levels": variable(np.full([count], worst), "int64"),
            "since": variable(np.zeros([count]), "int64"),
            "counts": variable(np.zeros([count, worst]), "float32"),
            "steps": variable(0, "int64"),
            "refreshes": variable(0, "int64"),
        }
        self._examples = None  # The fingerprint of the examples.

    def check_examples(self, draws):
        """Raises ValueError if no plan draws the batches, or earlier draws had other examples."""
        if draws is None:
            raise ValueError(
                "Individual accounting must know which example is which, and `fit` was given other "
                "data than `plan.batches(...)` made, or batches that were changed. Give it "
                "`plan.batches(x, y, optimizer=model.optimizer)` as it is."
            )
        self._check_fingerprint(draws.examples.fingerprint())

    def clips(self, ids, count):
        """Returns each example's clip as a fraction of C, float32 [count]; 1 for padding."""
        if ids is None:
            return tf.ones([count])
        return tf.gather(self._clips, tf.gather(self._variables["levels"], ids) - 1)

    def before_weights(self, clips, weights):
        """Returns min(1, clip / weight) for each example, float32 [count].

        After weighting, the norm of a gradient is then at most the clip, as a fraction of C.
        """
        fractions = tf.minimum(clips * _ROUNDED / weights, 1.0)
        return tf.where(weights < 1, fractions, clips)

    def after_weights(self, squared_norms, weights):
        """Returns the squared norms, float32 [n], after clipping at C and weighting.

        Norms of examples with a weight of 1 do not change.
        """
        norms = tf.minimum(tf.sqrt(squared_norms), self.l2_norm_clip) * weights
        is_reduced = tf.math.is_finite(squared_norms) & (weights < 1)
        return tf.where(is_reduced, tf.square(norms), squared_norms)

    def clip(self, squared_norms, present, batch_size, clips):
        """Returns the factors, float32 [n], that clip example i at the norm `clips[i] * C`."""
        return mechanism.clip_factors(squared_norms, self.l2_norm_clip, batch_size, clips)

    def over_clip(self, squared_norms):
        """Returns min(1, norm / C) for each example, float32 [n]; 1 if the norm is not finite."""
        norms = tf.sqrt(squared_norms) / self.l2_norm_clip
        # A gradient that is not finite counts as longer than C.
        return tf.where(tf.math.is_finite(norms), tf.minimum(norms, 1.0), 1.0)

    def measure(self, ids, present, squared_norms, clips):
        """Returns a `NormStatistics` with one float32 tensor in `exact`, [3, replicas * n].

        Each column is an example: its id, whether it is present (1 or 0), and its norm over C.
        """
        columns = [
            tf.cast(ids, "float32"),
            tf.cast(present, "float32"),
            self.over_clip(squared_norms),
        ]
        return NormStatistics(exact=[replicas.scatter_to_replica_slot(tf.stack(columns))])

    def update(self, measured):
        """Counts an update, and stores the norms of its examples."""
        ids, present, norms = tf.unstack(measured.exact[0])
        self.count_update(tf.cast(ids, "int32"), present > 0, norms)

    def count_update(self, ids, present, norms):
        """Counts an update and stores the norms of its examples.

        Args:
            ids: int32 [n], the indices of the examples in the data set.
            present: bool [n], whether a row holds an example.
            norms: float32 [n], the finite norms of gradients, divided by C.
        """
        step = tf.convert_to_tensor(self._variables["steps"])
        self._store_norms(ids, present, norms, step + 1)
        self._variables["steps"].assign_add(1)

    def refresh(self, norms):
        """Stores the norms of all examples, float32 [num_examples], between two updates."""
        ids, step = tf.range(self._count), tf.convert_to_tensor(self._variables["steps"])
        self._store_norms(ids, tf.fill([self._count], True), self.over_clip(norms**2), step)

    def _store_norms(self, ids, present, norms, until_step):
        """Counts the steps before `until_step` at the old levels, then sets levels by `norms`."""
        variables = self._variables
        entries = tf.where(present, tf.cast(ids, "int64"), self._count)
        levels = tf.gather(variables["levels"], entries)
        steps = until_step - tf.gather(variables["since"], entries)
        places = tf.stack([entries, levels - 1], axis=1)
        _scatter(variables["counts"], "add", places, tf.cast(steps, "float32"))
        _scatter(
            variables["since"],
            "update",
            entries[:, tf.newaxis],
            tf.fill(tf.shape(entries), until_step),
        )
        # The lowest level with a clip of at least the norm.
        levels = 1 + tf.searchsorted(self._clips, norms, side="left", out_type=tf.int64)
        levels = tf.minimum(levels, len(self._fractions))
        _scatter(variables["levels"], "update", entries[:, tf.newaxis], levels)

    def refresh_is_due(self):
        """Returns whether a refresh of all norms is due. If so, counts this refresh as done."""
        steps, refreshes = int(self._array("steps")), int(self._array("refreshes"))
        due_refreshes = int(
            steps * self.plan.sampling_probability * self.refreshes_per_epoch + 1e-9
        )
        self._variables["refreshes"].assign(due_refreshes)
        return due_refreshes > refreshes

    def counts(self):
        """Returns each example's number of steps at each level, int64 [num_examples, levels]."""
        counts = self._array("counts")[: self._count].astype("int64")
        levels, since = (self._array(name)[: self._count] for name in ("levels", "since"))
        counts[np.arange(self._count), levels - 1] += int(self._array("steps")) - since
        return counts

    def fractions(self):
        """Returns each example's current clip as a fraction of C, float64 [num_examples]."""
        return self._fractions[self._array("levels")[: self._count] - 1]

    def ledger(self):
        """Returns the ledger of everything spent on the weights."""
        return self._account.ledger()

    def spend(self, ledger):
        """Adds a ledger to the ledger of the weights."""
        attach(ledger, self._account.variables())

    def state(self):
        """Returns a dict of arrays for a `Checkpoint` to save. The arrays reveal private data."""
        arrays = {
            name: value_of(state_variable) for name, state_variable in self._variables.items()
        }
        return {"examples": np.array(self._examples or ""), **arrays}

    def restore(self, state):
        """Restores a result of `state()`, which must be of the same examples and fractions."""
        for name, state_variable in self._variables.items():
            if name not in state or state[name].shape != state_variable.shape:
                raise ValueError(
                    f"The saved norms of individual accounting lack {name!r} of shape "
                    f"{tuple(state_variable.shape)}. Go on with the accountant that saved them."
                )
        self._check_fingerprint(str(state["examples"]))
        for name, state_variable in self._variables.items():
            state_variable.assign(state[name])

    def _check_fingerprint(self, fingerprint):
        if self._examples not in (None, fingerprint):
            raise ValueError(
                "These batches are of other examples, or in another order, than those that this "
                "IndividualAccountant has followed: the norm of one would be taken for another's. "
                "Train on the same arrays, or compile with a new optimizer and accountant."
            )
        self._examples = fingerprint

    def _array(self, name):
        return value_of(self._variables[name])


def split_ids(optimizer, data):
    """Returns the batch for Keras, and the indices of the batch's examples, int32 [B] or None.

    Only individual accounting needs the indices. The batch must then be
    `(x, y, sample_weight, ids)`, as `fit` makes it; any other batch raises ValueError.
    """
    if optimizer.individual is None:
        return data, None
    session = optimizer.session
    is_drawn = session is not None and session.draws is not None
    if not is_drawn or not isinstance(data, tuple) or len(data) != 4:
        raise ValueError(
            "Individual accounting must know which examples a batch holds. Received: a batch "
            "without ids. Train with `model.fit(plan.batches(x, y))` or "
            "`tfdpx.distributed.fit`, and not by `train_on_batch` or `train_step`."
        )
    return data[:3], data[3]


def _scatter(target, kind, places, values):
    """Writes `values` [n] to a variable at `places` [n, rank], or adds them if `kind` is "add"."""
    if not isinstance(target, tf.distribute.DistributedValues):
        getattr(target, f"scatter_nd_{kind}")(places, values)
        return
    # A variable with a copy on each replica has no scatter.
    function = tf.tensor_scatter_nd_add if kind == "add" else tf.tensor_scatter_nd_update
    target.assign(function(tf.convert_to_tensor(target), places, values))
