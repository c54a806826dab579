"""Names that are in nn/packed_documents.py."""

from monoblock.nn.packed_documents import (
    attend_varlen as attend_varlen,
)
