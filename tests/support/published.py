"""Published checkpoints and what becomes of them, by smaller configurations. The reference's tables are these.

TARGETS, HEADS                       rows: an id of the hub, what config.json says, and what is told if it is refused
config_of(target) -> dict            the target's config.json, smaller
"""

from __future__ import annotations

from typing import Any, NamedTuple

_EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 64}
_SPECULATORS = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 64}
_BLOCK = {"block_size": 4, "mask_token_id": 3}
_DFLASH = {"mask_token_id": 3, "target_layer_ids": [0, 1]}
_MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
_MODELOPT = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
}
_EAGLE31 = {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True, "fc_norm": False}
_WINDOW = {"layer_types": ["sliding_attention"], "sliding_window": 2048, "use_sliding_window": True}
_QWEN3 = {"head_dim": 8, "model_type": "qwen3"}


class Target(NamedTuple):
    """A model. told: how it is refused, "" if it loads; ranks: "1" if it cannot be split."""

    name: str
    model_type: str
    config: dict[str, Any]
    told: str = ""
    ranks: str = "several"


class Head(NamedTuple):
    """A draft head of a Llama target, or a target with its own. told: how it is refused, "" if it loads.

    config: what config.json has beside or instead of the layers of a small Llama.
    """

    name: str
    method: str
    config: dict[str, Any]
    told: str = ""


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


def _quantized(**config: Any) -> dict[str, Any]:
    return {"quantization_config": config}


_FP8_ROWS = _compressed("float-quantized", num_bits=8, type="float", strategy="channel")
_W4A16 = _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128)
_NVFP4 = _compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16)
_ATTENTION = {"layer_types": ["attention"] * 2, "num_local_experts": 0, "position_embedding_type": "rope"}

