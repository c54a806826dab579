"""Names that are in nn/packed_documents.py."""

from monoblock.nn.packed_documents import (
    PackedDocuments as PackedDocuments,
)
