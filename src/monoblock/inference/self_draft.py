"""Speculative decoding with a quantized copy of the model as its draft model.

    mb.optimize(model).generate(ids, draft="8-bit")

On a CPU the copy is several times faster than the model, and almost all tokens that it proposes are accepted.  The
model checks them in one pass, so the text is the one that it would generate alone.  The copy takes a quarter of the
memory of the weights (an eighth with 4 bits) and is freed with the optimized model.
"""

from __future__ import annotations

from monoblock.errors import InputError
from monoblock.inference.prepared_model import GenerativeModel
from monoblock.inference.speculative import DraftModel
from monoblock.kernels.cpu.library import load_kernels
from monoblock.nn.transformer import Transformer

MAX_TOKENS = 8  # that the CPU operator checks in one pass; one of them is the newest token, not a proposal


def make_self_draft(model: GenerativeModel, kind: str) -> DraftModel | None:
    """Return the quantized copy of a model as a draft model; `kind` is "8-bit" or "4-bit".

    Return None if it would be no faster, because there is no C++ compiler.
    """
    if isinstance(model, Transformer):
        raise InputError(f"draft={kind!r} is a copy that mb.optimize makes; write mb.optimize(model).generate(…)")
    if model.bits is not None:
        raise InputError(
            f"this model is quantized to {model.bits} bits already, so a quantized copy would be no faster; "
            f"leave out draft={kind!r}"
        )
    if model.device.type != "cpu":
        raise InputError(
            f"draft={kind!r} makes decoding faster only on a CPU, but the model is on {model.device}; leave it out"
        )
    if not load_kernels().is_ready:
        return None
    return DraftModel(model.draft(kind), MAX_TOKENS - 1, max_checked=MAX_TOKENS)
