"""Write a model as a folder, with what lay beside the weights that it was loaded from.

These are the labels, the tokenizer, the settings of generation, the chat template, the settings of image and audio
inputs, the fields of a Hugging Face config.json that do not change what is computed (its family, token ids, dropout …),
and the dtype of the weights.  A loaded model knows the path of its files (`model.loaded_from`); a model that was built
has none of these.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import AnyConfig, ModelConfig
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.interop.model_folder import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    LABELS_FILE,
    RECIPE_FILE,
    ModelFolder,
    format_config,
    parse_dtype,
)
from monoblock.interop.weights import INDEX_FILE, MAX_SHARD_SIZE, WEIGHTS_FILE, same_names, save_weights
from monoblock.quantization.convert import merge_adapters
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import MB, read_bytes, safe_folder, safe_join, write_atomically

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "source.spm",
    "target.spm",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "bpe.codes",
    "normalizer.json",
)
OTHER_FILES = (
    GENERATION_CONFIG_FILE,
    "preprocessor_config.json",
    "processor_config.json",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
)
POOLING_FOLDER = "1_Pooling"  # where sentence-transformers stores how token vectors are pooled
MAX_FILE_BYTES = 64 * MB
# Fields with token ids that Hugging Face folders without a generation_config.json keep in config.json.
TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
START_FIELD = "decoder_start_token_id"
TOKEN_ID_FIELDS_OF_FAMILY = {
    "encoder-only": ("cls_token_id", "sep_token_id"),
    "encoder-decoder": (START_FIELD, "forced_bos_token_id", "forced_eos_token_id"),
}


def save_model(
    model: Any,
    folder: str | Path,
    *,
    dtype: torch.dtype | str | None = None,
    companions: Companions | None = None,
    max_shard_size: int = MAX_SHARD_SIZE,
) -> None:
    """Write config.json and the weights of a model, divided into files of at most `max_shard_size` bytes.

    LoRA adapters are written merged into the weights.

    dtype: the dtype of the weights; by default that of the files the model was loaded from if it holds the weights
        exactly, else that of the model.
    companions: what else is written; by default what lies beside the weights that the model was loaded from.
    """
    companions = read_companions(model.loaded_from) if companions is None else companions
    folder, model = Path(folder), merge_adapters(model)
    state = state_to_save(model)
    quantized = isinstance(model.config, ModelConfig) and model.config.quantize is not None
    if quantized and dtype is not None:
        raise ConfigError(
            f"dtype={dtype} is for floating-point weights, but this model is quantized; leave it out, or write the "
            "format hf, which is dequantized"
        )
    stored = None if quantized else parse_dtype(dtype) if dtype else choose_dtype(state, companions.dtype)
    with writing(folder):
        text = format_config(model.config, companions.fingerprint, companions.fields)
        save_weights(folder, state, same_names(state), stored, max_shard_size)
        companions.write(folder, model.config, published=False)
        write_atomically(folder / CONFIG_FILE, text)


def state_to_save(model: torch.nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    if any(tensor.is_meta for tensor in state.values()):
        raise InputError("a model on the meta device has no weights to save; build it on a real device first")
    return state


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder of a model; turn an OSError into a FileError that names the folder."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise FileError(f"the model cannot be written to {folder}: {error.strerror or error}") from None


# -- what lies beside the weights --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Companions:
    """What lies beside the weights of a stored model; empty for a model that was built."""

    folder: ModelFolder | None = None  # that has the tokenizer
    files: Mapping[str, bytes] = field(default_factory=dict)  # to be copied, by name
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a Hugging Face config.json, with its model_type
    labels: Sequence[str] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    dtype: torch.dtype | None = None  # of most of the stored weights; None if they are not safetensors

    @property
    def model_type(self) -> str | None:
        return self.fields.get("model_type")

    @property
    def is_run(self) -> bool:
        return RECIPE_FILE in self.files

    def without_tokenizer(self) -> Companions:
        files = {name: raw for name, raw in self.files.items() if not is_tokenizer_file(name)}
        return replace(self, folder=None, files=files)

    def load_tokenizer(self, config: AnyConfig | None = None) -> Tokenizer | None:
        """Return the tokenizer, if there is one; with the configuration of the model, as other programs need it."""
        if self.folder is None or not self.folder.has_tokenizer:
            return None
        tokenizer = self.folder.tokenizer
        if not self.is_run or not isinstance(config, ModelConfig) or config.head is None:
            return tokenizer
        writes_text = config.head.kind == "language_model"
        return with_prompt_template(tokenizer, config.family) if writes_text else tokenizer

    def special_token_ids(self, family: str) -> dict[str, Any]:
        """Return the fields of config.json with token ids: those of the tokenizer and of generation_config.json."""
        names = (*TOKEN_ID_FIELDS, *TOKEN_ID_FIELDS_OF_FAMILY.get(family, ()))
        tokenizer = None if self.fields else self.load_tokenizer()
        own = {} if tokenizer is None else {n: getattr(tokenizer, n.replace("_token_id", "_id"), None) for n in names}
        ids = own | {name: self.fields.get(name, own.get(name)) for name in names}
        ids |= {name: self.generation[name] for name in names if self.generation.get(name) is not None}
        return {name: id_ for name, id_ in ids.items() if id_ is not None}

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer; None if there is none, or if it cannot be read."""
        if self.folder is None or self.folder.fingerprint is not None:
            return None if self.folder is None else self.folder.fingerprint
        try:
            tokenizer = self.load_tokenizer()
        except FileError:
            return None
        return None if tokenizer is None else tokenizer.fingerprint

    def labels_for(self, config: AnyConfig) -> Sequence[str]:
        """Return the labels, if they are those of the model's head."""
        head = config.head if isinstance(config, ModelConfig) else None
        return self.labels if head is not None and head.classes == len(self.labels) else ()

    def write(self, folder: Path, config: AnyConfig, *, published: bool) -> None:
        """Write the files beside the weights of a model; `published` is for transformers, which reads no recipe."""
        files = dict(self.files)
        if published:
            files.pop(RECIPE_FILE, None)
        in_fields = published and self.fields  # where transformers reads the ids, too
        if self.generation and GENERATION_CONFIG_FILE not in files and not in_fields:
            files[GENERATION_CONFIG_FILE] = (json.dumps(dict(self.generation), indent=2) + "\n").encode()
        rewritten = self.folder is not None and (self.folder.is_gguf or (published and self.is_run))
        tokenizer = self.load_tokenizer(config if published else None) if rewritten else None
        if tokenizer is not None:
            files = {name: raw for name, raw in files.items() if not is_tokenizer_file(name)}
            tokenizer.save_pretrained(folder)
        labels = () if published else self.labels_for(config)
        if labels:
            files[LABELS_FILE] = (json.dumps(list(labels), indent=2, ensure_ascii=False) + "\n").encode()
        for name, raw in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            write_atomically(folder / name, raw)


