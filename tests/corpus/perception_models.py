"""Vision, audio, and models with several towers: of transformers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from tests.corpus.program import Programs, pictures, vectors
from tests.corpus.stock import VOCABULARY, stock, tokens_lost

CLASSES = 5
SMALL, LARGE = pictures(3, 16), pictures(3, 32)


def class_of(batch: torch.Tensor) -> torch.Tensor:
    """A label that the picture decides."""
    return (batch[:, 0, 0, 0].abs() * 50).long() % CLASSES


def words_of(batch: torch.Tensor, length: int = 7) -> torch.Tensor:
    """A text that the picture decides."""
    return (batch[:, 0, 0, :length].abs() * 50).long() % (VOCABULARY - 6) + 5


def classified(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(pixel_values=batch).logits, class_of(batch))


def detected(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Each query is to find the class, in a box of one half."""
    out = model(pixel_values=batch)
    targets = class_of(batch)[:, None].expand(out.logits.shape[:2])
    found = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten())
    return found + (out.pred_boxes - 0.5).abs().mean()


def transcribed(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """CTC of three letters that the sound decides."""
    labels = (batch[:, :3].abs() * 50).long() % (CLASSES - 1) + 1
    return rs.Loss(model(input_values=batch, labels=labels).loss * len(batch), len(batch))


def matched(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Each picture with its text."""
    out = model(pixel_values=batch, input_ids=words_of(batch))
    return F.cross_entropy(out.logits_per_image, torch.arange(len(batch)))


def paired(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Each picture with its text, as a decision of each pair."""
    logits = model(pixel_values=batch, input_ids=words_of(batch)).logits_per_text
    return -F.logsigmoid(logits * (2 * torch.eye(len(batch)) - 1)).mean()


def captioned(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    """The text of a picture, after the places that the queries take."""
    words = words_of(batch)
    places = torch.full((len(batch), 3), VOCABULARY - 1)
    out = model(pixel_values=batch, input_ids=torch.cat([places, words[:, :-1]], 1))
    return tokens_lost(out.logits[:, -words.shape[1] + 1 :], words[:, 1:])


_VIT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_LABELS = {"num_labels": CLASSES}
_SWIN = {
    "image_size": 32,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [2, 1],
    "num_heads": [2, 2],
    "window_size": 4,
    "drop_path_rate": 0.2,
    **_LABELS,
}
_CONVNEXT = {"hidden_sizes": [8, 12], "depths": [2, 1], "num_stages": 2, "drop_path_rate": 0.2, **_LABELS}
_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}
_SEGFORMER = {
    "num_encoder_blocks": 2,
    "depths": [2, 1],
    "sr_ratios": [2, 1],
    "hidden_sizes": [8, 16],
    "patch_sizes": [7, 3],
    "strides": [4, 2],
    "num_attention_heads": [1, 2],
    "mlp_ratios": [2, 2],
    **_LABELS,
}
_DETR = {
    "use_timm_backbone": False,
    "backbone": None,
    "backbone_config": {"model_type": "resnet", "out_features": ["stage2"], **_RESNET},
    "use_pretrained_backbone": False,
    "d_model": 16,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "num_queries": 3,
    **_LABELS,
}
_HEARING = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "conv_dim": [8, 8],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "num_feat_extract_layers": 2,
    "mask_time_prob": 0.3,
    "mask_time_length": 2,
    "layerdrop": 0.0,  # which transformers itself leaves out under FSDP
    "ctc_loss_reduction": "mean",
}
_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 8,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
_SEEING = {**_VIT, "num_hidden_layers": 1}
_BLIP = {
    "vision_config": _SEEING,
    "qformer_config": {**_TEXT, "encoder_hidden_size": 16, "cross_attention_frequency": 1},
    "text_config": {
        "model_type": "opt",
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "word_embed_proj_dim": 16,
        "ffn_dim": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
    },
    "num_query_tokens": 3,
    "image_token_index": VOCABULARY - 1,
}

PROGRAMS: Programs = {
    "vit": stock("ViTForImageClassification", {**_VIT, **_LABELS}, classified, SMALL),
    "swin": stock("SwinForImageClassification", _SWIN, classified, LARGE),
    "convnext": stock("ConvNextForImageClassification", _CONVNEXT, classified, SMALL),
    "resnet": stock("ResNetForImageClassification", {**_RESNET, **_LABELS}, classified, SMALL),
    "dinov2": stock("Dinov2ForImageClassification", {**_VIT, "mlp_ratio": 2, **_LABELS}, classified, SMALL),
    "segformer": stock("SegformerForImageClassification", _SEGFORMER, classified, LARGE),
    "detr": stock("DetrForObjectDetection", _DETR, detected, LARGE),
    "wav2vec2": stock("Wav2Vec2ForCTC", _HEARING, transcribed, vectors(160)),
    "hubert": stock("HubertForCTC", _HEARING, transcribed, vectors(160)),
    "clip": stock("CLIPModel", {"text_config": _TEXT, "vision_config": _SEEING, "projection_dim": 8}, matched, SMALL),
    "siglip": stock("SiglipModel", {"text_config": _TEXT, "vision_config": _SEEING}, paired, SMALL),
    "blip_2": stock("Blip2ForConditionalGeneration", _BLIP, captioned, SMALL),
}
