"""What the tail of the noise takes of delta, for every preset and every spread of the gradient."""

import dataclasses
import math

import pytest
from cases import nightly

from tfdpx import noise
from tfdpx.accounting import accountants
from tfdpx.accounting.gaussian import added_delta
from tfdpx.train.config import preset_lookup
from tfdpx.train.data import tfds
from tfdpx.train.run import auto_settings

RADIUS_OF_32_BITS = math.sqrt(2 * 33 * math.log(2))

# At least as many as the model has; dry_run_test.py counts them.
MILLIONS_AT_MOST = {
    "small_cnn": 1,
    "scatter_linear": 1,
    "scatter_cnn": 1,
    "wrn_16_4": 2.8,
    "wrn_40_4": 9,
    "wrn_28_10": 37,
    "nf_resnet_50": 26,
    "nf_resnet_200": 65,
}
IMAGES_OF_A_FOLDER = 200
IN_CI = ("digits", "folder", "table14/eps8")  # `make nightly` takes all.


def share_of_delta(preset, largest_radius):
    """What the tail adds to delta, over delta."""
    settings = preset_lookup.resolve(preset, {})
    # A part of a data set, such as some of its classes, is noisier than the whole. Of a folder's
    # images nobody knows how many there are.
    whole = tfds.Name.parse(settings.dataset).entry.train_images or IMAGES_OF_A_FOLDER
    settings, _ = auto_settings.complete(settings, whole)
    noise_multiplier = settings.noise_multiplier
    if noise_multiplier is None:
        faster = dataclasses.replace(settings, accountant="rdp")
        noise_multiplier = faster.privacy_plan(whole).noise_multiplier
    # Of the part, its share is the larger.
    sampling_probability = min(1.0, settings.batch_size / (whole / 3))
    parameters = 1e6 * MILLIONS_AT_MOST[settings.model]
    run = (noise_multiplier, sampling_probability, parameters, settings.steps)
    normalisation = parameters / 2 * settings.steps * math.exp(-(largest_radius**2) / 2)
    return added_delta(*run, largest_radius) / settings.delta + normalisation


@pytest.mark.parametrize("presets", [IN_CI, nightly(None)], ids=["some", "all"])
def test_the_tail_takes_less_of_delta_than_is_kept_back_for_it(presets):
    names = presets or preset_lookup.names()
    for preset in filter(lambda name: preset_lookup.resolve(name, {}).private, names):
        share = share_of_delta(preset, noise.LARGEST_RADIUS)
        assert 0 < share < accountants.RESERVED_SHARE / 2 < 1e-3, preset


@pytest.mark.planted("noise of 32 random bits")
def test_32_bits_would_take_all_of_delta():
    assert share_of_delta("table12/eps8", RADIUS_OF_32_BITS) > 1
    assert share_of_delta("table14/eps8", RADIUS_OF_32_BITS) > 100
