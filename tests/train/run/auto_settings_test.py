"""What is chosen where the user leaves it open: by what rule, and what it never overrides."""

import pytest

from tfdpx.train.config import preset_lookup
from tfdpx.train.config.errors import UserError
from tfdpx.train.run import auto_settings


def chosen(num_examples=1437, replicas=1, **given):
    return auto_settings.complete(preset_lookup.resolve("digits", given), num_examples, replicas)


@pytest.mark.parametrize(
    ("epsilon", "num_examples", "steps", "move"),
    [(1, 1437, 10, 431), (3, 1437, 31, 1293), (8, 1437, 82, 3449), (0.1, 300, 10, 100),
     (8, 20_000, 120, 6000)],
)  # fmt: skip
def test_the_rule(epsilon, num_examples, steps, move):
    settings, text = chosen(num_examples, epsilon=epsilon)
    assert settings.model == "scatter_linear" and settings.batch_size == num_examples
    assert (settings.l2_norm_clip, settings.ema_momentum) == (0.02, 0.0)
    assert settings.steps == steps
    assert settings.steps * settings.learning_rate == pytest.approx(move, rel=0.01)
    for shown in ("--model=scatter_linear", f"--steps={steps}", "0.3 * epsilon * images"):
        assert shown in text
    assert settings.privacy_plan(num_examples).sampling_probability == 1.0


def test_what_is_given_stays():
    given = dict(learning_rate=0.5, steps=7, l2_norm_clip=1.0, ema_momentum=0.9, epsilon=2.0)
    settings, text = chosen(**given)
    assert {name: getattr(settings, name) for name in given} == given
    assert "--learning_rate" not in text and "--batch_size=1437" in text


def test_a_network_that_is_named_gets_values_for_networks():
    settings, text = chosen(model="small_cnn", epsilon=3.0)
    assert (settings.model, settings.steps) == ("small_cnn", 60)
    assert (settings.learning_rate, settings.l2_norm_clip) == (3.1, "automatic")
    noise = settings.privacy_plan(1437).noise_multiplier * 60**0.5
    assert settings.learning_rate == pytest.approx(0.18 * 1024 / noise, rel=0.02)
    assert "--model" not in text and "--l2_norm_clip=automatic" in text
    assert chosen(model="small_cnn", private=False)[0].learning_rate == 4.0
    assert chosen(500, model="small_cnn")[0].batch_size == 500


def test_replicas_share_a_batch_evenly():
    assert chosen(replicas=2, epsilon=3.0)[0].batch_size == 1436
    assert chosen(replicas=8, epsilon=3.0)[0].batch_size == 1432
    assert chosen(replicas=2, epsilon=3.0, batch_size=7)[0].batch_size == 7  # Refused later.


def test_nothing_is_chosen_where_nothing_is_open():
    settings = preset_lookup.resolve("table12/eps8", {})
    assert auto_settings.complete(settings, 50_000) == (settings, "")


def test_without_privacy_or_with_a_noise_the_rule_is_that_of_a_large_budget():
    for given in (dict(private=False), dict(noise_multiplier=3.0)):
        settings, _ = chosen(**given)
        assert settings.steps == 82 and settings.epsilon is None


def test_large_sets_are_refused_with_models_to_name():
    with pytest.raises(UserError, match=r"20,000 training images. Received: 50,000.*wrn_16_4"):
        chosen(50_000)
