"""What a stored model has beside its weights, read so that it is written again with the model.

The labels, the tokenizer, the settings of generation, the chat template, the settings of image and audio inputs, the
fields of a Hugging Face config.json that do not change what is computed (its family, token ids, dropout …), and the
dtype of the weights.  A loaded model knows the path of its files (`model.loaded_from`); a model that was built has none
of these.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from monoblock.config.model import AnyConfig, ModelConfig
from monoblock.errors import FileError
from monoblock.interop.config_file import CONFIG_FILE, FORMAT_NAME
from monoblock.interop.huggingface.load import find_family
from monoblock.interop.labels import LABELS_FILE, read_labels
from monoblock.interop.weights import INDEX_FILE, RUN_RECIPE_FILE, WEIGHTS_FILE, open_weights
from monoblock.tokenizers.formats.gguf import has_gguf_tokenizer
from monoblock.tokenizers.formats.vocabulary_files import find_vocabulary
from monoblock.tokenizers.tokenizer import Tokenizer
from monoblock.untrusted_files import MB, has_file, read_bytes, read_json, safe_folder, safe_join, write_atomically

GENERATION_CONFIG_FILE = "generation_config.json"
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
# Fields of our config.json: the fingerprint of the tokenizer, and those of the Hugging Face file that was read.
FINGERPRINT_KEY, HUGGINGFACE_KEY = "tokenizer", "huggingface"
# Fields of a Hugging Face config.json that are written anew, or name code or files elsewhere.
REPLACED_FIELDS = ("auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version")
# Fields with token ids that Hugging Face folders without a generation_config.json keep in config.json.
TOKEN_ID_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id")
START_FIELD = "decoder_start_token_id"
TOKEN_ID_FIELDS_OF_FAMILY = {
    "encoder-only": ("cls_token_id", "sep_token_id"),
    "encoder-decoder": (START_FIELD, "forced_bos_token_id", "forced_eos_token_id"),
}


@dataclass(frozen=True)
class Companions:
    """What lies beside the weights of a stored model; empty for a model that was built."""

    path: Path | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)  # to be copied, by name
    fields: Mapping[str, Any] = field(default_factory=dict)  # of a Hugging Face config.json, with its model_type
    labels: Sequence[str] = ()
    generation: Mapping[str, Any] = field(default_factory=dict)  # generation_config.json
    dtype: torch.dtype | None = None  # of most of the stored weights; None if they are not safetensors
    stored_fingerprint: str | None = None  # of the tokenizer, in our config.json

    @property
    def model_type(self) -> str | None:
        return self.fields.get("model_type")

    @property
    def is_run(self) -> bool:
        return RUN_RECIPE_FILE in self.files

    def without_tokenizer(self) -> Companions:
        files = {name: raw for name, raw in self.files.items() if not is_tokenizer_file(name)}
        return replace(self, path=None, files=files, stored_fingerprint=None)

    def load_tokenizer(self, config: AnyConfig | None = None) -> Tokenizer | None:
        """Load the tokenizer, if there is one; with the configuration of the model, as other programs need it."""
        if self.path is None or not has_tokenizer(self.path):
            return None
        tokenizer = Tokenizer.from_pretrained(self.path)
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

    def own_fields(self) -> dict[str, Any]:
        """Return the fields of our config.json beside the configuration of the model."""
        fields: dict[str, Any] = {HUGGINGFACE_KEY: dict(self.fields)} if self.fields else {}
        return fields if self.fingerprint is None else fields | {FINGERPRINT_KEY: self.fingerprint}

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer; None if there is none, or if it cannot be read."""
        if self.stored_fingerprint is not None:
            return self.stored_fingerprint
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
            files.pop(RUN_RECIPE_FILE, None)
        in_fields = published and self.fields  # where transformers reads the ids, too
        if self.generation and GENERATION_CONFIG_FILE not in files and not in_fields:
            files[GENERATION_CONFIG_FILE] = (json.dumps(dict(self.generation), indent=2) + "\n").encode()
        rewritten = self.path is not None and (self.path.is_file() or (published and self.is_run))
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


