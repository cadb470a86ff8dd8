"""What the finite tail of the noise adds to delta."""

import math

import scipy.special

# Standard deviations: a radius has 64 bits, and the smallest is half of 2**-64.
LARGEST_RADIUS = math.sqrt(2.0 * 65 * math.log(2.0))


def added_delta(
    noise_multiplier: float,
    sampling_probability: float,
    num_parameters: int,
    steps: int,
    largest_radius: float,
) -> float:
    """Bounds what the noise's largest value adds to the delta of Gaussian noise.

    Neighbours differ in one example, added or removed, whose clipped gradient has a norm of at most
    the noise's sensitivity, however it is spread. Where both data sets can give an output the ratio
    of their densities equals the one of Gaussians. It is not where only one of them can.

    Noise comes in n pairs whose radius is at most R standard deviations. A pair shifted by t leaves
    that disc with probability at most

        f(t) = exp(-R^2/2) * (exp(t^2/2) * (I0(R t) + L0(R t) + 1) / 2 - 1),

    the mass of a normal pair within the disc that the shift takes out of it, with Bessel's I0 and
    Struve's L0. All coefficients of its power series are positive. So for shifts whose squares sum
    to T^2 = 1 / noise_multiplier^2

        sum f(t_i) <= f(T) + (sqrt(n) - 1) T R exp(-R^2/2) / pi:

    the linear part is largest when spread evenly, the rest in a single pair. With sampling
    probability q an output with the example is beyond reach without it with q times that. And
    without the example an output can be one that only a step which skips it gives: its loss is at
    most -log(1 - q) higher than a Gaussian's, which adds no more than that times the probability.

    Besides, a disc's density is a Gaussian's over its mass, which multiplies delta by
    1 + n steps exp(-R^2/2): 1 + 5e-7 for the longest run of De et al. 2022.

    Args:
        noise_multiplier: Float > 0. Standard deviation of the noise over the sensitivity.
        sampling_probability: Float in (0, 1].
        num_parameters: Int >= 1. Number of values that get noise at each step.
        steps: Int >= 0. Number of updates.
        largest_radius: Float > 0, R, such as `LARGEST_RADIUS`.

    Returns:
        Float in [0, 1].
    """
    pairs = math.ceil(num_parameters / 2)
    shift, edge = 1 / noise_multiplier, largest_radius
    sampled = 1.0 if sampling_probability == 1 else min(1.0, -math.log1p(-sampling_probability))
    if shift > edge:
        return min(1.0, steps * sampled)
    bulge = scipy.special.i0(edge * shift) + scipy.special.modstruve(0, edge * shift) + 1
    concentrated = math.exp(shift**2 / 2) * bulge / 2 - 1
    spread = (math.sqrt(pairs) - 1) * shift * edge / math.pi
    return min(1.0, steps * sampled * math.exp(-(edge**2) / 2) * (concentrated + spread))
