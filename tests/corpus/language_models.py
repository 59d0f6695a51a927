"""Decoders, experts, encoders, and both together: of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import raysharded as rs
from tests.corpus.program import Program, Programs, pictures, texts
from tests.corpus.stock import LENGTH, VOCABULARY, Stock, masked_token, next_token, second_half, stock, tokens_lost

TEXTS = texts(VOCABULARY, LENGTH)
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_DECODER: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "max_position_embeddings": 16, **SPECIAL}
_LLAMA: dict[str, Any] = {
    **_DECODER,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {**_LLAMA, "num_experts_per_tok": 2, "moe_intermediate_size": 12}


class Llama(Stock):
    """Also cut by tensor parallelism."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        whole_in = {f"model.layers.*.{name}": ColwiseParallel() for name in _COLUMNS}
        return {**whole_in, **{f"model.layers.*.{name}": RowwiseParallel() for name in _ROWS}}


_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")


def llama() -> Program:
    settings = {**_LLAMA, "tie_word_embeddings": True, "attention_dropout": 0.1}
    return Program(task=Llama("LlamaForCausalLM", settings, next_token), data=TEXTS)


def routed(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """The loss of the next token and the router's, which is a metric."""
    out = model(input_ids=batch, labels=batch, output_router_logits=True)
    return rs.Loss(out.loss * len(batch), len(batch), {"router": (out.aux_loss.detach(), 1)})


def replaced_token(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """Whether a token was replaced."""
    replaced = torch.rand(batch.shape) < 0.3
    tokens = torch.where(replaced, torch.randint_like(batch, 3, VOCABULARY), batch)
    loss = model(input_ids=tokens, labels=replaced.long()).loss
    return rs.Loss(loss * len(batch), len(batch))


def heard(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """The transcript of a sound; the features are a picture's, laid flat."""
    features, tokens = batch.flatten(2), (batch[:, 0, 0].abs() * 50).long() % (VOCABULARY - 3) + 3
    return tokens_lost(model(input_features=features, decoder_input_ids=tokens[:, :-1]).logits, tokens[:, 1:])


_BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    **SPECIAL,
}
_BART: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "max_position_embeddings": 16,
    "use_cache": False,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    **SPECIAL,
}
_WHISPER = {
    **_BART,
    "num_mel_bins": 8,
    "max_source_positions": 32,
    "max_target_positions": 16,
    "apply_spec_augment": True,
    "mask_time_prob": 0.3,
    "mask_time_length": 3,
    "mask_time_min_masks": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
_T5: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 2,
    "use_cache": False,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_GPT2 = {**_DECODER, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
_BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 2, "use_cache": False, **SPECIAL}
_FALCON = {**_DECODER, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "alibi": False}
_OPT = {**_DECODER, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 24, "num_hidden_layers": 2}
_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "use_cache": False}
_RWKV = {"vocab_size": VOCABULARY, "hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2}
_GEMMA = {**_LLAMA, "head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8}
_NEOX = {**_DECODER, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_DEEPSEEK = {
    **_LLAMA,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 12,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 4,
}
_OSS = {**_LLAMA, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}
_ALBERT = {**_BERT, "embedding_size": 8, "num_hidden_groups": 1, "inner_group_num": 1}
_MODERN = {**_BERT, "global_attn_every_n_layers": 2, "local_attention": 4, "cls_token_id": 1, "sep_token_id": 2}
_SWITCH = {**_T5, "num_experts": 4, "expert_capacity": 16, "num_sparse_encoder_layers": 1, "router_jitter_noise": 0.1}


PROGRAMS: Programs = {
    "llama": llama,
    "gpt2": stock("GPT2LMHeadModel", _GPT2, next_token, TEXTS),
    "qwen3": stock("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 4}, next_token, TEXTS),
    "gemma2": stock("Gemma2ForCausalLM", _GEMMA, next_token, TEXTS),
    "phi3": stock("Phi3ForCausalLM", _LLAMA, next_token, TEXTS),
    "bloom": stock("BloomForCausalLM", _BLOOM, next_token, TEXTS),
    "falcon": stock("FalconForCausalLM", _FALCON, next_token, TEXTS),
    "opt": stock("OPTForCausalLM", {**_OPT, "num_attention_heads": 2}, next_token, TEXTS),
    "gpt_neox": stock("GPTNeoXForCausalLM", _NEOX, next_token, TEXTS),
    "mamba": stock("MambaForCausalLM", {**_MAMBA, **SPECIAL}, next_token, TEXTS),
    "rwkv": stock("RwkvForCausalLM", {**_RWKV, "use_cache": False, **SPECIAL}, next_token, TEXTS),
    "mixtral": stock("MixtralForCausalLM", {**_LLAMA, "num_local_experts": 4}, routed, TEXTS),
    "qwen3_moe": stock("Qwen3MoeForCausalLM", {**_EXPERTS, "num_experts": 4, "head_dim": 4}, next_token, TEXTS),
    "switch": stock("SwitchTransformersForConditionalGeneration", _SWITCH, second_half, TEXTS),
    "deepseek_v3": stock("DeepseekV3ForCausalLM", _DEEPSEEK, next_token, TEXTS),
    "gpt_oss": stock("GptOssForCausalLM", _OSS, next_token, TEXTS),
    "bert": stock("BertForMaskedLM", _BERT, masked_token, TEXTS),
    "deberta_v2": stock(
        "DebertaV2ForMaskedLM",
        {**_BERT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8},
        masked_token,
        TEXTS,
    ),
    "electra": stock("ElectraForPreTraining", {**_BERT, "embedding_size": 8}, replaced_token, TEXTS),
    "albert": stock("AlbertForMaskedLM", _ALBERT, masked_token, TEXTS),
    "albert_whole": stock("AlbertForMaskedLM", _ALBERT, masked_token, TEXTS, whole=True),
    "modernbert": stock("ModernBertForMaskedLM", _MODERN, masked_token, TEXTS),
    "t5": stock("T5ForConditionalGeneration", _T5, second_half, TEXTS),
    "bart": stock("BartForConditionalGeneration", _BART, second_half, TEXTS),
    "bart_layerdrop": stock(
        "BartForConditionalGeneration",
        {**_BART, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5},
        second_half,
        TEXTS,
    ),
    "whisper": stock("WhisperForConditionalGeneration", _WHISPER, heard, pictures(8, 8)),
    "marian": stock("MarianMTModel", {**_BART, "scale_embedding": True}, second_half, TEXTS),
}
