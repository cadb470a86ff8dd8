"""Presets after other papers than that of the tables: what they spend, and what they share."""

import pytest
from cases import nightly

from tfdpx.train.config import preset_lookup
from tfdpx.train.data import tfds
from tfdpx.train.run import dry_run, optimization

# Updates and examples of an update, noise where it is published, and epsilon by RDP and by PLD
# where the noise was not solved for.
RECIPES = {
    "scatternet/mnist": (560, 4096, None, None),
    "scatternet/fashion_mnist": (280, 8192, None, None),
    "scatternet/cifar10": (360, 8192, None, None),
    "scatternet/cifar10_linear": (360, 8192, None, None),
    "tan/eps8": (2500, 4096, 3.0, (7.10, 6.58)),
    "randp/eps1": (875, 4096, 9.3, (1.07, 0.98)),
    "dp_mix/eps8": (2500, 4096, None, None),
}


def plan(preset, **given):
    settings = preset_lookup.resolve(preset, given)
    return settings.privacy_plan(tfds.find(settings.dataset).train_images)


@pytest.mark.parametrize(
    "preset", [name if name == "tan/eps8" else nightly(name) for name in RECIPES]
)
def test_each_spends_what_it_says(preset):
    steps, batch_size, noise_multiplier, epsilons = RECIPES[preset]
    made = plan(preset)
    assert (made.steps, made.batch_size, made.delta) == (steps, batch_size, 1e-5)
    if epsilons is None:
        budget = preset_lookup.resolve(preset, {}).epsilon
        assert 0.999 * budget < made.epsilon <= budget
        return
    assert made.noise_multiplier == noise_multiplier
    spent = plan(preset, accountant="rdp").epsilon, made.epsilon
    assert [round(epsilon, 2) for epsilon in spent] == list(epsilons)
    column = float(preset.partition("eps")[2])
    assert made.epsilon <= column


def test_networks_and_views():
    tan, randp, mix = (
        preset_lookup.resolve(name, {}) for name in ("tan/eps8", "randp/eps1", "dp_mix/eps8")
    )
    for settings in (tan, randp, mix):
        assert (settings.model, settings.relu_first) == ("wrn_16_4", True)
        assert not settings.weight_standardization
        assert dry_run.describe(settings)["num_examples"] == 50_000
    assert (randp.pretrained_on, randp.trainable) == ("synthetic", "all")
    assert type(optimization.views(tan)).__name__ == "RandomCropFlip"
    views = optimization.views(mix)
    assert (views.mixed_views, mix.augmult - views.mixed_views, views.alpha) == (18, 16, 0.2)
    assert views.augment.get_config() == optimization.views(tan).get_config()
