"""Losses are of single examples, and reveal the members of an overfitted model."""

import numpy as np
import small

from tfdpx import audit


def test_losses_of_examples_are_those_of_batches_of_one():
    x, y = small.data()
    model = small.model(noise_multiplier=1.0, compile_arguments={"jit_compile": False})
    model(x)
    losses = audit.example_losses(model, x, y, batch_size=5)
    alone = [model.evaluate(x[i : i + 1], y[i : i + 1], verbose=0) for i in range(len(x))]
    np.testing.assert_allclose(losses, alone, rtol=1e-5)
