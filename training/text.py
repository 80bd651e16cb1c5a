"""Tokenizer and text encoder: CLIP's classes, sized for a vocabulary of about 500 words."""

from __future__ import annotations

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

WIDTH = 128
MAX_TOKENS = 24  # the longest caption takes 13, start and end included
SPECIAL = ["<|startoftext|>", "<|endoftext|>"]


def build_tokenizer(captions: Iterable[str]) -> CLIPTokenizer:
    """Build a tokenizer for which every word of the captions is one token; any other text falls to pieces.

    Byte-pair merges are learnt until none is left, which is when each word is whole.
    """
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.Whitespace()
    words = sorted({word for text in captions for word in text.replace("-", " - ").split()})
    byte_alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # CLIP's vocabulary holds each byte twice, inside a word and at its end, so that no text is unknown.
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,
        min_frequency=1,
        special_tokens=[*SPECIAL, *byte_alphabet, *(byte + "</w>" for byte in byte_alphabet)],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(words, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    return CLIPTokenizer(vocab=learner.get_vocab(), merges=merges, model_max_length=MAX_TOKENS)


def text_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    """Describe a two-layer CLIP text encoder."""
    return CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
        projection_dim=width,
        max_position_embeddings=MAX_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def encode(tokenizer: CLIPTokenizer, encoder: CLIPTextModel, captions: list[str]) -> Tensor:
    """Encode captions as the pipeline does: [b, MAX_TOKENS, WIDTH], padding included."""
    ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt").input_ids
    return encoder(ids.to(encoder.device)).last_hidden_state
