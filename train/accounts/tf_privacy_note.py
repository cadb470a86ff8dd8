"""What tensorflow-privacy says of the same numbers, and why it says something else."""

import math
import sys
import textwrap

# Skips the parts of tensorflow_privacy that fail to import on TensorFlow >= 2.16; its statement
# needs none of them.
sys.skip_tf_privacy_import = True

try:
    from tensorflow_privacy.privacy.analysis import compute_dp_sgd_privacy_lib
except ImportError:  # tensorflow-privacy refuses Python 3.12 and later.
    compute_dp_sgd_privacy_lib = None

_ABSENT = (
    "tensorflow-privacy is not installed (it refuses Python 3.12 and later), so its statement is "
    "missing here. The figures above come from dp_accounting and need none of it."
)
_UNKNOWN = (
    "tensorflow-privacy's statement needs the number of examples and the batch size: give "
    "--num_examples and --batch_size for it."
)
_WHY = (
    "Why these differ from the figures above. `Epsilon assuming Poisson sampling` is the same "
    "question: it is the line that applies to tfdpx's own batches, which are really Poisson "
    "sampled. What is left between it and ours is the accountant (ours is {accountant}), the grid "
    "of its privacy losses, and that we keep 0.01% of delta back for batches that overflow and for "
    "the noise's finite tail. `Each example occurring once per epoch` is for data in an order that "
    "anybody may know: {epochs} Gaussian releases without amplification. It applies to shuffled "
    "batches, which `--sampling=shuffle` accounts for. Called with `used_microbatching=True`, its "
    "default, tensorflow-privacy halves the noise: its microbatches average before they are "
    "clipped. tfdpx clips every example, whatever `microbatch_size` is."
)


def lines(answer):
    """Text: tensorflow-privacy's statement of an answer and why it differs, or why it is missing.

    Args:
        answer: `tfdpx.train.accounts.question.Answer`.
    """
    if not answer.noise_multiplier:
        return "Without noise there is no differential privacy: epsilon is infinite."
    if compute_dp_sgd_privacy_lib is None:
        return textwrap.fill(_ABSENT, 100)
    if answer.num_examples is None:
        return textwrap.fill(_UNKNOWN, 100)
    statement = compute_dp_sgd_privacy_lib.compute_dp_sgd_privacy_statement(
        number_of_examples=answer.num_examples,
        batch_size=answer.batch_size,
        # It rounds the steps up from here; the whole number could round to one more.
        num_epochs=(answer.steps - 1e-6) * answer.batch_size / answer.num_examples,
        noise_multiplier=answer.noise_multiplier,
        delta=answer.delta,
        used_microbatching=False,
        accountant_type=compute_dp_sgd_privacy_lib.AccountantType[answer.accountant.upper()],
    )
    why = _WHY.format(accountant=answer.accountant.upper(), epochs=math.ceil(answer.epochs - 1e-6))
    return f"tensorflow-privacy:\n\n{statement}\n{textwrap.fill(why, 100)}"
