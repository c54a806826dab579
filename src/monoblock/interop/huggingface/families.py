"""DATA: the Hugging Face families by model_type, in the order in which an export tries them."""

from __future__ import annotations

from monoblock.interop.huggingface.decoders import DECODERS
from monoblock.interop.huggingface.encoder_decoders import SEQ2SEQ
from monoblock.interop.huggingface.encoders import ENCODERS
from monoblock.interop.huggingface.family import Family
from monoblock.interop.huggingface.vision_audio import VISION_AUDIO

# Families that are asked for, and why the block cannot compute them.
DISENTANGLED = "each head adds scores between contents and relative positions, which the block does not have"
LATENT = "its attention keeps a latent vector for keys and values (MLA), which the block does not have"
UNSUPPORTED_FAMILIES = {
    "deberta": DISENTANGLED,
    "deberta-v2": DISENTANGLED,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "kimi_k2": LATENT,
    "minicpm3": LATENT,
}
FAMILIES: dict[str, Family] = {family.model_type: family for family in (*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION_AUDIO)}
