"""Newton's method on the sigmoid cross-entropy, with a Hessian for each class (Algorithm 1)."""

import dataclasses
import functools
import math

import keras
import numpy as np

from tfdpx._arguments import check_positive_integer
from tfdpx.heads import _solves
from tfdpx.heads._fields import argument, not_negative, optional, positive
from tfdpx.heads._gradients import Gradients
from tfdpx.heads._moments import ROWS, ClippedRows, SecondMoment
from tfdpx.heads.head import Head

# The bound on the second derivative of the logistic loss.
_CURVATURE = 0.25


@keras.saving.register_keras_serializable(package="tfdpx")
@dataclasses.dataclass(eq=False)
class Newton(Head):
    """Logistic regression by `steps` Newton steps with noisy gradients and Hessians.

    Algorithm 1 of "Differentially Private Image Classification from Features". With x_i clipped to
    C = `l2_norm_clip` and p_ij the sigmoid of the logits, each step releases for all classes j

        g_j = sum_i (p_ij - y_ij) x_i,   H_j = sum_i p_ij (1 - p_ij) x_i x_i^T,

    and moves by `-eta (H_j/n + lambda I)^-1 g_j/n`. The weights start at zero, as does the bias,
    which stays there: Algorithm 1 has none.

    Guarantee: (epsilon, delta)-differential privacy under adding or removing one example: `2 steps`
    Gaussians (Theorem 2.1). An example changes all g_j together by at most sqrt(num_classes) C, and
    all H_j by sqrt(num_classes) C^2 / 4 in the Frobenius norm. The noise on the H_j is symmetric,
    which is as private (`Releases.symmetric`).

    Classes are treated a few at a time, with a pass over the examples for each `class_memory`
    bytes of Hessians. Each class costs a product of n d^2 a step.

    Args:
        num_classes: Int.
        epsilon: Float > 0; `math.inf` for a fit without clipping and noise.
        delta: Float in (0, 1).
        steps: Int.
        learning_rate: Float, eta.
        l2_regularization: Float, lambda, added to the mean H_j/n; None makes it a quarter larger
            than the noise.
        noise_multiplier: Float, in place of epsilon.
        l2_norm_clip: Float, C.
        accountant: "gdp" (exact), "zcdp", "pld" or "rdp".
        seed: Optional int for repeatable experiments: the noise of a known seed gives no privacy.
        class_memory: Int, bytes for the Hessians of classes; changes results by rounding alone.

    Raises:
        ValueError: If an argument does not fit.
    """

    steps: int = argument(10, check_positive_integer)
    _: dataclasses.KW_ONLY
    learning_rate: float = argument(1.0, positive)
    l2_regularization: float | None = argument(None, optional(not_negative))
    class_memory: int = argument(2**29, check_positive_integer)

    def _releases(self):
        return {"gradient": self.steps, "hessian": self.steps}

    def _sizes(self, dimension):
        size = self.num_classes * dimension
        return {"gradient": size, "hessian": size * dimension}

    def _fit(self, examples, released):
        width, root = examples.dimension, math.sqrt(self.num_classes)
        kernel, bias = np.zeros([width, self.num_classes]), np.zeros(self.num_classes)
        gradients = Gradients(examples, self.num_classes, self.l2_norm_clip, clip="features")
        bound = root * _CURVATURE * self.l2_norm_clip**2
        for _ in range(self.steps):
            gradient = released.gaussian(
                "gradient",
                lambda: gradients.sums(kernel, bias)[0],  # noqa: B023, called at once.
                root * self.l2_norm_clip,
            )
            moves = np.zeros_like(kernel)
            for j, value in self._hessians(examples, kernel):
                hessian = released.symmetric("hessian", value, bound, part=j)
                given = self.l2_regularization
                given = None if given is None else examples.count * given
                ridge = _solves.ridge(hessian, given, self.noise_multiplier, bound)
                moves[:, j] = _solves.Positive(hessian, ridge).solve(gradient[:, j])
            kernel -= self.learning_rate * moves
        return kernel, bias

    def _hessians(self, examples, kernel):
        """Pairs of a class and a function to its Hessian at the weights `kernel`.

        The first one of a group that is called makes a pass, for all of them.
        """
        if not kernel.any():  # The first step: all examples have the same curvature.
            groups, same = [range(1)], range(self.num_classes)
        else:
            size = max(1, self.class_memory // (8 * examples.dimension**2))
            starts, same = range(0, self.num_classes, size), None
            groups = [range(s, min(s + size, self.num_classes)) for s in starts]
        for classes in groups:
            moments = functools.cache(lambda of=classes: self._moments(examples, kernel, of))
            for j in same or classes:
                place = 0 if same else j - classes.start
                yield j, lambda place=place, moments=moments: moments()[place].value()

    def _moments(self, examples, kernel, classes):
        found = [SecondMoment(examples.dimension) for _ in classes]
        weights = kernel[:, classes.start : classes.stop]
        clipped = ClippedRows(self.l2_norm_clip)
        for x, _ in examples.chunks(ROWS):
            rows = clipped(x)
            decays = np.exp(-np.abs(rows @ weights))
            roots = np.sqrt(decays) / (1 + decays)  # Of p (1 - p); at most 1/2.
            for moment, root in zip(found, roots.T, strict=True):
                moment.add(rows * root[:, np.newaxis])
        return found
