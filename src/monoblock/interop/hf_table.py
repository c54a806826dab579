"""DATA: the published families by their model_type, in the order in which an export asks them."""

from __future__ import annotations

from monoblock.interop.hf_decoders import DECODERS
from monoblock.interop.hf_encoders import ENCODERS
from monoblock.interop.hf_family import Family
from monoblock.interop.hf_senses import SENSES
from monoblock.interop.hf_seq2seq import SEQ2SEQ

FAMILIES: dict[str, Family] = {family.kind: family for family in (*DECODERS, *ENCODERS, *SEQ2SEQ, *SENSES)}
