"""jax-privacy with flax and optax: a jitted update by a DP execution plan, as in its documentation.

A mode is the number of examples that `clipped_grad` vectorizes at a time. Drawn batches are padded
to 64 examples, so the update is compiled only once. Microbatches of only padding are skipped.
"""

import importlib.metadata
import sys
import time

import dp_accounting
import jax
import numpy as np
import optax
from flax import linen as nn
from jax_privacy import batch_selection
from jax_privacy.experimental import execution_plan

from experiments.comparison import cases, worker

ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE


def versions():
    """Returns the versions of the libraries."""
    names = ("jax-privacy", "jax", "flax", "optax", "dp-accounting")
    return {name: importlib.metadata.version(name) for name in names}


class Digits(nn.Module):
    """The small network that classifies the digits."""

    @nn.compact
    def __call__(self, x):
        """Returns the logits of x [batch, 8, 8, 1]."""
        for channels, stride in ((32, 1), (32, 2), (64, 2)):
            x = nn.Conv(channels, (3, 3), stride)(x)
            x = nn.gelu(nn.GroupNorm(4, epsilon=1e-3)(x), approximate=False)
        return nn.Dense(10)(x.reshape(len(x), -1))


class WRN(nn.Module):
    """Like `tfdpx.models.WideResNet(16, 4)`."""

    @nn.compact
    def __call__(self, x):
        """Returns the logits of x [batch, 32, 32, 3]."""

        def conv(x, channels, size, stride=1):
            return nn.Conv(channels, (size, size), stride, use_bias=False)(x)

        def norm(x):
            return nn.relu(nn.GroupNorm(16, epsilon=1e-3)(x))

        x = conv(x, 16, 3)
        for channels, stride in ((64, 1), (64, 1), (128, 2), (128, 1), (256, 2), (256, 1)):
            same = stride == 1 and x.shape[-1] == channels
            skip = x if same else conv(x, channels, 1, stride)
            x = skip + conv(norm(conv(norm(x), channels, 3, stride)), channels, 3)
        return nn.Dense(10)(norm(x).mean((1, 2)))


class Depthwise(nn.Module):
    """The network of depthwise convolutions."""

    @nn.compact
    def __call__(self, x):
        """Returns the logits of x [batch, 32, 32, 3]."""

        def block(x, channels, size, stride=1, groups=1):
            arguments = dict(use_bias=False, feature_group_count=groups)
            x = nn.Conv(channels, (size, size), stride, **arguments)(x)
            return nn.relu(nn.GroupNorm(16, epsilon=1e-3)(x))

        x = block(x, 32, 3)
        for channels, stride in cases.DEPTHWISE:
            x = block(block(x, x.shape[-1], 3, stride, x.shape[-1]), channels, 1)
        return nn.Dense(10)(x.mean((1, 2)))


class Transformer(nn.Module):
    """Four pre-norm encoder blocks and the mean of the tokens."""

    lora: bool = False

    @nn.compact
    def __call__(self, x):
        """Returns the logits of x [batch, tokens, width]."""

        def projected(x, name, low_rank):
            y = nn.Dense(cases.WIDTH, name=name)(x)
            if low_rank:
                low = nn.Dense(cases.RANK, use_bias=False, name=f"{name}_lora_down")(x)
                zeros = nn.initializers.zeros
                arguments = dict(use_bias=False, kernel_init=zeros, name=f"{name}_lora_up")
                y = y + nn.Dense(cases.WIDTH, **arguments)(low)
            return y.reshape(*x.shape[:-1], cases.HEADS, -1)

        for block in range(cases.BLOCKS):
            y = nn.LayerNorm(epsilon=1e-3)(x)
            query, key, value = (
                projected(y, f"{name}{block}", self.lora and name != "key")
                for name in ("query", "key", "value")
            )
            mixed = jax.nn.dot_product_attention(query, key, value)
            x = x + nn.Dense(cases.WIDTH)(mixed.reshape(x.shape))
            y = nn.LayerNorm(epsilon=1e-3)(x)
            y = nn.gelu(nn.Dense(4 * cases.WIDTH)(y), approximate=False)
            x = x + nn.Dense(cases.WIDTH)(y)
        return nn.Dense(10, name="head")(x.mean(1))


def build(case, x, seed=0):
    """Returns the module of a case, and two dicts by path: trainable and frozen weights."""
    modules = {"digits": Digits, "wrn_16_4": WRN, "depthwise": Depthwise}
    module = modules[case]() if case in modules else Transformer(case == "transformer_lora")
    weights = nn.FrozenDict(module.init(jax.random.key(seed), x[:1])["params"])
    flat = {"/".join(path): v for path, v in _flat(weights)}
    frozen = {}
    if case == "transformer_lora":
        frozen = {k: v for k, v in flat.items() if "lora" not in k and "head" not in k}
    return module, {k: v for k, v in flat.items() if k not in frozen}, frozen


def _flat(tree, path=()):
    for name, value in tree.items():
        if isinstance(value, jax.Array):
            yield (*path, name), value
        else:
            yield from _flat(value, (*path, name))


def _nested(flat):
    tree = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return tree


