"""The guarantee of a run in words that can be cited."""

import importlib.metadata
import math
import textwrap

import tfdpx

_WIDTH = 88


def statement(
    plan,
    steps,
    *,
    dataset="the training data",
    epsilon=None,
    delta=None,
    clip=None,
    is_approximate=None,
    seen=(),
    repeated=(),
    is_seeded=False,
):
    """Returns a text that says what is guaranteed, to whom, how, and under which assumptions.

    Args:
        plan: The `tfdpx.PrivacyPlan` of the run.
        steps: Model updates taken.
        dataset: Name of the data set.
        epsilon: What was spent on the weights; None: what `steps` of the plan spend.
        delta: Likewise; None: the plan's.
        clip: The l2_norm_clip.
        is_approximate: Whether the batches were others than the accountant assumes; None: as the
            plan says.
        seen: What the initial weights were trained on, of `tfdpx.train.run.origin.seen_by`.
        repeated: Those of `seen` that may have had the same images; `epsilon` includes theirs.
        is_seeded: Whether the user chose the seed of the run.
    """
    if not plan.noise_multiplier:
        return "Without noise there is no differential privacy: epsilon is infinite.\n"
    epsilon = plan.epsilon_at(steps) if epsilon is None else epsilon
    if epsilon == math.inf:
        return (
            "There is no differential privacy: the initial weights had seen these images without "
            "it, so epsilon is infinite.\n"
        )
    delta = plan.delta if delta is None else delta
    if is_approximate is None:
        is_approximate = plan.is_approximate
    version = f"dp_accounting {importlib.metadata.version('dp-accounting')}"
    claim = (
        f"The model trained on {dataset} (N = {plan.num_examples:,} training images) has "
        f"({_up(epsilon)}, {delta:g})-differential privacy after {steps} updates of DP-SGD, for "
        f"data sets that differ in one training image, added or removed ({plan.accountant.upper()} "
        f"accountant of {version}; tfdpx {tfdpx.__version__})."
    )
    if is_approximate:
        claim += (
            " This epsilon is an approximation: the batches were not drawn as the accountant "
            "assumes."
        )
    parts = {
        "Data set": f"{dataset}, N = {plan.num_examples:,}. N is public.",
        "Neighbours": "Two data sets that differ in one image, added or removed, at the same N and "
        "sampling probability. Of a person with several images among them it says less.",
        "Epsilon, delta": f"epsilon = {_up(epsilon, 6)}, delta = {delta:g}.",
        "Mechanism": f"{steps} updates; in each the gradient of each image is clipped"
        f"{f' to an l2 norm of {clip:g}' if clip else ''}, and Gaussian noise of "
        f"noise_multiplier = {plan.noise_multiplier:.6g} times that is added to their sum.",
        "Accountant": f"{plan.accountant.upper()} of {version}, for Poisson sampling with "
        f"probability {plan.sampling_probability:.6g}.",
        "Sampling": _sampling(plan),
        "Covers": "The weights after every update, their averages, and whatever is computed from "
        "these without the training images: model.keras and its predictions on other images.",
        "Does not cover": "Loss and accuracy on training images, which the log shows; the test "
        "images, on which accuracy is measured; individual_PRIVATE; floating-point attacks on the "
        "noise; how long the run took.",
        "Assumes": f"{_initial(seen, repeated)} Model, settings and preprocessing were not chosen "
        "by looking at these images: what was tuned on them costs more. The pixels are scaled by "
        "constants. Classes, their names, and the size of images are public. Only this run's "
        "model is released: several add up.",
        "tensorflow-privacy": _line_of_tensorflow_privacy(plan, is_approximate),
        "Release": "NOT RELEASABLE. The run was made repeatable by a seed, and who knows it can "
        "take the noise away. Train without --seed before releasing a model."
        if is_seeded
        else "Noise and draws came from the operating system's random numbers, which are not kept.",
    }
    wrapped = [
        textwrap.fill(f"{name}: {text}", _WIDTH, subsequent_indent="  ", break_long_words=False)
        for name, text in parts.items()
    ]
    heading = "Statement of differential privacy"
    if is_seeded:
        heading += " (not releasable: see Release)"
    claim = textwrap.fill(claim, _WIDTH, break_long_words=False)
    return "\n".join([heading, "", claim, "", *wrapped]) + "\n"


def _up(number, digits=4):
    """A positive number as text, rounded up: a guarantee must not promise more than there is."""
    step = 10.0 ** (math.floor(math.log10(number)) - digits + 1)
    return f"{math.ceil(number / step - 1e-9) * step:.{digits}g}"


def _sampling(plan):
    if plan.is_approximate:
        return (
            f"batches of {plan.batch_size:,} were cut from permutations of the images, not "
            "Poisson-sampled."
        )
    if plan.sampling_probability == 1:
        return "none: each update took all images, which is Poisson sampling with probability 1."
    return (
        f"each update drew each image with probability {plan.sampling_probability:.6g}, "
        f"independently of all others: Poisson sampling, {plan.batch_size:,} images on average."
    )


def _initial(seen, repeated):
    if not seen:
        return "The initial weights and fixed features know no data."
    trainings = ", ".join(f"{each['dataset']} (epsilon {each['epsilon']:.4g})" for each in seen)
    if repeated:
        return (
            f"The initial weights or features were trained on {trainings}: on these images too, "
            "and epsilon and delta are the sums over all trainings on them."
        )
    return f"The initial weights or features were trained on {trainings}, on none of these images."


def _line_of_tensorflow_privacy(plan, is_approximate):
    poisson = '"Epsilon assuming Poisson sampling (*)"'
    if is_approximate:
        return (
            "of the lines that its compute_dp_sgd_privacy_statement prints, neither applies to "
            f"the letter; {poisson} is what is given here as an approximation."
        )
    return (
        "of the lines that its compute_dp_sgd_privacy_statement prints for these numbers, "
        f"{poisson} applies, since that is how the batches were drawn."
    )
