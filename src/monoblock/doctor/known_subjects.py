"""Subjects for models that declare what they are: ours, and those of transformers, which is not imported."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from monoblock.config.model import EmbeddingConfig, Learned, ModelConfig, PatchConfig
from monoblock.config.parts import SEQUENCE_HEADS
from monoblock.doctor.subject import Declared, Kind, Subject, output_tensor, parameter_names, prime_length
from monoblock.errors import InputError
from monoblock.model import Transformer
from monoblock.nn.cache import Cache


class _PlainAttention:
    """A tap that requests the scores, so that attention is computed step by step."""

    def wants(self, name: str) -> bool:
        return name.endswith("scores")

    def __call__(self, name: str, tensor: Tensor) -> Tensor:
        return tensor


class OwnSubject(Subject):
    """A `Transformer` of any family."""

    takes_mask = True
    takes_source_mask = True

    def __init__(self, model: Transformer, *, pad_id: int | None = None, length: int | None = None) -> None:
        super().__init__()
        config = model.config
        self.module = self.model = model
        self.name = f"{config.family} Transformer"
        kinds: dict[str, Kind] = {"decoder-only": "causal", "encoder-only": "bidirectional", "vision": "vision"}
        self.kind = kinds.get(config.family, "encoder-decoder")
        self.pad_id = pad_id
        self.declared = declare(config)
        reader = config.target or config.input if self.kind == "encoder-decoder" else config.input
        if isinstance(reader, EmbeddingConfig):
            self.vocab = reader.vocab
        elif self.kind != "vision":
            raise InputError("the doctor reads tokens or pictures; a model of audio is not examined yet")
        limits = [n for n in (config.context, length, 13 if self.is_large else None) if n is not None]
        blocks = [block for stack in config.stacks.values() for block in stack.layers()]
        sizes = [(b.attention.key_size(config.width), b.attention.heads, b.feedforward.hidden) for b in blocks]
        self.length = prime_length(min(limits, default=None), (config.width, *chain(*sizes)))
        decoder = [] if config.decoder is None else config.decoder.layers()
        self.takes_prefix = any(block.attention.mask == "prefix" for block in decoder)
        self.has_cache = config.decoder is not None and not self.takes_prefix
        self.masks_cache = True
        is_pooled = config.head is not None and config.head.kind in SEQUENCE_HEADS
        self.takes_documents = self.kind in ("causal", "bidirectional") and not is_pooled
        if self.kind == "encoder-decoder":
            assert isinstance(config.input, EmbeddingConfig)
            generator = torch.Generator().manual_seed(7)
            source = torch.randint(1, config.input.vocab, (3, self.length - 2), generator=generator)
            self.source = source.to(model.device)

    def probe(self, rows: int = 3, length: int | None = None, seed: int = 0) -> Tensor:
        patches = self.model.config.input
        if not isinstance(patches, PatchConfig):
            return super().probe(rows, length, seed)
        shape = (rows, patches.channels, patches.image, patches.image)
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.device, self.dtype)

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self._run(ids, mask, None, **options)

    def recorded_logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        return self._run(ids, mask, _PlainAttention(), **options)

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        tap: Any,
        *,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        documents: Tensor | None = None,
        prefix: Tensor | None = None,
        cache: Cache | None = None,
    ) -> Tensor:
        options: dict[str, Any] = {"tap": tap, "cache": cache}
        if self.kind == "encoder-decoder":
            source = self.sources(ids.shape[0]) if source is None else source
            return self.model(source, ids, source_mask=source_mask, target_mask=mask, **options)
        if self.kind == "vision":
            return self.model(ids, tap=tap)
        if self.takes_prefix:
            options["flags"] = prefix
        return self.model(ids, attention_mask=mask, documents=documents, **options)

    def sources(self, rows: int) -> Tensor:
        assert self.source is not None
        return self.source[:1].expand(rows, -1) if rows > len(self.source) else self.source[:rows]

    def cached(
        self, ids: Tensor, state: Any, mask: Tensor | None = None, *, recorded: bool = False
    ) -> tuple[Tensor, Any]:
        cache = self.model.make_cache(ids.shape[0], self.length + 8) if state is None else state
        new = None if mask is None else mask[:, -ids.shape[1] :]
        if new is not None and bool(new.all()):
            new = None
        logits = self._run(ids, new, _PlainAttention() if recorded else None, cache=cache)
        cache.advance(ids.shape[1] if new is None else new.sum(-1))
        return logits, cache


def declare(config: ModelConfig) -> Declared:
    """Return what a configuration says that checks compare with."""
    stack = config.decoder or config.encoder
    assert stack is not None
    blocks = list(stack.layers())
    every = [block for part in config.stacks.values() for block in part.layers()]
    attentions = [a for block in every for a in (block.attention, block.cross) if a is not None]
    positions = getattr(config.target or config.input, "positions", None)
    plain_windows = not any(block.attention.sees_beyond_window for block in blocks)
    return Declared(
        windows=tuple(block.attention.window for block in blocks) if plain_windows else None,
        scales=tuple({a.scale if a.scale is not None else a.key_size(config.width) ** -0.5 for a in attentions}),
        tied=config.tie in ("output", "three_way"),
        positions=None if positions is not None or any(a.positions for a in attentions) else "none",
        context=config.context,
        table_offset=positions.offset if isinstance(positions, Learned) else None,
        post_norm=any(block.norm_place == "post" for block in every),
        num_labels=None if config.head is None else config.head.classes,
        depth=len(blocks),
    )


# Families that are bidirectional encoders, although some have a causal variant (with is_decoder).
ENCODERS = (
    "albert bert bert-generation big_bird camembert canine convbert data2vec-text deberta deberta-v2 distilbert dpr "
    "electra ernie esm flaubert fnet funnel ibert layoutlm layoutlmv2 layoutlmv3 lilt longformer luke markuplm "
    "megatron-bert mobilebert modernbert mpnet mra nezha nomic_bert nystromformer perceiver qdqbert reformer "
    "rembert roberta roberta-prelayernorm roc_bert roformer splinter squeezebert tapas xlm xlm-roberta xlm-roberta- "
    "xl xmod yoso eurobert"
)


def is_transformers_model(model: object) -> bool:
    return isinstance(model, nn.Module) and hasattr(getattr(model, "config", None), "model_type")


class TransformersSubject(Subject):
    takes_mask = True
    inner_padding = False

    def __init__(self, model: Any, *, pad_id: int | None = None, length: int | None = None) -> None:
        super().__init__()
        config = model.config
        if "input_ids" not in parameter_names(model):
            raise InputError(
                f"{type(model).__name__} reads no token ids; the doctor examines models of text from transformers, and "
                "pictures in models of this package"
            )
        self.module = self.model = model
        self.name = type(model).__name__
        self.parameters = parameter_names(model)
        text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
        self.vocab = int(text_config.vocab_size)
        own_pad = getattr(config, "pad_token_id", None)
        self.pad_id = pad_id if pad_id is not None else own_pad
        self.kind = _kind_of_transformers(model)
        self.left_padding = self.kind == "causal"
        limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
        padding_row = _padding_row(model)
        if limit and padding_row is not None:
            limit -= padding_row + 1
        limits = [n for n in (limit, length, 13 if self.is_large else None) if isinstance(n, int) and n > 0]
        sizes = {getattr(config, name, None) for name in ("hidden_size", "d_model", "head_dim", "intermediate_size")}
        self.length = prime_length(min(limits, default=None), tuple(s for s in sizes if isinstance(s, int)))
        self.declared = _declare_transformers(model, limit, padding_row)
        self.generation, self.unset_tokens = _generation(model)
        self.has_cache = self.kind == "causal" and "past_key_values" in self.parameters
        self.masks_cache = True
        if self.kind == "encoder-decoder":
            self.source, self.takes_source_mask = super().probe(length=self.length - 2, seed=7), True
            self.has_cache, self.masks_cache = "past_key_values" in self.parameters, False
        if self.kind == "causal" and self.name.endswith(("ForCausalLM", "LMHeadModel")):
            self.own_loss = lambda logits, labels: model.loss_function(logits, labels, vocab_size=logits.shape[-1])

    def logits(self, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Tensor:
        return output_tensor(self._run(ids, mask, **options))

    def _run(
        self,
        ids: Tensor,
        mask: Tensor | None,
        *,
        source: Tensor | None = None,
        source_mask: Tensor | None = None,
        past: Any = None,
        use_cache: bool = False,
    ) -> Any:
        arguments: dict[str, Any] = {"use_cache": use_cache, "return_dict": True}
        arguments = {name: value for name, value in arguments.items() if name in self.parameters}
        if past is not None:
            arguments["past_key_values"] = past
        if self.source is not None:
            source = self.source[:1].expand(ids.shape[0], -1) if source is None else source
            arguments["attention_mask"] = torch.ones_like(source) if source_mask is None else source_mask.long()
            if mask is not None and not use_cache:
                arguments["decoder_attention_mask"] = mask.long()
            return self.model(input_ids=source, decoder_input_ids=ids, **arguments)
        if mask is not None:
            arguments["attention_mask"] = mask.long()
            if "position_ids" in self.parameters and self.kind == "causal":
                positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
                arguments["position_ids"] = positions[:, -ids.shape[1] :]
        return self.model(input_ids=ids, **arguments)

    def cached(
        self, ids: Tensor, state: Any, mask: Tensor | None = None, *, recorded: bool = False
    ) -> tuple[Tensor, Any]:
        output = self._run(ids, mask, past=state, use_cache=True)
        return output_tensor(output), output.past_key_values


# Families whose weights are initialized for scores without a factor.
UNSCALED_FAMILIES = ("t5", "mt5", "umt5", "gpt_neo", "longt5", "switch_transformers")


def _kind_of_transformers(model: Any) -> Kind:
    """Return the kind that the class and the configuration of a model state, or else its attention modules."""
    config, name = model.config, type(model).__name__
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder" if "decoder_input_ids" in parameter_names(model) else "bidirectional"
    if getattr(config, "is_decoder", False):
        return "causal"
    if "MaskedLM" in name or config.model_type in ENCODERS.split() or name.endswith(("EncoderModel", "Encoder")):
        return "bidirectional"
    if getattr(text, "attn_type", None) == "bi" or getattr(text, "is_causal", None) is False:
        return "bidirectional"  # XLNet; decoders that were made encoders
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        return "bidirectional"  # EmbeddingGemma
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"  # such a model is meant to be causal, whatever its modules say
    said = [getattr(module, "is_causal", None) for module in model.modules()]
    return "bidirectional" if False in said and True not in said else "causal"


def _generation(model: Any) -> tuple[dict[str, Any] | None, dict[str, tuple[int, ...]]]:
    """Return the options of `model.generation_config`, and the ids in it that are defaults of the configuration."""
    config = getattr(model, "generation_config", None)
    if config is None or not hasattr(config, "to_diff_dict"):
        return None, {}
    options = {name: value for name, value in config.to_diff_dict().items() if value is not None}
    options["do_sample"] = bool(getattr(config, "do_sample", False))
    if not options.pop("_from_model_config", False):
        return options, {}
    try:
        defaults = type(model.config)()
    except Exception:  # a configuration without defaults: every id was chosen
        return options, {}
    ids = {name: getattr(defaults, name, None) for name in options if name.endswith("token_id")}
    return options, {name: (value,) for name, value in ids.items() if isinstance(value, int)}


def _padding_row(model: Any) -> int | None:
    """Return the padding row of the table of positions, after which positions begin, as in RoBERTa."""
    for name, table in model.named_modules():
        if isinstance(table, nn.Embedding) and "position" in name and table.padding_idx is not None:
            return int(table.padding_idx)
    return None


def _declare_transformers(model: Any, limit: int | None, padding_row: int | None) -> Declared:
    config = model.config
    return Declared(
        scales=_scales(model),
        tied=bool(getattr(config, "tie_word_embeddings", False)) if model.get_output_embeddings() is not None else None,
        context=limit,
        table_offset=None if padding_row is None else padding_row + 1,
        num_labels=getattr(config, "num_labels", None) if "Classification" in type(model).__name__ else None,
        depth=getattr(config, "num_hidden_layers", None),
    )


def _scales(model: Any) -> tuple[float, ...] | None:
    """Return the factors on the scores that the attention modules of a model state; None if they state none."""
    found, config = set[float](), model.config
    for module in (part for part in model.modules() if "ttention" in type(part).__name__):
        for name in ("scaling", "scale", "softmax_scale", "inv_norm_factor", "scale_attn"):
            value = getattr(module, name, None)
            if isinstance(value, float):
                found |= {value, 1 / value} if name == "scale_attn" else {value}
    if getattr(config, "scale_attn_by_inverse_layer_idx", False):
        return None
    # A factor of 1 is none: it is believed only if the configuration says so.
    found = {value for value in found if not math.isclose(value, 1.0, rel_tol=0.01)}
    is_unscaled = (
        getattr(config, "model_type", "") in UNSCALED_FAMILIES
        or getattr(config, "scale_attn_weights", True) is False
        or any(getattr(config, name, None) == 1 for name in ("attention_multiplier", "query_pre_attn_scalar"))
    )
    return tuple(found | ({1.0} if is_unscaled else set())) or None