def loss_of(module, frozen):
    """Returns a function that computes the loss from the trained weights and a batch."""

    def loss(weights, x, y):
        logits = module.apply({"params": _nested({**frozen, **weights})}, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    return loss


def planned(sampling_probability, updates, batch_size, seed, **budget):
    """Returns the execution plan of DP-SGD."""
    return execution_plan.BandMFExecutionPlanConfig(
        iterations=updates,
        strategy=np.ones(1),
        sampling_prob=sampling_probability,
        l2_clip_norm=cases.CLIP,
        normalize_by=batch_size,
        partition_type=batch_selection.PartitionType.INDEPENDENT,
        accountant=dp_accounting.pld.PLDAccountant(ADD_OR_REMOVE),
        noise_seed=seed,
        **budget,
    ).plan


def private_update(plan, loss, optimizer, microbatch_size):
    """Returns a jitted function that updates weights and states from a padded batch."""
    gradient = plan.clipped_grad(loss, batch_argnums=(1, 2), microbatch_size=microbatch_size)

    @jax.jit
    def update(weights, noise, state, x, y, padding):
        clipped = gradient(weights, x, y, is_padding_example=padding)
        noisy, noise = plan.noise_addition_transform.update(clipped, noise)
        change, state = optimizer.update(noisy, state)
        return optax.apply_updates(weights, change), noise, state

    return update


def rows(x, y, drawn, multiple):
    """Returns the drawn examples with padding, and a mask that is True for padding."""
    index = batch_selection.pad_to_multiple_of(drawn, multiple)
    return x[index], y[index], index == -1


def digits(seed, rate=cases.DIGITS_RATE):
    """Trains the digits and returns a dict of accuracy, epsilon and seconds."""
    x, y, test_x, test_y = cases.digits()
    began = time.perf_counter()
    probability, updates = cases.DIGITS_BATCH / len(x), cases.DIGITS_UPDATES
    budget = {"epsilon": cases.EPSILON, "delta": cases.DELTA}
    plan = planned(probability, updates, cases.DIGITS_BATCH, seed, **budget)
    module, weights, _ = build("digits", x, seed)
    optimizer = optax.sgd(rate)
    update = private_update(plan, loss_of(module, {}), optimizer, 16)
    noise, state = plan.noise_addition_transform.init(weights), optimizer.init(weights)
    first = None
    for drawn in plan.batch_selection_strategy.batch_iterator(len(x), rng=seed):
        weights, noise, state = update(weights, noise, state, *rows(x, y, drawn, 320))
        if first is None:
            first = time.perf_counter() - began if jax.block_until_ready(weights) else None
    jax.block_until_ready(weights)
    seconds = time.perf_counter() - began
    logits = module.apply({"params": _nested(weights)}, test_x)
    accountant = dp_accounting.pld.PLDAccountant(ADD_OR_REMOVE).compose(plan.dp_event)
    return {
        "accuracy": float(np.mean(np.argmax(logits, 1) == test_y)),
        "epsilon": accountant.get_epsilon(cases.DELTA),
        "accountant": "PLD",
        "sampling": "Poisson",
        "noise_multiplier": _noise_multiplier(plan.dp_event),
        "sampling_probability": probability,
        "updates": updates,
        "first_seconds": first,
        "seconds": seconds,
    }


def _noise_multiplier(event):
    """Returns the noise multiplier of the Gaussian event that `event` contains."""
    while not hasattr(event, "noise_multiplier"):
        event = event.event
    return float(event.noise_multiplier)


class training:  # noqa: N801
    """Makes updates of a case. `mode` is a mode of this library or "ordinary" (without privacy)."""

    def __init__(self, case, mode):
        self._x, self._y = cases.examples(case)
        self._private = mode != "ordinary"
        module, weights, frozen = build(case, self._x)
        loss, optimizer = loss_of(module, frozen), optax.sgd(cases.RATE)
        if self._private:
            probability = cases.BATCH / cases.EXAMPLES
            self._plan = planned(
                probability,
                cases.EPOCH_UPDATES,
                cases.BATCH,
                0,
                epsilon=None,
                delta=None,
                noise_multiplier=cases.SIGMA,
            )
            self._update = private_update(self._plan, loss, optimizer, int(mode.split()[1]))
            noise = self._plan.noise_addition_transform.init(weights)
            self._state = weights, noise, optimizer.init(weights)
        else:

            @jax.jit
            def update(weights, state, x, y):
                change, state = optimizer.update(jax.grad(loss)(weights, x, y), state)
                return optax.apply_updates(weights, change), state

            self._update, self._state = update, (weights, optimizer.init(weights))

    def step(self):
        """Makes an update on one batch."""
        self._made(np.arange(cases.BATCH))
        jax.block_until_ready(self._state)

    def epoch(self):
        """Makes an update on every batch."""
        if self._private:
            drawn = self._plan.batch_selection_strategy.batch_iterator(cases.EXAMPLES)
        else:
            order = np.random.default_rng().permutation(cases.EXAMPLES)
            drawn = order.reshape(cases.EPOCH_UPDATES, cases.BATCH)
        for index in drawn:
            self._made(index)
        jax.block_until_ready(self._state)

    def _made(self, index):
        if self._private:
            batch = rows(self._x, self._y, index, 2 * cases.BATCH)
        else:
            batch = self._x[index], self._y[index]
        self._state = self._update(*self._state, *batch)


if __name__ == "__main__":
    worker.main(sys.modules[__name__])
