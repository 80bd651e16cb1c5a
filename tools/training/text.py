"""Tokenizer and text encoder: CLIP's classes, sized for a vocabulary of about 500 words."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
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
    trainer = trainers.BpeTrainer(
        vocab_size=100_000,
        min_frequency=1,
        special_tokens=[*SPECIAL, *_byte_tokens()],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    learner.train_from_iterator(words, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    return CLIPTokenizer(vocab=learner.get_vocab(), merges=merges, model_max_length=MAX_TOKENS)


def _byte_tokens() -> list[str]:
    """List the bytes that text can hold, as CLIP's vocabulary does: inside a word and at its end.

    With them no text is unknown. Bytes that lower-case UTF-8 cannot have in that place are left out, which
    are two in five and would only add to the size of the encoders.
    """
    ascii_and_two_bytes = [*range(0x21, 0x7F), *range(0xA0, 0x800)]
    one_for_each_longer_start = [0x800, *range(0x1000, 0x110000, 0x1000)]
    speller = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = [
        "".join(piece for piece, _ in speller.pre_tokenize_str(chr(code).lower()))
        for code in ascii_and_two_bytes + one_for_each_longer_start
    ]
    inside, last = {byte for word in spelt for byte in word}, {word[-1] for word in spelt}
    return [*sorted(inside), *(byte + "</w>" for byte in sorted(last))]


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


@torch.no_grad()
def load_exported_encoder(encoder: CLIPTextModel, tokenizer: CLIPTokenizer, exported: Path) -> None:
    """Take over the weights of an exported encoder; each token of its vocabulary keeps its own embedding."""
    old = type(encoder).from_pretrained(exported)
    old_ids = CLIPTokenizer.from_pretrained(exported.parent / "tokenizer").get_vocab()
    weights = old.state_dict()
    (name,) = (name for name in weights if name.endswith("token_embedding.weight"))
    embedding = encoder.get_input_embeddings().weight.clone()
    for token, index in tokenizer.get_vocab().items():
        if token in old_ids:
            embedding[index] = weights[name][old_ids[token]]
    encoder.load_state_dict(weights | {name: embedding})
