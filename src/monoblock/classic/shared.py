"""What the modules of the documents share: attention, masks given as matrices, and the conversion to monoblock."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from monoblock.config.families import LAYER_NORM, build_stack
from monoblock.config.model import (
    AttentionConfig,
    BlockConfig,
    EmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    Learned,
    ModelConfig,
)
from monoblock.errors import InputError
from monoblock.inference.runners.plain import evaluation_mode
from monoblock.model import Transformer
from monoblock.nn.attention import AttentionContext, attend, attend_fused
from monoblock.nn.block import Block
from monoblock.nn.masks import arange_positions, everything, mask_from_matrix


def scaled_dot_product_attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute softmax(Q K^T / sqrt(d_k)) V, and return it with the attention weights.

    The shapes are Q (…, T, d_k), K (…, S, d_k) and V (…, S, d_v); those of the results are (…, T, d_v) and (…, T, S).
    `mask` broadcasts to the weights and is 0 or False where a query may not see a key.  A query that may see no key
    gives zeros.
    """
    batch, recorded = Q.shape[:-2], dict[str, Tensor]()
    shape = (*Q.shape[:-1], K.shape[-2])
    allowed = None if mask is None else (mask != 0).broadcast_to(shape).reshape(-1, 1, *shape[-2:])
    q, k, v = (tensor.reshape(-1, 1, *tensor.shape[-2:]) for tensor in (Q, K, V))
    output = attend(q, k, v, allowed, tap=recorded.setdefault)
    return output.reshape(*batch, *output.shape[-2:]), recorded["weights"].reshape(shape)


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the output of `scaled_dot_product_attention` for heads (B, H, T, d_k) without storing the weights."""
    if mask is not None:
        resolved = mask_from_matrix(mask != 0)
    else:
        resolved = everything.resolve(*(arange_positions(x.shape[2], device=x.device) for x in (q, k)))
    return attend_fused(q, k, v, AttentionContext(resolved))


# -- conversion -------------------------------------------------------------------------------------------------------


class Listing(nn.Module):
    """A class of a document: it has the modules, weights and methods of the listing under the document's names.

    `NAMES` maps a weight or a submodule to its name in the module of monoblock that computes the same.  A weight that
    holds several of ours, one after the other along its first axis, maps to their names separated by spaces.
    """

    NAMES: ClassVar[Mapping[str, str]]
    config: Any  # of the module of monoblock that computes the same

    def counterpart(self) -> nn.Module:
        """Build the module of monoblock that computes the same, of the same sizes: a block, if nothing else is said."""
        return Block(self.config)

    def to_monoblock(self) -> Any:
        """Return the module of monoblock that computes the same; it shares these weights."""
        with torch.device("meta"):
            module = self.counterpart()
        ours, theirs = (sum(weight.numel() for weight in one.parameters()) for one in (module, self))
        if ours > theirs and len(list(self.named_parameters(remove_duplicate=False))) > len(list(self.parameters())):
            raise InputError(
                f"modules of this {type(self).__name__} share weights: it has {theirs:,} parameters, and its "
                f"counterpart in monoblock would have {ours:,}; write the sharing in the configuration: "
                "mb.Repeat(…, tied=True)"
            )
        state, expected = monoblock_weights(self), module.state_dict().keys()
        shared = {tensor.data_ptr() for name, tensor in state.items() if name in expected}
        tied = {name for name in state.keys() - expected if state[name].data_ptr() in shared}
        try:
            module.load_state_dict({name: state[name] for name in state.keys() - tied}, assign=True)
        except RuntimeError as error:
            raise InputError(
                f"this {type(self).__name__} has other weights than the document's, so it has no counterpart in "
                f"monoblock: {str(error).splitlines()[1].strip():.160}"
            ) from None
        return module.train(self.training)


def monoblock_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return the weights of a module, without its buffers; those of a `Listing` have the names of monoblock."""
    state = {name: weight.detach() for name, weight in module.named_parameters(recurse=False)}
    for child_name, child in module.named_children():
        state |= {f"{child_name}.{name}": weight for name, weight in monoblock_weights(child).items()}
    renamed: dict[str, Tensor] = {}
    names = module.NAMES if isinstance(module, Listing) else {}
    for name, weight in state.items():
        theirs = max((rule for rule in names if f"{name}.".startswith(f"{rule}.")), key=len, default="")
        ours = [f"{our_name}{name.removeprefix(theirs)}" for our_name in names[theirs].split()] if theirs else [name]
        renamed.update(zip(ours, weight.chunk(len(ours)) if len(ours) > 1 else [weight], strict=True))
    return renamed