def read_companions(path: Path | None) -> Companions:
    """Read what lies beside the weights of a model folder or in a GGUF file; nothing for None."""
    if path is None:
        return Companions()
    if path.is_file():
        from monoblock.interop.gguf.sampling import read_sampling

        return Companions(path, generation=read_sampling(path))
    if not path.is_dir() or not has_file(path, CONFIG_FILE):
        warnings.warn(
            f"{path}, where this model was loaded from, is gone; its labels, tokenizer and settings are not written",
            stacklevel=3,
        )
        return Companions()
    data, fields = read_json(safe_join(path, CONFIG_FILE)), read_published_fields(path)
    ours = data.get("format") == FORMAT_NAME
    names = [*(file.name for file in path.glob("*.tiktoken")), *TOKENIZER_FILES, *OTHER_FILES]
    names += [RUN_RECIPE_FILE] if ours else []
    files = {name: read_bytes(safe_join(path, name), MAX_FILE_BYTES) for name in names if has_file(path, name)}
    if has_file(path, POOLING_FOLDER):
        pooling = safe_join(safe_folder(path, POOLING_FOLDER), CONFIG_FILE)
        files[f"{POOLING_FOLDER}/{CONFIG_FILE}"] = read_bytes(pooling, MAX_FILE_BYTES)
    if GENERATION_CONFIG_FILE in files:
        generation = read_json(safe_join(path, GENERATION_CONFIG_FILE))
    else:
        ids = (*TOKEN_ID_FIELDS, *(name for names in TOKEN_ID_FIELDS_OF_FAMILY.values() for name in names))
        generation = {name: fields[name] for name in ids if fields.get(name) is not None}
    stored = any(has_file(path, name) for name in (WEIGHTS_FILE, INDEX_FILE))
    dtype, fingerprint = _stored_dtype(path) if stored else None, data.get(FINGERPRINT_KEY) if ours else None
    return Companions(path, files, fields, read_labels(path), generation, dtype, fingerprint)


def has_tokenizer(path: Path) -> bool:
    """Return whether a model folder or GGUF file has a tokenizer."""
    if path.is_file():
        return has_gguf_tokenizer(path)
    return has_file(path, "tokenizer.json") or find_vocabulary(path) is not None


def is_tokenizer_file(name: str) -> bool:
    return name in TOKENIZER_FILES or name.endswith(".tiktoken")


def read_published_fields(path: Path) -> dict[str, Any]:
    """Return the fields of the Hugging Face config.json that a model was read from, now or by an earlier conversion.

    They are {} for other models, and never have fields that name code, or the type of the weights.
    """
    if path.is_file() or not has_file(path, CONFIG_FILE):
        return {}
    data = read_json(safe_join(path, CONFIG_FILE))
    fields = data.get(HUGGINGFACE_KEY) if data.get("format") == FORMAT_NAME else data
    if not isinstance(fields, dict) or not fields:
        return {}
    kept = {name: value for name, value in fields.items() if name not in REPLACED_FIELDS and not name.startswith("_")}
    return kept | {"model_type": find_family(fields)[0].model_type}


def _stored_dtype(folder: Path) -> torch.dtype | None:
    stored = open_weights(folder)
    sizes: Counter[torch.dtype] = Counter()
    for name, dtype in stored.dtypes.items():
        if dtype.is_floating_point:
            sizes[dtype] += torch.Size(stored.shapes[name]).numel()
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


def cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Cast a floating-point tensor; other tensors, and with None all, are returned as they are."""
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def stored_size(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Return the number of bytes of a tensor after `cast`."""
    return tensor.nbytes if dtype is None or not tensor.is_floating_point() else tensor.numel() * dtype.itemsize
