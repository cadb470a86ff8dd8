"""What is within the rules of a guarantee, and hardly meant."""

# Below this epsilon noise hides whatever the data say, and nothing is learned.
_LEAST_USEFUL_EPSILON = 0.01


def doubts(epsilon, delta, num_examples, noise_multiplier):
    """List of strings: what is doubtful of a guarantee that is in range.

    Args:
        epsilon: Float.
        delta: Float.
        num_examples: Int, or None where unknown.
        noise_multiplier: Float.
    """
    found = []
    if num_examples is not None and delta > 1 / num_examples:
        found.append(
            f"delta={delta:g} exceeds 1/num_examples={1 / num_examples:.3g}: publishing one "
            "example in full, chosen at random, would satisfy such a guarantee. Choose a delta "
            f"well below, such as {0.1 / num_examples:.1g}."
        )
    if epsilon < _LEAST_USEFUL_EPSILON:
        found.append(
            f"epsilon={epsilon:.2g}: noise_multiplier={noise_multiplier:.4g} drowns whatever the "
            "data say, and nothing will be learned. Epsilons from 1 to 10 are common."
        )
    return found
