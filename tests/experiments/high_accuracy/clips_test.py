"""The comparison of clips: it trains, and each training starts from its seed."""

import pytest

from experiments.high_accuracy import clips as study

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def test_a_trainer_repeats_a_training_but_for_its_noise():
    trainer = study.Trainer("table", "DPAdam, corrected", "adaptive", seeds=2, steps=12, epsilon=8)
    first, again = (trainer.accuracy(1, 0.03) for _ in range(2))
    assert min(first, again) > 0.8
    assert trainer.accuracy(0, 1e-9) < 0.8  # Weights and slots were reset.


@pytest.mark.parametrize("task", study.TASKS)
def test_it_compares(monkeypatch, task):
    monkeypatch.setattr(study, "CLIPS", {"automatic": "automatic"})
    monkeypatch.setattr(study, "RATES", {"DPSGD": (1.0,)})
    [(name, accuracies)] = study.compare([task], seeds=1, steps=2, epsilon=3.0).items()
    assert name == f"{task}; DPSGD; automatic" and 0 <= accuracies[1.0] <= 1
