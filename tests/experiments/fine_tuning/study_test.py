"""The study of few weights: a small run of it, and that it resumes."""

import keras
import pytest

from experiments.fine_tuning import study


@pytest.mark.slow
def test_a_small_study_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "WHAT", ("norm", "lora"))
    monkeypatch.setattr(study, "EPSILONS", (8.0,))
    monkeypatch.setattr(study, "RATES", (1.0,))
    monkeypatch.setattr(study, "OF_EACH_KIND", 128)
    given = [f"--workdir={tmp_path}", "--seeds=1", "--steps=2", "--pretraining_steps=2"]
    study.main(given)
    table = (tmp_path / "table.md").read_text()
    assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["5,450", "7,306"]
    assert (tmp_path / "few_weights.png").stat().st_size > 1000
    assert keras.saving.load_model(tmp_path / "tiny_vit.keras").output_shape == (None, 512)
    capsys.readouterr()
    monkeypatch.setattr(study, "accuracy", lambda *_: pytest.fail("measured a second time"))
    study.main(given)
    assert capsys.readouterr().out.strip() == table.strip()
