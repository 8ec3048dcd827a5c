"""Transformers over tokens, from the configurations of Hugging Face's transformers, without any download."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import transformers as hf
from case import Batch, Case
from torch import nn

from ortflow.workflow.spec.model import CrossEntropy, OutputLoss

VOCABULARY = 67
TIME = 12
FRAMES = 32
SIZES = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
WIDTH = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LOSS = CrossEntropy(kind="cross_entropy", output="logits")


def gpt2() -> nn.Module:
    """GPT-2: learned positions, GELU by tanh, tied embeddings."""
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {"n_positions": TIME, "n_embd": 32, "n_layer": 2, "n_head": 4}
    return hf.GPT2LMHeadModel(hf.GPT2Config(**SIZES, **sizes, **dropout, use_cache=False))


def llama() -> nn.Module:
    """Llama: rotary positions, RMS norm, SwiGLU, grouped-query attention."""
    return hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, **WIDTH, num_key_value_heads=2, use_cache=False))


def mixtral() -> nn.Module:
    """Mixtral: a mixture of four experts, two to a token."""
    config = hf.MixtralConfig(**SIZES, **WIDTH, num_key_value_heads=2, num_local_experts=4, use_cache=False)
    config._experts_implementation = "batched_mm"
    return hf.MixtralForCausalLM(config)


def bert() -> nn.Module:
    """BERT with its masked-token head, tied to the embeddings."""
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return hf.BertForMaskedLM(hf.BertConfig(**SIZES, **WIDTH, **dropout, max_position_embeddings=TIME))


def t5() -> nn.Module:
    """T5: relative positions, RMS norm, encoder and decoder over one table."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
    return hf.T5ForConditionalGeneration(hf.T5Config(**{**SIZES, "pad_token_id": 0}, **sizes, use_cache=False))


def whisper() -> nn.Module:
    """Whisper: convolutions over a spectrogram, then an encoder and a decoder; sinusoids are not trained."""
    sizes = {"num_mel_bins": 8, "d_model": 32, "max_source_positions": FRAMES // 2, "max_target_positions": TIME}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 64}
    tokens = {"decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None}
    dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(**SIZES, **sizes, **tokens, **dropout, use_cache=False))


def _tokens(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.integers(1, VOCABULARY, (size, TIME))


def _mask(generator: np.random.Generator, size: int) -> np.ndarray:
    lengths = generator.integers(TIME // 2, TIME + 1, (size, 1))
    return (np.arange(TIME) < lengths).astype(np.int64)


def _next_token(generator: np.random.Generator, size: int) -> Batch:
    tokens = _tokens(generator, size)
    return {"input_ids": tokens, "attention_mask": _mask(generator, size), "labels": np.roll(tokens, -1, 1)}


def _masked_token(generator: np.random.Generator, size: int) -> Batch:
    batch = _next_token(generator, size)
    hidden = generator.random(batch["labels"].shape) < 0.7
    return {**batch, "labels": np.where(hidden, LOSS.ignore_index, batch["input_ids"])}


def _translation(generator: np.random.Generator, size: int) -> Batch:
    decoder = {f"decoder_{name}": value for name, value in _next_token(generator, size).items()}
    return {**_next_token(generator, size), "labels": decoder.pop("decoder_labels"), **decoder}


def _speech(generator: np.random.Generator, size: int) -> Batch:
    batch = _translation(generator, size)
    del batch["input_ids"], batch["attention_mask"]
    return {"input_features": generator.standard_normal((size, 8, FRAMES), dtype=np.float32), **batch}


def cases() -> Iterator[Case]:
    """Decoders, an encoder, encoder-decoders."""
    yield Case("gpt2", gpt2, _next_token, LOSS)
    yield Case("gpt2-loss", gpt2, _next_token, OutputLoss(kind="output", output="loss"), labels=("labels",))
    yield Case("llama", llama, _next_token, LOSS)
    yield Case("mixtral", mixtral, _next_token, LOSS)
    yield Case("bert", bert, _masked_token, LOSS)
    yield Case("t5", t5, _translation, LOSS)
    yield Case("whisper", whisper, _speech, LOSS)
