"""Presets after other papers than that of the tables: what they spend, and what they share."""

import pytest
from cases import nightly

from tfdpx.train.config import preset_lookup
from tfdpx.train.data import datasets
from tfdpx.train.run import optimization

# Updates, examples of an update, and epsilon by RDP and by PLD where the noise is published.
RECIPES = {
    "scatternet/mnist": (560, 4096, None),
    "scatternet/fashion_mnist": (280, 8192, None),
    "scatternet/cifar10": (360, 8192, None),
    "scatternet/cifar10_linear": (360, 8192, None),
    "tan/eps8": (2500, 4096, (7.10, 6.58)),
    "randp/eps1": (875, 4096, (1.07, 0.98)),
    "dp_mix/eps8": (2500, 4096, None),
}


@pytest.mark.parametrize("preset", ["tan/eps8", *map(nightly, RECIPES.keys() - {"tan/eps8"})])
def test_each_spends_what_it_says(preset):
    plans = [preset_lookup.resolve(preset, {"accountant": name}) for name in ("rdp", "pld")]
    count = datasets.find(plans[0].dataset).train_images
    rdp, pld = (settings.privacy_plan(count) for settings in plans)
    steps, batch_size, epsilons = RECIPES[preset]
    assert (pld.steps, pld.batch_size, pld.delta) == (steps, batch_size, 1e-5)
    if epsilons:
        assert (round(rdp.epsilon, 2), round(pld.epsilon, 2)) == epsilons
        assert pld.epsilon <= float(preset.partition("eps")[2])
    else:
        assert 0.999 * plans[1].epsilon < pld.epsilon <= plans[1].epsilon


def test_networks_and_views():
    presets = ("tan/eps8", "randp/eps1", "dp_mix/eps8")
    tan, randp, mix = (preset_lookup.resolve(name, {}) for name in presets)
    for settings in (tan, randp, mix):
        assert (settings.model, settings.relu_first) == ("wrn_16_4", True)
        assert not settings.weight_standardization
    assert (tan.noise_multiplier, randp.noise_multiplier) == (3.0, 9.3)
    assert (randp.pretrained_on, randp.trainable) == ("synthetic", "all")
    views = optimization.views(mix)
    assert (views.mixed_views, mix.augmult - views.mixed_views, views.alpha) == (18, 16, 0.2)
    assert views.augment.get_config() == optimization.views(tan).get_config()
