"""The study of few weights: one private training, and a study that resumes."""

import keras
import numpy as np
import pytest

from experiments.free_features import few_weights as study


@pytest.mark.slow
def test_a_study_trains_and_resumes(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study, "OF_EACH_KIND", 128)
    path = tmp_path / "tiny_vit.keras"
    study.pretrain(path, steps=2)
    assert keras.saving.load_model(path).output_shape == (None, 512)
    data = np.zeros((60, 8, 8, 1), "uint8"), np.zeros(60, "int64")
    assert study.accuracy(path, "lora", 8.0, 1.0, 0, data, data, steps=2) == (1.0, 7_306)

    best = {what: rate for what, rate in zip(study.WHAT, study.RATES, strict=True)}

    def measured(path, what, epsilon, rate, *_):
        return (0.9 if rate == best[what] else 0.5) * min(epsilon, 5) / 5, 1_000

    arguments = [f"--workdir={tmp_path}", "--seeds=1,2"]
    monkeypatch.setattr(study, "accuracy", measured)
    study.main(arguments)
    table = (tmp_path / "table.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [float(row[2]) for row in rows] == list(study.RATES)
    assert rows[0][-1] == "90.0% (90.0 to 90.0) |"
    assert (tmp_path / "few_weights.png").stat().st_size > 1000
    capsys.readouterr()
    monkeypatch.setattr(study, "accuracy", lambda *_: pytest.fail("measured a second time"))
    study.main(arguments)
    assert capsys.readouterr().out.strip() == table.strip()
