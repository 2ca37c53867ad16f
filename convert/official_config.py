"""The release's nested `config.json`, from a ModelConfig, and the released numbers themselves."""

from __future__ import annotations

from typing import Any

from mlx_ds4.config import ModelConfig

_ROPE = {
    "rope_factor": "factor",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_original_length": "original_max_position_embeddings",
}
RELEASED_ROPE = {
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_factor": 16.0,
    "rope_beta_fast": 32.0,
    "rope_beta_slow": 1.0,
    "rope_original_length": 65536,
}
_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_VISION = {
    "model_type": "deepseek_v41_vision",
    "num_hidden_layers": 32,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "intermediate_size": 2816,
    "patch_size": 14,
    "rope_theta": 10000.0,
    "downsample_ratio": 3,
    "max_image_tokens": 1024,
    "min_pixels": 295936,
    "max_wh_ratio": None,
}


def official_config(config: ModelConfig) -> dict[str, Any]:
    """A `config.json` in the release's layout; `ModelConfig.from_dict` gives `config` back.

    Numbers that are whole are written as integers, as the release does for its rotary settings.
    """
    values = {key: _whole(value) for key, value in config.to_dict().items() if key != "model_type"}
    scaling = {"type": "yarn", **{theirs: values.pop(ours) for ours, theirs in _ROPE.items()}}
    top = {key: values.pop(key) for key in _TOKEN_IDS}
    text = {
        "model_type": "deepseek_v41_text",
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "num_key_value_heads": 1,
        "tie_word_embeddings": False,
        "n_shared_experts": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        **values,
        "rope_scaling": scaling,
    }
    return {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "dtype": "bfloat16",
        **top,
        "tie_word_embeddings": False,
        "quantization_config": {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [32, 32],
            "scale_fmt": "ue8m0",
            "expert_dtype": "fp4",
        },
        "text_config": text,
    }


def released_config() -> dict[str, Any]:
    """The `config.json` of DeepSeek V4.1 Flash, vision part included."""
    text = ModelConfig(
        vocab_size=129280,
        hidden_size=5120,
        num_hidden_layers=40,
        moe_intermediate_size=2304,
        num_attention_heads=64,
        head_dim=512,
        qk_rope_head_dim=64,
        q_lora_rank=1280,
        o_lora_rank=1024,
        o_groups=8,
        sliding_window=128,
        n_routed_experts=384,
        num_experts_per_tok=6,
        routed_scaling_factor=1.5,
        swiglu_limit=10.0,
        compress_ratios=(0, 0, *[2] * 18, *[1] * 20, 0, 0, 0),
        kv_source_layer_ids=(2, 8, 14, 20),
        index_source_layer_ids=(2, 8, 14, 20, 24, 28, 32, 36),
        index_n_heads=32,
        index_head_dim=128,
        index_topk=512,
        candidate_source_layer_id=20,
        candidate_topk_blocks=2048,
        candidate_block_size=8,
        **RELEASED_ROPE,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_head_dim=256,
        engram_compressed_vocab_size=99092,
        num_nextn_predict_layers=3,
        dspark_block_size=5,
        dspark_noise_token_id=128799,
        dspark_target_layer_ids=(37, 38, 39),
        dspark_markov_rank=256,
        dspark_n_routed_experts=128,
        dspark_num_experts_per_tok=3,
    )
    return {**official_config(text), "image_token_id": 129264, "vision_config": dict(_VISION)}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
