"""Names that are in inspection/residual_stream.py."""

from monoblock.inspection.residual_stream import (
    logit_lens as logit_lens,
)
