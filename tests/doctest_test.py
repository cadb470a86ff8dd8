"""Runs the examples in the docstrings of the most used public names."""

import doctest
import importlib

import keras
import numpy as np
import pytest
from cases import slow

import tfdpx
from tfdpx.sampling.examples import as_examples

MODULES = [
    "tfdpx.accounting.groups",
    "tfdpx.accounting.individual",
    "tfdpx.accounting.ledger",
    slow("tfdpx.accounting.plan"),
    "tfdpx.audit.bounds",
    "tfdpx.audit.membership",
    slow("tfdpx.audit.one_run"),
    "tfdpx.audit.sampling_check",
    slow("tfdpx.audit.white_box"),
    "tfdpx.augment.crops",
    "tfdpx.augment.mix_views",
    "tfdpx.layers.blocks",
    slow("tfdpx.layers.private_model"),
    "tfdpx.layers.scattering2d",
    "tfdpx.layers.ws_conv2d",
    "tfdpx.training.optimizers",
    "tfdpx.training.gradient_norms",
    "tfdpx.sampling.sampled_batches",
    "tfdpx.suggestion",
    "tfdpx.synthetic",
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    module = importlib.import_module(name)
    keras.backend.clear_session()  # Resets Keras's numbering of optimizers.
    # The usual names, whether or not the module itself needs them.
    names = {"np": np, "keras": keras, "tfdpx": tfdpx, "as_examples": as_examples}
    result = doctest.testmod(module, extraglobs=names)
    assert result.attempted and not result.failed
