"""Names that are in accounting/training_plan.py."""

from monoblock.accounting.training_plan import (
    all_gather_bytes as all_gather_bytes,
    all_reduce_bytes as all_reduce_bytes,
)
