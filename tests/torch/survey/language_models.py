"""Models of transformers: a family's default configuration, with small values for its sizes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import transformers as hf
from case import Batch, Case
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ortflow.workflow.spec.model import CrossEntropy

VOCABULARY = 67
TIME, SIDE, SAMPLES, CLASSES = 16, 32, 800, 5
LOSS = CrossEntropy(kind="cross_entropy", output="logits")

_SMALL: dict[int, str] = {
    2: (
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_encoder_layers "
        "num_decoder_layers num_key_value_heads num_experts_per_tok num_experts_per_token moe_topk moe_k top_k "
        "num_hidden_groups num_shared_experts n_shared_experts n_groups mamba_n_groups num_global_key_value_heads "
        "multi_query_group_num num_kv_heads"
    ),
    4: (
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_experts num_local_experts n_routed_experts "
        "moe_num_experts mamba_n_heads mamba_num_heads conv_kernel mamba_d_conv linear_num_value_heads "
        "linear_num_key_heads"
    ),
    8: (
        "head_dim d_kv v_head_dim qk_nope_head_dim qk_rope_head_dim state_size ssm_state_size mamba_d_state "
        "rotary_dim mamba_dt_rank time_step_rank linear_key_head_dim linear_value_head_dim swa_head_dim "
        "sliding_window attention_window_size global_head_dim"
    ),
    16: (
        "kv_lora_rank q_lora_rank moe_intermediate_size shared_expert_intermediate_size expert_ffn_size mamba_d_head "
        "mamba_headdim mamba_head_dim head_size chunk_size mamba_chunk_size moe_shared_expert_intermediate_size "
        "expert_hidden_size"
    ),
    32: (
        "hidden_size d_model n_embd dim embed_dim embedding_size emb_dim hidden_dim word_embed_proj_dim embedding_dim "
        "lru_width attention_hidden_size hidden_size_per_layer_input dim_model"
    ),
    64: (
        "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner d_inner ffn_hidden_size "
        "hidden_dim_mlp dff dim_ff max_position_embeddings n_positions n_ctx max_source_positions "
        "max_target_positions max_seq_len max_sequence_length max_length feed_forward_size inner_dim "
        "shared_intermediate_size mlp_dim"
    ),
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size src_vocab_size tgt_vocab_size",
}
SMALL = {name: size for size, names in _SMALL.items() for name in names.split()}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1}


def configuration(family: str, extra: Mapping[str, Any]) -> Any:
    """The family's configuration with small sizes, no dropout, no cache; `extra` wins."""
    kind = CONFIG_MAPPING[family]
    known = kind().to_dict()
    sizes: dict[str, Any] = {name: SMALL[name] for name in known if name in SMALL and known[name] is not None}
    sizes |= {name: value for name, value in TOKENS.items() if name in known}
    sizes |= {name: 0.0 for name, value in known.items() if "drop" in name and isinstance(value, float)}
    sizes |= {name: value for name, value in {"image_size": SIDE, "layerdrop": 0.0}.items() if name in known}
    if "use_cache" in known:
        sizes["use_cache"] = False
    config = kind(**{**sizes, **extra})
    config._experts_implementation = extra.get(
        "_experts_implementation", getattr(config, "_experts_implementation", None)
    )
    return config


def model(family: str, head: str, extra: Mapping[str, Any]) -> nn.Module:
    """The family's model with the head, in float32."""
    auto = {
        "causal": hf.AutoModelForCausalLM,
        "masked": hf.AutoModelForMaskedLM,
        "seq2seq": hf.AutoModelForSeq2SeqLM,
        "classify": hf.AutoModelForSequenceClassification,
        "image": hf.AutoModelForImageClassification,
        "audio": hf.AutoModelForAudioClassification,
    }[head]
    config = configuration(family, extra)
    if head in ("classify", "image", "audio"):
        config.num_labels = CLASSES
    return _without_ties(auto.from_config(config, dtype="float32"))


def _without_ties(module: nn.Module) -> nn.Module:
    """Routers initialised to zeros give all experts the same score, and TopK's choice among equals is undefined."""
    for name, parameter in module.named_parameters():
        if name.endswith(("gate.weight", "router.weight")) and not parameter.any():
            nn.init.normal_(parameter, std=0.1)
    return module


def _tokens(generator: np.random.Generator, size: int) -> np.ndarray:
    return generator.integers(3, VOCABULARY, (size, TIME))


def _causal(generator: np.random.Generator, size: int) -> Batch:
    tokens = _tokens(generator, size)
    return {"input_ids": tokens, "labels": np.roll(tokens, -1, 1)}


def _masked(generator: np.random.Generator, size: int) -> Batch:
    tokens = _tokens(generator, size)
    hidden = generator.random(tokens.shape) < 0.7
    lengths = generator.integers(TIME // 2, TIME + 1, (size, 1))
    mask = (np.arange(TIME) < lengths).astype(np.int64)
    return {"input_ids": tokens, "attention_mask": mask, "labels": np.where(hidden, LOSS.ignore_index, tokens)}


def _seq2seq(generator: np.random.Generator, size: int) -> Batch:
    target = _tokens(generator, size)
    return {"input_ids": _tokens(generator, size), "decoder_input_ids": target, "labels": np.roll(target, -1, 1)}


def _classify(generator: np.random.Generator, size: int) -> Batch:
    """Texts that end with a token that some families look for, and padding, which most of them skip."""
    tokens, places = _tokens(generator, size), np.arange(TIME)
    last = generator.integers(TIME // 2, TIME, (size, 1))
    tokens = np.where(places < last, tokens, np.where(places == last, TOKENS["eos_token_id"], TOKENS["pad_token_id"]))
    mask = (places <= last).astype(np.int64)
    return {"input_ids": tokens, "attention_mask": mask, "labels": generator.integers(0, CLASSES, size)}


def _image(generator: np.random.Generator, size: int) -> Batch:
    pixels = generator.standard_normal((size, 3, SIDE, SIDE), dtype=np.float32)
    return {"pixel_values": pixels, "labels": generator.integers(0, CLASSES, size)}


def _audio(generator: np.random.Generator, size: int) -> Batch:
    waves = generator.standard_normal((size, SAMPLES), dtype=np.float32)
    return {"input_values": waves, "labels": generator.integers(0, CLASSES, size)}


BATCHES = {
    "causal": _causal,
    "masked": _masked,
    "seq2seq": _seq2seq,
    "classify": _classify,
    "image": _image,
    "audio": _audio,
}


def case(family: str, head: str, extra: Mapping[str, Any]) -> Case:
    """A case of the survey."""
    return Case(f"transformers/{head}/{family}", lambda: model(family, head, extra), BATCHES[head], LOSS)
