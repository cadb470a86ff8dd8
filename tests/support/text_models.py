"""Tiny models of keras-hub with random weights, and the arrays that they train on."""

import keras
import numpy as np
import seeds

VOCABULARY, LENGTH, CLASSES = 30, 8, 3


def bert(hub):
    """BERT, whose inputs have segments."""
    backbone = hub.models.BertBackbone(VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH)
    return hub.models.BertTextClassifier(backbone, CLASSES)


def roberta(hub):
    backbone = hub.models.RobertaBackbone(VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH)
    return hub.models.RobertaTextClassifier(backbone, CLASSES)


def distil_bert(hub):
    backbone = hub.models.DistilBertBackbone(VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH)
    return hub.models.DistilBertTextClassifier(backbone, CLASSES)


def albert(hub):
    backbone = hub.models.AlbertBackbone(
        VOCABULARY, 2, 2, 6, 8, 16, num_groups=1, max_sequence_length=LENGTH
    )
    return hub.models.AlbertTextClassifier(backbone, CLASSES)


def deberta(hub):
    backbone = hub.models.DebertaV3Backbone(
        VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH, bucket_size=4
    )
    return hub.models.DebertaV3TextClassifier(backbone, CLASSES)


def bert_masked_lm(hub):
    backbone = hub.models.BertBackbone(VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH)
    return hub.models.BertMaskedLM(backbone)


def roberta_masked_lm(hub):
    backbone = hub.models.RobertaBackbone(VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH)
    return hub.models.RobertaMaskedLM(backbone)


def gpt2(hub):
    backbone = hub.models.GPT2Backbone(VOCABULARY, 2, 2, 8, 16, max_sequence_length=LENGTH)
    return hub.models.GPT2CausalLM(backbone)


def gemma(hub):
    backbone = hub.models.GemmaBackbone(VOCABULARY, 2, 4, 2, 8, 32, 4)
    return hub.models.GemmaCausalLM(backbone)


def gemma3(hub):
    backbone = hub.models.Gemma3Backbone(VOCABULARY, 16, 2, 4, 2, 8, 32, 4)
    return hub.models.Gemma3CausalLM(backbone=backbone, preprocessor=None)


def llama(hub):
    backbone = hub.models.LlamaBackbone(VOCABULARY, 2, 4, 8, 16, 2)
    return hub.models.LlamaCausalLM(backbone)


def mistral(hub):
    backbone = hub.models.MistralBackbone(VOCABULARY, 2, 4, 8, 16, 2)
    return hub.models.MistralCausalLM(backbone)


def qwen(hub):
    backbone = hub.models.QwenBackbone(VOCABULARY, 2, 4, 2, 8, 16)
    return hub.models.QwenCausalLM(backbone)


def vit(hub):
    backbone = hub.models.ViTBackbone((16, 16, 3), (4, 4), 2, 2, 8, 16)
    return hub.models.ViTImageClassifier(backbone, CLASSES)


CLASSIFIERS = [bert, roberta, distil_bert, albert, deberta]
MASKED = [bert_masked_lm, roberta_masked_lm]
CAUSAL = [gpt2, gemma, gemma3, llama, mistral, qwen]
