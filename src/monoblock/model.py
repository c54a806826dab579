"""The Transformer as users see it: the core of nn/transformer.py, with generation of text and folders.

The methods import what they need, so that building and running a model does not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, Self, Unpack, overload

import torch
from torch import Tensor

from monoblock.nn import transformer
from monoblock.nn.generation_options import GeneratedTokens, ModelOptions, TokenRows


class Transformer(transformer.Transformer):
    """A Transformer of any family; a forward pass depends on its arguments and the weights only.

    model(ids, attention_mask=None)                                      one stack
    model(source, target, source_mask=None, target_mask=None)            encoder-decoder
    model(pixels)                                                        vision
    """

    # -- generation ------------------------------------------------------------------------------------------

    @overload
    def generate(
        self, ids: TokenRows, *, return_scores: Literal[False] = False, **options: Unpack[ModelOptions]
    ) -> Tensor: ...
    @overload
    def generate(
        self, ids: TokenRows, *, return_scores: Literal[True], **options: Unpack[ModelOptions]
    ) -> GeneratedTokens: ...
    def generate(
        self, ids: TokenRows, *, return_scores: bool = False, **options: Unpack[ModelOptions]
    ) -> Tensor | GeneratedTokens:
        """Return the prompts with their continuations (B · num_return_sequences, T + new tokens); greedy by default.

        ids: (B, T), or lists of token ids of different lengths.  An encoder-decoder reads them as the source and
        returns the target, which begins with `decoder_start_token_id`, else the padding token, else 0.  The modules of
        the model run; `mb.optimize(model)` is a fast copy that generates the same.  `options`: max_new_tokens (50 by
        default), temperature, top_k, top_p, num_beams, num_return_sequences, eos_token_id, attention_mask, seed and the
        others of `ModelOptions`.  With return_scores, the result also has the log-probability of each new token.
        """
        from monoblock.inference.generate import GenerateCall

        return GenerateCall(self, ids, False, **options).run(return_scores=return_scores)

    def stream(self, ids: TokenRows, **options: Unpack[ModelOptions]) -> Iterator[Tensor]:
        """Yield the new tokens (B,) after each step; `options` are those of `generate`."""
        from monoblock.inference.generate import GenerateCall

        return GenerateCall(self, ids, True, **options).stream()

    # -- folders --------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        folder: str | Path,
        *,
        dtype: torch.dtype | str = torch.float32,
        device: str = "cpu",
        ignore_fields: Sequence[str] = (),
    ) -> Self:
        """Load a model from a folder with config.json and model.safetensors.

        `ignore_fields` are fields of a Hugging Face or GGUF file that have no effect, although they are not known here.
        """
        from monoblock.interop.model_folder import load_model

        return load_model(cls, folder, dtype=dtype, device=device, ignore_fields=ignore_fields)

    def save_pretrained(
        self, folder: str | Path, *, dtype: torch.dtype | str | None = None, max_shard_size: int = 5 * 10**9
    ) -> None:
        """Write config.json and model.safetensors to a folder, split into files of at most `max_shard_size` bytes.

        A model that was loaded is written with the tokenizer, the labels and the settings of generation that lay beside
        it.  `dtype` rounds the weights; by default they have the dtype of the files they were loaded from if it holds
        them exactly, else that of the model.  LoRA adapters are written merged into the weights; `mb.save_adapter`
        writes the adapters alone.
        """
        from monoblock.interop.save import save_model

        save_model(self, folder, dtype=dtype, max_shard_size=max_shard_size)
