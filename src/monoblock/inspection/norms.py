"""Names that are in inspection/residual_stream.py."""

from monoblock.inspection.residual_stream import (
    StackNorms as StackNorms,
    describe_text_loss as describe_text_loss,
    gradient_norms as gradient_norms,
    residual_norms as residual_norms,
)
