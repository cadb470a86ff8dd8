"""The guarantee of a run in words, by tensorflow-privacy."""

import sys

# Skips the parts of tensorflow_privacy that fail to import on TensorFlow >= 2.16; its statement
# needs none of them.
sys.skip_tf_privacy_import = True

try:
    from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
except ImportError:  # tensorflow-privacy refuses Python 3.12 and later.
    compute_dp_sgd_privacy_lib = None


def statement(plan, steps, seed=None):
    """Returns a text that says what is guaranteed, to whom, and under which assumptions.

    Args:
        plan: The `tfdpx.PrivacyPlan` of the run.
        steps: Model updates taken.
        seed: The seed that the user chose for the run, or None.
    """
    if not plan.noise_multiplier:
        return "Without noise there is no differential privacy: epsilon is infinite.\n"
    summary = (
        f"tfdpx, by dp_accounting ({plan.accountant}, {plan.sampling} sampling): "
        f"({plan.epsilon_at(steps):.4g}, {plan.delta:g})-differential privacy of the training "
        f"examples after {steps} updates, under adding or removing one example"
    )
    if plan.is_approximate:
        summary += ", as an approximation: shuffled batches are accounted for as if Poisson sampled"
    summary += ". It covers the final model and every model on the way.\n\n"
    if seed is not None:
        summary += (
            f"The run was made repeatable by the seed {seed}: the guarantee holds towards those "
            "who do not know it. Train without a seed before releasing a model.\n\n"
        )
    if compute_dp_sgd_privacy_lib is None:
        return summary + (
            "tensorflow-privacy is not installed, so its longer statement is missing here; the "
            "guarantee above comes from dp_accounting and does not need it.\n"
        )
    return (
        summary
        + "tensorflow-privacy:\n\n"
        + compute_dp_sgd_privacy_lib.compute_dp_sgd_privacy_statement(
            number_of_examples=plan.num_examples,
            batch_size=plan.batch_size,
            # It rounds the steps up from here; the whole number could round to one more.
            num_epochs=(steps - 1e-6) * plan.sampling_probability,
            noise_multiplier=plan.noise_multiplier,
            delta=plan.delta,
            # Its microbatches average examples before clipping; tfdpx clips every single example.
            used_microbatching=False,
            accountant_type=compute_dp_sgd_privacy_lib.AccountantType[plan.accountant.upper()],
        )
    )