def block_config(
    width: int,
    heads: int,
    hidden: int,
    activation: Literal["relu", "gelu"],
    *,
    bias: str = "",
    dropout: float = 0.0,
    norm_place: Literal["pre", "post"] = "pre",
) -> BlockConfig:
    """Return the configuration of a block of a document; `bias` is that of its attention."""
    return BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, bias=bias, mask="full"),
        feedforward=FeedForwardConfig(hidden=hidden, activation=activation, dropout=dropout),
        norm_place=norm_place,
        dropout=dropout,
    )


def gpt_config(block: BlockConfig, depth: int, *, vocab: int, context: int) -> ModelConfig:
    """Return the configuration of a decoder of blocks with causal attention, learned positions and a final norm."""
    causal = replace(block, attention=replace(block.attention, mask="causal"))
    return ModelConfig(
        input=EmbeddingConfig(vocab=vocab, context=context, positions=Learned()),
        decoder=build_stack(depth, causal, norm=LAYER_NORM),
        head=HeadConfig(kind="language_model"),
    )


class ListingModel(Listing):
    """A model of a document; `to_monoblock()` is a `monoblock.Transformer`, for all that is not here."""

    untied_config: ModelConfig  # of the sizes that the constructor was given

    def to_monoblock(self) -> Transformer:
        """Return a `monoblock.Transformer` that shares these weights, to search, stream, inspect, convert or count it.

        Weights that are tied here are tied there.  Its decoder is always causal, so it needs no mask.
        """
        model: Transformer = super().to_monoblock()
        if model.device.type != "meta":
            self._check_logits(model)
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            hint = "to_monoblock() returns a monoblock.Transformer with the same weights"
            raise AttributeError(f"{error}; {hint}", name=name, obj=self) from None

    def counterpart(self) -> Transformer:
        return Transformer(self.model_config())

    def model_config(self) -> ModelConfig:
        """Return the configuration of the `monoblock.Transformer` that computes the same."""
        return self.untied_config

    def causal_logits(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T), none of which sees a later one."""
        logits: Tensor = self(ids)
        return logits

    @torch.no_grad()
    def _check_logits(self, model: Transformer) -> None:
        """Raise InputError if a `monoblock.Transformer` does not compute the logits of this model for a few tokens."""
        config = model.config
        vocab = min(part.vocab for part in (config.input, config.target) if isinstance(part, EmbeddingConfig))
        ids = torch.arange(min(5, config.context or 5), device=model.device)[None] % vocab
        with evaluation_mode(self), evaluation_mode(model), torch.autocast(model.device.type, enabled=False):
            theirs, ours = self.causal_logits(ids), model(ids, ids if config.target is not None else None)
        tolerance = 1e-3 if theirs.dtype in (torch.float32, torch.float64) else 5e-2
        if not torch.allclose(theirs, ours, rtol=0, atol=tolerance * float(theirs.abs().max()), equal_nan=True):
            name = type(self).__name__
            raise InputError(
                f"this {name} was changed and no longer computes what the document's {name} computes, so it has no "
                "counterpart in monoblock; write the change as a configuration or a block of monoblock (docs/adding.md)"
            )

    def generate(self, ids: Tensor, max_new_tokens: int = 50, **options: Any) -> Tensor:
        """Return the prompts with `max_new_tokens` new tokens; the prompts of an encoder-decoder are the sources.

        The keys and values of all tokens are cached, so that each new token costs one position.  `options` are those of
        `monoblock.Transformer.generate`, such as temperature, seed, top_k, num_beams or eos_token_id.
        """
        model = self.to_monoblock()
        context, mask = model.config.context, options.get("attention_mask")
        is_checked = isinstance(max_new_tokens, int) and isinstance(ids, Tensor) and ids.numel() > 0
        if context is not None and options.get("truncation") is None and is_checked:
            prompt = int((torch.ones_like(ids) if mask is None else mask).sum(-1).max())
            room = context - prompt
            if 0 < room < max_new_tokens:
                raise InputError(
                    f"a prompt of {prompt} tokens and max_new_tokens={max_new_tokens} exceed the {context} positions "
                    f"of the model; write max_new_tokens={room}"
                )
        tokens: Tensor = model.generate(ids, max_new_tokens=max_new_tokens, **options)
        return tokens

    def save_pretrained(self, folder: str | Path) -> None:
        """Write the model to a folder, which `monoblock.Transformer.from_pretrained` loads."""
        self.to_monoblock().save_pretrained(folder)
