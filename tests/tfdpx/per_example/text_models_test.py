"""KerasHub's models: fast rules serve them, gradients are exact, texts count by themselves."""

import operator

import numpy as np
import oracle
import pytest
import tensorflow as tf
import text_models
from cases import slow, slow_but

import tfdpx
from tfdpx.per_example import explain

hub = pytest.importorskip("keras_hub")

# Layers of KerasHub's own that the generic rule serves: small, and where all weights train alone.
GENERIC = {
    **dict.fromkeys(("bert", "roberta", "distil_bert", "gpt2"), 1),
    **dict.fromkeys(("bert_masked", "deberta", "vit"), 2),
    **dict.fromkeys(("gemma", "llama", "mistral", "qwen"), 3),
    "gemma3": 5,
}


def perturbed(name, what):
    """Returns a model that trains all weights or LoRA factors, and arrays of three examples."""
    model = text_models.model(hub, name)
    if what == "lora":
        tfdpx.layers.trainable(model, "lora", rank=2)
    for variable in model.trainable_variables:  # B of LoRA is zero at first.
        noise = np.random.default_rng(0).normal(scale=0.2, size=variable.shape)
        variable.assign(variable + noise.astype("float32"))
    return model, text_models.data(model, 3)


CASES = [(name, "all") for name in text_models.MODELS]
CASES += [(name, "lora") for name in ("bert", "bert_masked", "gpt2", "gemma3")]


@pytest.mark.parametrize("name, what", slow_but(CASES, ("bert", "lora")))
def test_a_model_is_served_by_rules_and_exact(name, what):
    model, (x, y, weights) = perturbed(name, what)
    model.compile(loss=text_models.loss())
    rules = [choice.rule for choice in explain(model, x)]
    of_lora = int(name == "bert_masked")  # Its head, which trains as the last layer.
    assert rules.count("GenericRule") == (GENERIC[name] if what == "all" else of_lora)
    oracle.assert_matches_batches_of_one(model, x, y, weights, norms=("auto",), tolerance=1e-4)


@pytest.mark.parametrize("name", ["gpt2", slow("gemma3")])
def test_pads_do_not_count(name):
    model = text_models.model(hub, name)
    x, y, weights = text_models.data(model, 3)
    model.compile(loss=text_models.loss("mean_with_sample_weight"))
    x, y, weights = tf.nest.map_structure(tf.constant, (x, y, weights))
    _, weighted = oracle.run_engine(model, x, y, weights)
    unmasked = oracle.batch_of_one_gradients(model, x, y, tf.ones_like(weights), 1)
    for i in range(3):
        count = int(np.sum(weights[i]))
        text = slice(i, i + 1), slice(0, count)  # Alone, as long as it is.
        alone = tf.nest.map_structure(operator.itemgetter(text), (x, y, weights))
        [wanted] = oracle.batch_of_one_gradients(model, *alone, 1)
        np.testing.assert_allclose(weighted(np.eye(3)[i]), wanted, rtol=1e-3, atol=1e-6)
        if count < y.shape[1] - 1:  # Pads that count: this test would see them.
            assert np.abs(unmasked[i] - wanted).max() > 1e-3
