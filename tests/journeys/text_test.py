"""Runs docs/text.md as a new user would, with tiny random models in place of the presets."""

import pathlib
import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfdpx

hub = pytest.importorskip("keras_hub")
PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "text.md").read_text("utf-8")
CLASSIFIER, CAUSAL = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
SIZES = {"num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 16}


def classifier(preset, num_classes):
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] a good film bad plot".split()
    tokenizer = hub.models.BertTokenizer(vocabulary=words)
    preprocessor = hub.models.BertTextClassifierPreprocessor(tokenizer, sequence_length=8)
    backbone = hub.models.BertBackbone(len(words), **SIZES, max_sequence_length=8)
    return hub.models.BertTextClassifier(backbone, num_classes, preprocessor=preprocessor)


def causal(preset):
    letters = "<|endoftext|> a b d f g i l m n o p t \u0120 oo".split()
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = hub.models.GPT2Tokenizer(vocabulary=vocabulary, merges=["o o"])
    preprocessor = hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=32)
    backbone = hub.models.GPT2Backbone(len(vocabulary), **SIZES, max_sequence_length=32)
    return hub.models.GPT2CausalLM(backbone, preprocessor=preprocessor)


def run(block, task, make, monkeypatch, folder):
    monkeypatch.setattr(task, "from_preset", make)
    monkeypatch.chdir(folder)
    names = {}
    exec(compile(block, "text.md", "exec"), names)
    ledger = names["model"].optimizer.ledger
    assert ledger.steps == names["plan"].steps and ledger.is_complete
    assert not ledger.is_approximate and ledger.epsilon(1e-5) <= 8.0
    assert all(way.startswith("mapped") for way in names["model"].optimizer.independence)
    return names


@pytest.mark.slow
def test_the_classifier(monkeypatch, tmp_path, capsys):
    names = run(CLASSIFIER, hub.models.BertTextClassifier, classifier, monkeypatch, tmp_path)
    assert "N = 40 examples" in capsys.readouterr().out
    model = keras.models.load_model(tmp_path / "classifier.keras", compile=False)
    longer = tfdpx.PrivacyPlan(40, batch_size=20, steps=5, epsilon=9.0, delta=1e-5)
    model.compile(tfdpx.DPAdam(1e-3, plan=longer))
    assert model.optimizer.ledger.steps == names["plan"].steps


@pytest.mark.slow
def test_the_language_model(monkeypatch, tmp_path, capsys):
    names = run(CAUSAL, hub.models.GPT2CausalLM, causal, monkeypatch, tmp_path)
    assert names["model"].optimizer.ledger.unit == "user"
    assert "a good" in capsys.readouterr().out


PLAN = tfdpx.PrivacyPlan(8, batch_size=4, steps=1, noise_multiplier=1.0, delta=1e-3)


@pytest.mark.slow
def test_packed_texts_are_refused_unless_it_is_said_whose_they_are():
    model, texts = causal(""), ["a good<|endoftext|>a bad", "a good<|endoftext|>"] * 4
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN))
    with pytest.raises(ValueError, match="several texts packed in one row.*endoftext.*user_ids"):
        model.fit(texts, verbose=0)
    people = tfdpx.PrivacyPlan(8, 4, steps=1, noise_multiplier=1.0, delta=1e-3, unit="user")
    model.compile(tfdpx.DPSGD(0.1, plan=people))
    model.fit(texts, user_ids=[f"author {i}" for i in range(8)], examples_per_user=1, verbose=0)
    assert model.optimizer.ledger.steps == 1


@pytest.mark.slow
def test_a_data_set_is_refused_and_an_ordinary_optimizer_trains_as_ever():
    model, texts, y = classifier("", 2), ["a good film", "a bad plot"] * 4, np.array([1, 0] * 4)
    batches = tf.data.Dataset.from_tensor_slices((texts, y)).batch(4)
    model.compile(tfdpx.DPSGD(0.1, plan=PLAN))
    with pytest.raises(ValueError, match="The plan counts on its own batches"):
        model.fit(batches, verbose=0)
    model.compile("sgd")
    assert np.isfinite(model.fit(batches, verbose=0).history["loss"][0])
