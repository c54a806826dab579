"""A model's own quantized copy as its draft: on a CPU it is several times faster and almost always right.

    model.generate(ids, draft="8-bit")

The model checks the proposals in one pass that reads its weights once, so the text is the one it would have generated
alone.  The copy takes a quarter of the weights' memory (an eighth in 4 bits) and lives as long as the model.
"""

from __future__ import annotations

import torch

from monoblock.decoding.backends.cpu_step import MAX_TOKENS
from monoblock.decoding.backends.prepared_model import prepare
from monoblock.decoding.speculative import DraftModel
from monoblock.errors import InputError
from monoblock.kernels.cpu.library import load_kernels
from monoblock.nn.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import quantize

BITS = {"8-bit": 8, "4-bit": 4}
# The CPU operator takes MAX_TOKENS at once, one of which is the newest token; several rows share them.
DRAFT_LENGTH = MAX_TOKENS - 1


def make_self_draft(model: Transformer | Recurrent, kind: str) -> DraftModel | None:
    """Build the draft of `kind` 8-bit or 4-bit; None where it is no faster (no compiler, or no inference copy)."""
    if isinstance(model, Recurrent):
        raise InputError(f"an LSTM cannot drop rejected tokens, as a draft requires; leave out draft={kind!r}")
    if model.config.quantize is not None:
        bits = model.config.quantize.bits
        raise InputError(f"this model has {bits} bits already, so a copy would be no faster; leave out draft={kind!r}")
    if model.device.type != "cpu":
        raise InputError(f"draft={kind!r} is faster on a CPU only, and the model is on {model.device}; leave it out")
    prepared = prepare(model) if load_kernels().is_ready else None
    if prepared is None:
        return None
    versions = tuple(0 if weight.is_inference() else weight._version for weight in model.parameters())
    stored = prepared.drafts.get(kind)
    if stored is None or stored[0] != versions:
        with torch.inference_mode(False), torch.no_grad():
            stored = prepared.drafts[kind] = versions, quantize(model, bits=BITS[kind]).eval()
    return DraftModel(stored[1], DRAFT_LENGTH, max_checked=MAX_TOKENS)
