"""Which models of transformers the survey trains, and how their default configurations are made small."""

from __future__ import annotations

from typing import Any

_PATCHES = {"patch_size": 8}
_STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1]}
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
_WAVES = {
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 8),
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "classifier_proj_size": 16,
    "mask_time_prob": 0.0,
    "mask_feature_prob": 0.0,
}

_QUERIES = {"num_key_value_heads": 4}
_ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "head_dim": 8}


# Without those that PyTorch cannot export (fsmt, ibert, led, longformer, longt5, switch_transformers, classes of
# xlnet), or only without their own backward pass (reformer, yoso), or that are NaN in double precision (classes of
# canine).
def _named(names: str) -> dict[str, dict[str, Any]]:
    return {name: {} for name in names.split()}


_CAUSAL = _named("""
    afmoe apertus arcee aria_text bailing_hybrid bamba bart beam bert bert-generation big_bird bigbird_pegasus
    biogpt bitnet blenderbot blenderbot-small bloom camembert codegen cohere cohere2 cohere2_moe cpmant ctrl cwm
    data2vec-text deepseek_v4 diffllama doge electra ernie ernie4_5 ernie4_5_moe exaone4 exaone_moe falcon
    falcon_mamba flex_olmo flint gemma gemma2 gemma3_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
    gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_neox_japanese gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoehybrid granitemoeshared helium hrm_text hy_v3 hy_v4 hyperclovax inkling2_text inkling_text
    internlm3 iquestcoder jais2 jamba jetmoe kolibri1 laguna lfm2 lfm3 llama llama4_text mamba marian mbart
    megatron-bert mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl_text ministral3 mistral mixtral
    modernbert-decoder moshi mpt mvp nanochat nemotron_h olmo olmo2 olmo3 olmo_hybrid olmoe openai-gpt opt
    pegasus persimmon phi phi3 phimoe plbart prophetnet qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text
    qwen3_moe qwen3_next qwen4_exp_text recurrent_gemma rembert roberta roberta-prelayernorm roformer rwkv
    seed_oss smollm3 solar_open stablelm starcoder2 trocr vaultgemma whisper xglm xlm xlm-roberta xlm-roberta-xl
    xlnet xlstm
""")  # fmt: skip
_MASKED = _named("""
    albert bart bert big_bird camembert convbert data2vec-text deberta deberta-v2 distilbert electra ernie
    eurobert flaubert fnet funnel gte jina_embeddings_v3 layoutlm mbart megatron-bert
    mobilebert modernbert mpnet mra mvp nomic_bert nystromformer rembert roberta roberta-prelayernorm roformer
    squeezebert tapas ultrabert xlm xlm-roberta xlm-roberta-xl
""")  # fmt: skip
_SEQ2SEQ = _named("""
    bart bigbird_pegasus blenderbot blenderbot-small m2m_100 marian mbart mt5 mvp nllb-moe
    pegasus pegasus_x plbart prophetnet seamless_m4t seamless_m4t_v2 t5 umt5
""")  # fmt: skip
_CLASSIFY = _named("""
    albert bart bert bloom convbert ctrl deberta deberta-v2 distilbert electra falcon flaubert fnet
    funnel gemma2 gpt2 gptj layoutlm llama markuplm mobilebert modernbert mpnet mpt mra mt5
    nystromformer openai-gpt opt qwen3 squeezebert tapas umt5 xlm
""")  # fmt: skip
_IMAGE: dict[str, dict[str, Any]] = {
    "vit": _PATCHES,
    "beit": _PATCHES,
    "dinov2": _PATCHES,
    "dinov2_with_registers": _PATCHES,
    "vit_msn": _PATCHES,
    "data2vec-vision": _PATCHES,
    "ijepa": _PATCHES,
    "siglip": {"vision_config": _TOWER},
    "clip": {"vision_config": _TOWER},
    "segformer": _STAGES | {"num_attention_heads": [1, 2, 4, 8], "decoder_hidden_size": 32},
    "convnext": _STAGES,
    "convnextv2": _STAGES,
    "resnet": _STAGES | {"embedding_size": 16},
    "regnet": _STAGES | {"embedding_size": 16, "groups_width": 8},
    "bit": _STAGES | {"embedding_size": 16, "num_groups": 4},
    "poolformer": _STAGES,
    "focalnet": {"embed_dim": 16, "depths": [1, 1], "patch_size": 4, "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2},
    "swinv2": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 32, 64]},
    "mobilenet_v1": {},
    "mobilenet_v2": {},
    "pvt_v2": _STAGES | {"num_attention_heads": [1, 2, 3, 4]},
    "swiftformer": {},
    "donut-swin": {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4, "patch_size": 2},
    "pvt": _STAGES | {"num_attention_heads": [1, 2, 3, 4]},
    "metaclip_2": {"vision_config": _TOWER, "text_config": {"num_hidden_layers": 1, "vocab_size": 67}},
    "hgnet_v2": {
        "embedding_size": 16,
        "stem_channels": [3, 8, 16],
        "hidden_sizes": [16, 32, 48, 64],
        "stage_in_channels": [16, 16, 32, 48],
        "stage_mid_channels": [8, 8, 8, 8],
        "stage_out_channels": [16, 32, 48, 64],
        "stage_num_blocks": [1, 1, 1, 1],
    },
}
_AUDIO: dict[str, dict[str, Any]] = {
    "wav2vec2": _WAVES,
    "hubert": _WAVES,
    "wavlm": _WAVES,
    "unispeech": _WAVES,
    "unispeech-sat": _WAVES | {"xvector_output_dim": 16},
    "sew": _WAVES | {"squeeze_factor": 2},
    "sew-d": _WAVES | {"squeeze_factor": 2},
    "data2vec-audio": _WAVES | {"num_conv_pos_embeddings": 2, "conv_pos_kernel_size": 5},
    "wav2vec2-conformer": _WAVES,
}

FAMILIES: dict[str, dict[str, dict[str, Any]]] = {
    "causal": _CAUSAL
    | dict.fromkeys(("axk2", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "minicpm3", "youtu"), _QUERIES)
    | dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral"), _ROTARY)
    | {
        "deepseek_v3": _QUERIES | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
        "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
        "gemma3n_text": {"num_kv_shared_layers": 0},
        "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
        "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
        "mamba2": {"num_heads": 4, "head_dim": 16},
        "nemotron": {"num_key_value_heads": 2},
        "zaya": {"num_experts_per_tok": 1},
    },
    "masked": _MASKED
    | {
        "esm": {"position_embedding_type": "rotary", "vocab_size": 67, "mask_token_id": 3},
        "esmc": _QUERIES,
        "luke": {"entity_vocab_size": 16},
        "roc_bert": {
            "pronunciation_vocab_size": 32,
            "shape_vocab_size": 32,
            "shape_embed_dim": 32,
            "pronunciation_embed_dim": 32,
        },
        "xmod": {"default_language": "en_XX"},
    },
    "seq2seq": _SEQ2SEQ,
    "classify": _CLASSIFY
    | {
        "deepseek_v3": _QUERIES,
        "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
        "lilt": {"hidden_size": 48},
        "t5": {"decoder_start_token_id": 1},
    },
    "image": _IMAGE,
    "audio": _AUDIO,
}
"""Head -> family -> values for its configuration."""
