"""KerasHub's models: fast rules, exact gradients, and texts that do not depend on each other."""

import operator

import keras
import numpy as np
import oracle
import pytest
import seeds
import tensorflow as tf
from cases import nightly, slow, slow_but

import tfdpx
from tfdpx.per_example import explain

hub = pytest.importorskip("keras_hub")

V, T, CLASSES = 30, 8, 3
_SIZES = {"vocabulary_size": V, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 16}
_BERT = _SIZES | {"num_heads": 2, "max_sequence_length": T, "dropout": 0.0}
_GEMMA = _SIZES | {"num_query_heads": 4, "num_key_value_heads": 2, "head_dim": 4}
_LLAMA = _SIZES | {"num_query_heads": 4, "num_key_value_heads": 2}

# The class of the task, the arguments of its backbone.
MODELS = {
    "bert": ("BertTextClassifier", _BERT),
    "roberta": ("RobertaTextClassifier", _BERT),
    "distil_bert": ("DistilBertTextClassifier", _BERT),
    "deberta": ("DebertaV3TextClassifier", _BERT | {"bucket_size": 4}),
    "bert_masked": ("BertMaskedLM", _BERT),
    "gpt2": ("GPT2CausalLM", _BERT),
    "gemma": ("GemmaCausalLM", _GEMMA),
    "gemma3": ("Gemma3CausalLM", _GEMMA | {"image_size": 16}),
    "llama": ("LlamaCausalLM", _LLAMA),
    "mistral": ("MistralCausalLM", _LLAMA),
    "qwen": ("QwenCausalLM", _LLAMA),
    "vit": (
        "ViTImageClassifier",
        {
            **{"image_shape": (16, 16, 3), "patch_size": (4, 4), "num_layers": 1, "num_heads": 2},
            **{"hidden_dim": 8, "mlp_dim": 16},
        },
    ),
}


def make_model(name, **arguments):
    """Returns a task of KerasHub without preprocessor or dropout, with fixed initial weights."""
    seeds.fix(3)
    task, sizes = MODELS[name]
    task = getattr(hub.models, task)
    extra = {"num_classes": CLASSES, "dropout": 0.0} if "Classifier" in task.__name__ else {}
    backbone = task.backbone_cls(**sizes, **arguments)
    return task(backbone=backbone, preprocessor=None, **extra)


def make_data(model, rows):
    """Draws `(x, y, sample_weight)`: texts of 3 to T tokens, padded by zeros of weight zero."""
    rng = np.random.default_rng(0)
    if not isinstance(model.input, dict):
        return rng.normal(size=(rows, 16, 16, 3)), rng.integers(0, CLASSES, rows), None
    mask = np.arange(T) < rng.integers(3, T + 1, (rows, 1))
    tokens = np.where(mask, rng.integers(1, V, (rows, T)), 0)
    x = {"token_ids": tokens, "padding_mask": mask.astype("int32")}
    if "segment_ids" in model.input:
        x["segment_ids"] = rng.integers(0, 2, (rows, T))
    if len(model.output.shape) == 2:
        return x, rng.integers(0, CLASSES, rows), None
    if "mask_positions" in model.input:
        x["mask_positions"] = np.tile([0, 2], (rows, 1))
        return x, rng.integers(0, V, (rows, 2)), np.array([1.0, 0.0] * rows).reshape(rows, 2)
    next_tokens, weights = np.roll(tokens, -1, 1), np.roll(mask, -1, 1).astype("float32")
    weights[:, -1] = 0
    return x, next_tokens, weights


def make_loss(reduction="sum_over_batch_size"):
    """Returns a loss of logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)


# The number of layers of KerasHub with the generic rule: small, and only if all weights train.
GENERIC = {
    **dict.fromkeys(("bert", "roberta", "distil_bert", "gpt2"), 1),
    **dict.fromkeys(("bert_masked", "deberta", "vit"), 2),
    **dict.fromkeys(("gemma", "llama", "mistral", "qwen"), 3),
    "gemma3": 5,
}


def perturbed(name, what):
    """Returns a model that trains all weights or LoRA factors, and arrays of three examples."""
    model = make_model(name)
    if what == "lora":
        tfdpx.layers.trainable(model, "lora", rank=2)
    for variable in model.trainable_variables:  # LoRA's B is zero at first.
        noise = np.random.default_rng(0).normal(scale=0.2, size=variable.shape)
        variable.assign(variable + noise.astype("float32"))
    return model, make_data(model, 3)


# Built like BERT or Gemma.
ALIKE = ("roberta", "distil_bert", "mistral", "qwen")
CASES = [(name, "all") for name in MODELS if name not in ALIKE]
CASES += [(name, "lora") for name in ("bert", "bert_masked", "gpt2", "gemma3")]


@pytest.mark.parametrize(
    "name, what",
    slow_but(CASES, ("bert", "lora")) + [nightly(name, "all") for name in ALIKE],
)
def test_a_model_is_served_by_rules_and_exact(name, what):
    model, (x, y, weights) = perturbed(name, what)
    model.compile(loss=make_loss())
    rules = [choice.rule for choice in explain(model, x)]
    of_lora = int(name == "bert_masked")  # The head, which trains as the last layer.
    assert rules.count("GenericRule") == (GENERIC[name] if what == "all" else of_lora)
    oracle.assert_matches_batches_of_one(model, x, y, weights, norms=("auto",), tolerance=1e-4)


@pytest.mark.parametrize("name", ["gpt2", slow("gemma3")])
def test_pads_do_not_count(name):
    model = make_model(name)
    x, y, weights = make_data(model, 3)
    model.compile(loss=make_loss("mean_with_sample_weight"))
    x, y, weights = tf.nest.map_structure(tf.constant, (x, y, weights))
    _, weighted = oracle.run_engine(model, x, y, weights)
    unmasked = oracle.batch_of_one_gradients(model, x, y, tf.ones_like(weights), 1)
    for i in range(3):
        count = int(np.sum(weights[i]))
        text = slice(i, i + 1), slice(0, count)  # Without its padding.
        alone = tf.nest.map_structure(operator.itemgetter(text), (x, y, weights))
        [wanted] = oracle.batch_of_one_gradients(model, *alone, 1)
        np.testing.assert_allclose(weighted(np.eye(3)[i]), wanted, rtol=1e-3, atol=1e-6)
        if count < y.shape[1] - 1:  # Counted pads would make a difference.
            assert np.abs(unmasked[i] - wanted).max() > 1e-3
