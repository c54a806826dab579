"""Speculative decoding with a quantized copy of the model as its draft model.

    model.generate(ids, draft="8-bit")

On a CPU the copy is several times faster than the model, and almost all tokens that it proposes are accepted.  The
model checks them in one pass, so the text is the one that it would generate alone.  The copy takes a quarter of the
memory of the weights (an eighth with 4 bits) and is freed with the model.
"""

from __future__ import annotations

from monoblock.decoding.backends.cpu_step import MAX_TOKENS
from monoblock.decoding.backends.prepared_model import prepare
from monoblock.decoding.draft_model import DraftModel
from monoblock.errors import InputError
from monoblock.kernels.cpu.library import load_kernels
from monoblock.nn.recurrent.lstm import Recurrent
from monoblock.nn.transformer import Transformer
from monoblock.quantization.convert import quantize

BITS = {"8-bit": 8, "4-bit": 4}
# The CPU operator checks MAX_TOKENS tokens in one pass, and one of them is the newest token, not a proposal.
DRAFT_LENGTH = MAX_TOKENS - 1


def make_self_draft(model: Transformer | Recurrent, kind: str) -> DraftModel | None:
    """Return the quantized copy of a model as a draft model; `kind` is "8-bit" or "4-bit".

    Return None if it would be no faster: there is no C++ compiler, or the model cannot have an inference copy.
    """
    if isinstance(model, Recurrent):
        raise InputError(f"an LSTM cannot take back rejected tokens, as a draft requires; leave out draft={kind!r}")
    if model.config.quantize is not None:
        bits = model.config.quantize.bits
        raise InputError(
            f"this model is quantized to {bits} bits already, so a quantized copy would be no faster; "
            f"leave out draft={kind!r}"
        )
    if model.device.type != "cpu":
        raise InputError(
            f"draft={kind!r} makes decoding faster only on a CPU, but the model is on {model.device}; leave it out"
        )
    prepared = prepare(model) if load_kernels().is_ready else None
    if prepared is None:
        return None
    versions = tuple(0 if weight.is_inference() else weight._version for weight in model.parameters())
    draft = prepared.get_draft(kind, versions, lambda: quantize(model, bits=BITS[kind]).eval())
    return DraftModel(draft, DRAFT_LENGTH, max_checked=MAX_TOKENS)