def read_companions(source: Path | ModelFolder | None) -> Companions:
    """Read what lies beside the weights of a model folder or in a GGUF file; nothing for None."""
    if source is None:
        return Companions()
    folder = source if isinstance(source, ModelFolder) else ModelFolder(source)
    if folder.is_gguf:
        return Companions(folder, generation=folder.generation_config)
    if not folder.has(CONFIG_FILE):
        warnings.warn(
            f"{folder.path}, where this model was loaded from, is gone; its labels, tokenizer and settings are not "
            "written",
            stacklevel=3,
        )
        return Companions()
    fields = folder.published_fields
    names = [*(file.name for file in folder.path.glob("*.tiktoken")), *TOKENIZER_FILES, *OTHER_FILES]
    names += [] if folder.is_published else [RECIPE_FILE]
    files = {name: folder.read_bytes(name, MAX_FILE_BYTES) for name in names if folder.has(name)}
    if folder.has(POOLING_FOLDER):
        pooling = safe_join(safe_folder(folder.path, POOLING_FOLDER), CONFIG_FILE)
        files[f"{POOLING_FOLDER}/{CONFIG_FILE}"] = read_bytes(pooling, MAX_FILE_BYTES)
    generation = folder.generation_config
    if not folder.has(GENERATION_CONFIG_FILE):
        ids = (*TOKEN_ID_FIELDS, *(name for names in TOKEN_ID_FIELDS_OF_FAMILY.values() for name in names))
        generation = {name: fields[name] for name in ids if fields.get(name) is not None}
    stored = folder.has(WEIGHTS_FILE) or folder.has(INDEX_FILE)
    return Companions(folder, files, fields, folder.labels, generation, _stored_dtype(folder) if stored else None)


def is_tokenizer_file(name: str) -> bool:
    return name in TOKENIZER_FILES or name.endswith(".tiktoken")


def _stored_dtype(folder: ModelFolder) -> torch.dtype | None:
    sizes: Counter[torch.dtype] = Counter()
    for entry in folder.weights.entries.values():
        if entry.dtype.is_floating_point:
            sizes[entry.dtype] += torch.Size(entry.shape).numel()
    return sizes.most_common(1)[0][0] if sizes else None


def with_prompt_template(tokenizer: Tokenizer, family: str) -> Tokenizer:
    """Return the tokenizer of a run for other programs, which add the special tokens of its template to every text.

    Our runs encode a prompt without special tokens and a source with the end token; the template is for whole texts.
    """
    content: Any = tokenizer.content()
    data, config = content
    processor = data.get("post_processor")
    if family not in ("decoder-only", "encoder-decoder") or not processor or processor["type"] != "TemplateProcessing":
        return tokenizer
    eos = config.get("eos_token") if family == "encoder-decoder" else None
    kept = {token: value for token, value in processor["special_tokens"].items() if token == eos}
    end = [{"SpecialToken": {"id": token, "type_id": 0}} for token in kept]
    first, second = ([{"Sequence": {"id": name, "type_id": 0}}, *end] for name in "AB")
    template = {**processor, "single": first, "pair": [*first, *second], "special_tokens": kept}
    return Tokenizer.from_content({**data, "post_processor": template if kept else None}, config, "the tokenizer")


# -- dtype -------------------------------------------------------------------------------------------------------------


def choose_dtype(tensors: Mapping[str, Tensor], stored: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which a model was stored, if it is smaller and holds every weight exactly; else None."""
    floats = [tensor for tensor in tensors.values() if tensor.is_floating_point()]
    if stored is None or not floats or any(tensor.dtype.itemsize <= stored.itemsize for tensor in floats):
        return None
    return stored if all(torch.equal(tensor.to(stored).to(tensor.dtype), tensor) for tensor in floats) else None
