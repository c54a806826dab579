"""Names that are in accounting/lstm.py."""

from monoblock.accounting.lstm import (
    matching_config as matching_config,
    parameter_count as parameter_count,
)
