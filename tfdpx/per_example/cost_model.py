"""Predicts, for each layer, the cheapest way to compute norms and clipped sums."""

import contextlib
import dataclasses
import io
import threading

import tensorflow as tf
from rich import console, table

NORMS = ("instantiate", "ghost")
SUMS = ("contract", "ordinary")

_forced = threading.local()


@dataclasses.dataclass(frozen=True)
class Cost:
    """The work of a rule, without the forward and the backward pass over activations.

    Attributes:
        flops: Number of floating point operations. A multiplication and an addition count as two.
        bytes: Number of bytes that memory-bound operations read and write. Operations that are
            limited by arithmetic do not count.
        calls: Number of separate kernel launches.
    """

    flops: float = 0.0
    bytes: float = 0.0
    calls: float = 0.0

    def __add__(self, other):
        return Cost(self.flops + other.flops, self.bytes + other.bytes, self.calls + other.calls)

    def seconds(self, device):
        """Returns the predicted time in seconds on `device`, which is "cpu" or "accelerator"."""
        flops, bytes_per_second, call = _RATES[device]
        return self.flops / flops + self.bytes / bytes_per_second + self.calls * call


# Floating point operations per second, bytes per second, and seconds per kernel launch. Only ratios
# matter, because the model compares arithmetic with traffic and launches. The first row was
# measured on two CPU cores; the second is for a GPU of a data centre.
_RATES = {"cpu": (2e11, 1.5e10, 1e-4), "accelerator": (4e13, 1e12, 1e-5)}


@dataclasses.dataclass(frozen=True)
class Work:
    """The work of a model's trained layers, used to choose the size of a microbatch.

    Attributes:
        flops: Floating point operations of the forward pass, for one row.
        elements: Number of elements in the layers' outputs, for one row.
        weights: Number of trained weights.
        calls: Number of layer calls in a forward pass.
    """

    flops: float
    elements: float
    weights: int
    calls: int


@dataclasses.dataclass(frozen=True)
class LayerChoice:
    """The way in which one layer's per-example gradients are clipped, and its predicted cost.

    Attributes:
        layer: Name of the layer.
        rule: Name of the rule's class.
        norm: "instantiate" (every example's gradient is formed) or "ghost" (only the norm of every
            example's gradient is computed).
        sum: "contract" (the formed gradients are multiplied by factors and added) or "ordinary"
            (the output gradients are multiplied by factors, and one ordinary weight gradient is
            computed for the whole batch).
        flops: Predicted floating point operations of norm and sum, for the whole batch.
        bytes: Predicted bytes of memory traffic.
        alternatives: Dict with the predicted seconds of each pair that the rule supports. The keys
            are "norm/sum", for example "ghost/ordinary".
    """

    layer: str
    rule: str
    norm: str
    sum: str
    flops: float
    bytes: float
    alternatives: dict


class Choices(list):
    """A list of `LayerChoice` that prints as a table."""

    def __repr__(self):
        shown = table.Table("layer", "rule", "norm/sum", "MiB moved", "predicted ms")
        for choice in self:
            way = f"{choice.norm}/{choice.sum}"
            numbers = choice.bytes / 2**20, 1e3 * choice.alternatives[way]
            shown.add_row(choice.layer, choice.rule, way, *(f"{n:.3f}" for n in numbers))
        screen = console.Console(file=io.StringIO(), width=100, markup=False)
        screen.print(shown)
        return screen.file.getvalue().rstrip()


@contextlib.contextmanager
def forced_norms(norm):
    """Returns a context manager in which all rules compute norms in one way.

    Tests and benchmarks compare both ways. The norms differ only by rounding. A rule that supports
    only one way is not affected.

    Args:
        norm: "instantiate", "ghost", or "auto" for the way that is predicted to be cheaper.

    Raises:
        ValueError: If `norm` is another string.
    """
    if norm not in (*NORMS, "auto"):
        raise ValueError(
            f"Argument `norm` must be one of {(*NORMS, 'auto')}. Received: norm={norm!r}."
        )
    previous = getattr(_forced, "norm", "auto")
    _forced.norm = norm
    try:
        yield
    finally:
        _forced.norm = previous


def choose(layer, rule, costs, allows_ordinary_sum=False):
    """Returns the cheapest `LayerChoice` for a rule.

    Args:
        layer: Name of the layer.
        rule: Name of the rule's class.
        costs: Dict from names in `NORMS` and `SUMS` to a `Cost`. Names that the rule does not
            support are left out.
        allows_ordinary_sum: Bool, the result of `Rule.allows_ordinary_sum`.
    """
    device = device_kind()
    total_costs = {
        (norm, total): costs[norm] + costs[total]
        for norm in NORMS
        for total in _sums_after(norm, costs, allows_ordinary_sum)
        if norm in costs and total in costs
    }
    forced = getattr(_forced, "norm", "auto")
    candidates = {k: v for k, v in total_costs.items() if k[0] == forced} or total_costs
    best = min(candidates, key=lambda k: candidates[k].seconds(device))
    return LayerChoice(
        layer=layer,
        rule=rule,
        norm=best[0],
        sum=best[1],
        flops=total_costs[best].flops,
        bytes=total_costs[best].bytes,
        alternatives={f"{n}/{s}": cost.seconds(device) for (n, s), cost in total_costs.items()},
    )


def _sums_after(norm, costs, allows_ordinary_sum):
    """Returns the names in `SUMS` that may follow `norm`, a name in `NORMS`.

    "contract" adds exactly the arrays that the norm was computed from. An "ordinary" sum has other
    rounding errors, so the norm must include an allowance for these.
    """
    if norm == "ghost" or "contract" not in costs:
        return ["ordinary"]
    return SUMS if allows_ordinary_sum else ["contract"]


def cheapest(*costs):
    """Returns the `Cost` in `costs` with the shortest predicted time on this device."""
    device = device_kind()
    return min(costs, key=lambda cost: cost.seconds(device))


def device_kind():
    """Returns "accelerator" if TensorFlow sees a GPU or a TPU, else "cpu"."""
    kinds = {device.device_type for device in tf.config.list_logical_devices()}
    return "accelerator" if kinds & {"GPU", "TPU"} else "cpu"
