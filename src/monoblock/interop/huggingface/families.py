"""DATA: the Hugging Face families by model_type, in the order in which an export tries them."""

from __future__ import annotations

from monoblock.interop.huggingface.decoders import DECODERS
from monoblock.interop.huggingface.encoder_decoders import SEQ2SEQ
from monoblock.interop.huggingface.encoders import ENCODERS
from monoblock.interop.huggingface.family import Family
from monoblock.interop.huggingface.vision_audio import VISION_AUDIO

FAMILIES: dict[str, Family] = {family.model_type: family for family in (*DECODERS, *ENCODERS, *SEQ2SEQ, *VISION_AUDIO)}
