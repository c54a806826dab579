"""Names that are in nn/generation_options.py."""

from monoblock.nn.generation_options import (
    GeneratedTokens as GeneratedTokens,
    GenerationOptions as GenerationOptions,
    ModelOptions as ModelOptions,
    PipelineOptions as PipelineOptions,
    TokenRows as TokenRows,
)