TARGETS = (
    Target("meta-llama/Llama-3.1-8B-Instruct", "llama", {}),
    Target("mistralai/Mistral-7B-Instruct-v0.3", "mistral", {}),
    Target("Qwen/Qwen2.5-7B-Instruct", "qwen2", {}),
    Target("Qwen/Qwen3-8B", "qwen3", {}),
    Target("Qwen/Qwen3-30B-A3B", "qwen3_moe", {}),
    Target("openai/gpt-oss-20b", "gpt_oss", _quantized(quant_method="mxfp4")),
    Target("zai-org/GLM-4-9B-0414", "glm4", {}),
    Target("zai-org/GLM-4.5-Air", "glm4_moe", {}),
    Target("MiniMaxAI/MiniMax-M2", "minimax_m2", {}),
    Target("google/gemma-2-9b-it", "gemma2", {}),
    Target("google/gemma-3-1b-it", "gemma3_text", {}),
    Target("microsoft/phi-2", "phi", {}),
    Target("microsoft/Phi-3.5-mini-instruct", "phi3", {"pad_token_id": 0}),
    Target("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral", {}),
    Target("allenai/OLMo-2-1124-7B", "olmo2", {}),
    Target("allenai/Olmo-3-7B-Instruct", "olmo3", {}),
    Target("allenai/OLMoE-1B-7B-0924", "olmoe", {}),
    Target("ibm-granite/granite-3.3-8b-instruct", "granite", {}),
    Target("ibm-granite/granite-4.0-micro", "granitemoehybrid", _ATTENTION),
    Target("CohereLabs/c4ai-command-r-v01", "cohere", {}),
    Target("CohereLabs/command-a-03-2025", "cohere2", {}),
    Target("bigcode/starcoder2-7b", "starcoder2", {}),
    Target("bigcode/starcoder", "gpt_bigcode", {}, ranks="1"),
    Target("HuggingFaceTB/SmolLM3-3B", "smollm3", {"pad_token_id": 0}),
    Target("ByteDance-Seed/Seed-OSS-36B-Instruct", "seed_oss", {}),
    Target("baidu/ERNIE-4.5-0.3B-PT", "ernie4_5", {}),
    Target("LGAI-EXAONE/EXAONE-4.0-1.2B", "exaone4", {}),
    Target("nvidia/Minitron-4B-Base", "nemotron", {"head_dim": 128, "num_key_value_heads": 8}),
    Target("swiss-ai/Apertus-8B-Instruct-2509", "apertus", {}),
    Target("arcee-ai/AFM-4.5B", "arcee", {}),
    Target("EleutherAI/pythia-1b", "gpt_neox", {}),
    Target("stabilityai/stablelm-2-1_6b", "stablelm", {}, ranks="1"),
    Target("microsoft/bitnet-b1.58-2B-4T-bf16", "bitnet", {}, ranks="1"),
    Target("openai-community/gpt2", "gpt2", {}, ranks="1"),
    Target("facebook/opt-1.3b", "opt", {}, ranks="1"),
    Target("microsoft/biogpt", "biogpt", {}, ranks="1"),
    Target("Qwen/Qwen3-8B-FP8", "qwen3", _quantized(quant_method="fp8", weight_block_size=[128, 128])),
    Target("RedHatAI/Qwen3-8B-FP8-dynamic", "qwen3", _quantized(**_FP8_ROWS)),
    Target("RedHatAI/Qwen3-8B-quantized.w4a16", "qwen3", _quantized(**_W4A16)),
    Target("RedHatAI/Llama-3.1-8B-Instruct-NVFP4", "llama", _quantized(**_NVFP4)),
    Target("nvidia/Llama-3.1-8B-Instruct-FP8", "llama", _quantized(quant_method="modelopt", quant_algo="FP8")),
    Target("nvidia/Llama-3.1-8B-Instruct-FP4", "llama", _quantized(quant_method="modelopt", quant_algo="NVFP4")),
    Target("Qwen/Qwen3-8B-AWQ", "qwen3", _quantized(quant_method="awq", bits=4, group_size=128)),
    Target("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "qwen2", _quantized(quant_method="gptq", bits=4, group_size=128)),
    Target("unsloth/Llama-3.1-8B-Instruct-bnb-4bit", "llama", _quantized(quant_method="bitsandbytes"), "bitsandbytes"),
    Target("amd/Llama-3.1-8B-Instruct-FP8-KV", "llama", _quantized(quant_method="quark"), "quantized by quark"),
    Target("deepseek-ai/DeepSeek-V3", "deepseek_v3", {}),
    Target("moonshotai/Kimi-K2-Instruct", "deepseek_v3", {"auto_map": {"AutoConfig": "a.B"}}),
    Target("zai-org/GLM-4.7-Flash", "glm4_moe_lite", {}),
    Target("tencent/Youtu-LLM-2B", "youtu", {}),
    Target("deepseek-ai/DeepSeek-V3.2", "deepseek_v32", {}, "an indexer selects"),
    Target("zai-org/GLM-5", "glm_moe_dsa", {}, "an indexer selects"),
    Target("deepseek-ai/DeepSeek-V2-Lite", "deepseek_v2", {}, "multi-head latent attention"),
    Target("nvidia/Llama-3_3-Nemotron-Super-49B-v1", "nemotron-nas", {"auto_map": {"AutoConfig": "a.B"}},
           "model type 'nemotron-nas'"),
    Target("nvidia/NVIDIA-Nemotron-Nano-9B-v2", "nemotron_h", {}, "layers of type"),
    Target("meta-llama/Llama-4-Scout-17B-16E-Instruct", "llama4_text", {}, "layers of type chunked_attention"),
    Target("LiquidAI/LFM2-1.2B", "lfm2", {"layer_types": ["conv", "full_attention"]}, "layers of type conv"),
    Target("state-spaces/mamba-2.8b-hf", "mamba", {}, "layers of type linear_attention"),
    Target("tiiuae/falcon-7b", "falcon", {}, "its attention is not one that can be replaced"),
    Target("EleutherAI/gpt-j-6b", "gptj", {}, "its attention is not one that can be replaced"),
    Target("bigscience/bloom-7b1", "bloom", {}, "needs more than attention"),
    Target("mosaicml/mpt-7b", "mpt", {}, "needs more than attention"),
    Target("facebook/bart-large", "bart", {}, "is not supported"),
    Target("RWKV/rwkv-4-169m-pile", "rwkv", {}, "layers attend"),
    Target("RedHatAI/Qwen3-8B-speculator.eagle3", "qwen3", _SPECULATORS, "is an EAGLE-3 draft head"),
)  # fmt: skip

HEADS = (
    Head("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "eagle3", {"draft_vocab_size": 64}),
    Head("yuhuili/EAGLE3-Vicuna1.3-13B", "eagle3", {"draft_vocab_size": 96}),
    Head("nebius/EAGLE3-gpt-oss-20b", "eagle3", {"draft_vocab_size": 64, "num_key_value_heads": None}),
    Head("AngelSlim/Qwen3-4B_eagle3", "eagle3", {"architectures": ["Eagle3LlamaForCausalLM"], "draft_vocab_size": 64}),
    Head("Tengyunw/qwen3_8b_eagle3", "eagle3", _EAGLE3),
    Head("Rayzl/qwen2.5-vl-7b-eagle3-sgl", "eagle3",
         _EAGLE3 | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}),
    Head("nvidia/gpt-oss-120b-Eagle3-v3", "eagle3", _EAGLE3 | {"draft_vocab_size": 96, "eagle_config": _MODELOPT}),
    Head("lmsys/sglang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-v1", "eagle3",
         _EAGLE3 | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}}),
    Head("RedHatAI/Qwen3-8B-speculator.eagle3", "eagle3", _SPECULATORS | {"transformer_layer_config": {}}),
    Head("RedHatAI/gpt-oss-20b-speculator.eagle3", "eagle3",
         _SPECULATORS | {"transformer_layer_config": {}, "norm_before_residual": True}),
    Head("an EAGLE-3.1 head of four layers (speculators)", "eagle3",
         _SPECULATORS | _EAGLE31 | {"architectures": ["Eagle3DraftModel"], "transformer_layer_config": _WINDOW,
                                    "eagle_aux_hidden_state_layer_ids": [2, 4, 5, 7]}),
    Head("RedHatAI/Qwen3-8B-speculator.peagle", "eagle3",
         {"architectures": ["PEagleDraftModel"], "speculators_model_type": "peagle", "draft_vocab_size": 64,
          "mask_token_id": 3, "transformer_layer_config": {"num_hidden_layers": 4}}),
    Head("amazon/gpt-oss-20b-p-eagle", "eagle3",
         _EAGLE3 | {"draft_vocab_size": 96, "num_hidden_layers": 4, "ptd_token_id": 3}),
    Head("yuhuili/EAGLE-LLaMA3.1-Instruct-8B", "eagle", {}),
    Head("HArmonizedSS/HASS-LLaMA3-Instruct-8B", "eagle", {"bias": True}),
    Head("deepseek-ai/dspark_qwen3_8b_block7", "dspark",
         {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1], **_BLOCK, **_MARKOV}),
    Head("deepseek-ai/dflash_qwen3_8b_block7", "dflash",
         {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1], **_BLOCK, "markov_rank": 0}),
    Head("z-lab/Qwen3-8B-DFlash-b16", "dflash",
         {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": _DFLASH}),
    Head("rasyosef/Llama-3.2-1B-Instruct-DSpark", "dspark",
         {"speculators_model_type": "dspark", "aux_hidden_state_layer_ids": [1, 2], "sample_from_anchor": True,
          **_BLOCK, **_MARKOV}),
    Head("RedHatAI/Qwen3-8B-speculator.dflash", "dflash",
         {"architectures": ["DFlashDraftModel"], "speculators_model_type": "dflash", "draft_vocab_size": 64, **_BLOCK,
          "aux_hidden_state_layer_ids": [2, 4], "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
          "transformer_layer_config": _QWEN3}),
    Head("z-lab/Qwen3.5-9B-DFlash", "dflash",
         {"architectures": ["DFlashDraftModel"], "dflash_config": _DFLASH | {"block_size": 4}, **_WINDOW}),
    Head("amd/PARD-Qwen3-0.6B", "draft_model",
         {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 2, "pard_token": 3, **_QWEN3}),
    Head("XiaomiMiMo/MiMo-7B-RL", "mtp", {"architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1,
                                          "model_type": "mimo"}),
    Head("Qwen/Qwen3.5-9B", "mtp", {"model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1}),
    Head("zai-org/GLM-4.5-Air", "mtp", {"model_type": "glm4_moe", "num_nextn_predict_layers": 1, "head_dim": 128}),
    Head("meta-llama/Llama-3.1-8B-Instruct", "mtp", {"model_type": "llama"}, "natively support multi-token prediction"),
    Head("baidu/ERNIE-4.5-21B-A3B-PT", "mtp", {"model_type": "ernie4_5_moe", "num_nextn_predict_layers": 1},
         "prediction layers of a ernie4_5_moe model are not implemented"),
    Head("FasterDecoding/medusa-vicuna-7b-v1.3", "draft_model", {"medusa_num_heads": 2},
         "a Medusa head, which is not supported"),
    Head("ankner/hydra-vicuna-7b-v1.3", "draft_model", {"hydra_num_heads": 4},
         "a Hydra head, which is not supported"),
    Head("ibm-fms/llama3-8b-accelerator", "draft_model",
         {"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "n_predict": 4},
         "an MLP speculator, which is not supported"),
    Head("google/gemma-4-E4B-it-assistant", "draft_model",
         {"architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant"}, "a Gemma 4 assistant"),
    Head("abhigoyal/vllm-eagle-llama-68m-random", "eagle",
         {"architectures": ["EAGLEModel"], "model_type": "eagle", "model": {}}, "format of vLLM's first versions"),
    Head("nvidia/gpt-oss-120b-Eagle3-v2", "eagle3",
         _EAGLE3 | {"eagle_config": _MODELOPT | {"use_aux_hidden_state": False}}, "use_aux_hidden_state False"),
    Head("lightseekorg/kimi-k3-eagle3.1-mla", "eagle3",
         _EAGLE3 | {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "kv_lora_rank": 8}, "are those of Deepseek"),
    Head("openbmb/MiniCPM4-8B-Eagle-FRSpec", "eagle", {"architectures": ["EagleMiniCPMForCausalLM"]},
         "layers are those of MiniCPM"),
    Head("a DSpark head with layers of Gemma 4 (DeepSpec)", "dspark",
         {"architectures": ["Gemma4DSparkModel"], "target_layer_ids": [0, 1], **_BLOCK, **_MARKOV},
         "layers are those of Gemma4"),
    Head("a DSpark head with a recurrent Markov head", "dspark",
         {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1], **_BLOCK, **_MARKOV,
          "markov_head_type": "rnn"}, "markov_head_type 'rnn' is not supported"),
    Head("nvidia/MiniMax-M3-DSpark", "dspark",
         {"architectures": ["DFlashDraftModel"], "block_size": 4,
          "dflash_config": _DFLASH | _MARKOV | {"projector_type": "dspark", "shift_label": True}},
         "dflash_config has shift_label"),
    Head("z-lab/Qwen3.8-27B-DFlash2", "dflash",
         {"architectures": ["DFlash2DraftModel"],
          "dflash_config": _DFLASH | {"block_size": 4, "conv_kernel_size": 2, "selector_rank": 8}},
         "dflash_config has conv_kernel_size, selector_rank"),
    Head("a head with parallel layers (NVIDIA)", "eagle3",
         _EAGLE3 | {"eagle_config": {"parallel_draft_step": 4}}, "parallel_draft_step"),
    Head("a Medusa head in the format of speculators", "eagle3",
         {"speculators_model_type": "medusa"}, "a head of type 'medusa'"),
    Head("an EAGLE-1 head in the format of speculators", "eagle",
         {"speculators_model_type": "eagle"}, "a head of type 'eagle'"),
    Head("an EAGLE-3 head as EAGLE-1", "eagle", _EAGLE3, "write method 'eagle3'"),
    Head("an EAGLE-1 head as EAGLE-3", "eagle3", {}, "has no draft_vocab_size"),
    Head("DFlash as EAGLE-3", "eagle3",
         {"architectures": ["DFlashDraftModel"], "block_size": 4, "dflash_config": _DFLASH}, "write method 'dflash'"),
    Head("DSpark as DFlash", "dflash",
         {"architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 1], **_BLOCK, **_MARKOV}, "method 'dspark'"),
    Head("Domino", "dflash",
         {"architectures": ["DFlashDraftModel"], "block_size": 4,
          "dflash_config": {**_DFLASH, "projector_type": "domino"}}, "projector_type 'domino' is not supported"),
    Head("an EAGLE-3 head for another width", "eagle3", _EAGLE3 | {"target_hidden_size": 96}, "of hidden size 96"),
    Head("an EAGLE-3 head for another vocabulary", "eagle3", _EAGLE3 | {"vocab_size": 128}, "a vocabulary of 128"),
)  # fmt: skip


def config_of(target: Target) -> dict[str, Any]:
    """Return a target's config.json, with transformers' defaults for what does not matter here."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if target.model_type not in CONFIG_MAPPING:
        return {"architectures": ["NovelForCausalLM"], "model_type": target.model_type, **target.config}
    kind = CONFIG_MAPPING[target.model_type]
    quantization = target.config.get("quantization_config")
    own = {name: value for name, value in target.config.items() if name != "quantization_config"}
    raw: dict[str, Any] = kind(num_hidden_layers=2, **own).to_dict()
    raw |= {"architectures": [AutoModelForCausalLM._model_mapping[kind].__name__], **own}
    return raw | ({"quantization_config": quantization} if quantization else {})
