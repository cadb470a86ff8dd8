"""Tiny models of KerasHub with random weights, and arrays that they train on."""

import keras
import numpy as np
import seeds

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


def model(hub, name, **arguments):
    """A task of KerasHub without preprocessor or dropout; its weights are the same each time."""
    seeds.fix(3)
    task, sizes = MODELS[name]
    task = getattr(hub.models, task)
    extra = {"num_classes": CLASSES, "dropout": 0.0} if "Classifier" in task.__name__ else {}
    backbone = task.backbone_cls(**sizes, **arguments)
    return task(backbone=backbone, preprocessor=None, **extra)


def data(model, rows):
    """`(x, y, sample_weight)`: texts of 3 to T tokens, and zeros behind them that do not count."""
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


def loss(reduction="sum_over_batch_size"):
    """Of logits."""
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
