"""A stored model, by its path: a folder of monoblock, a Hugging Face folder or a GGUF file, here or on the hub.

    folder = ModelFolder("runs/demo")
    folder.config, folder.weights, folder.tokenizer, folder.generation, folder.labels, folder.recipe

Each is read when it is first asked for, and every file is opened at most once.  A folder of monoblock has a config.json
that contains "format": "monoblock"; one with a model_type instead is a Hugging Face folder (huggingface/load.py).
torch is imported where weights are read, so that models are counted quickly.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from monoblock.config.model import CONFIG_KEYS, AnyConfig, ModelConfig, parse_config
from monoblock.config.presets import PRESETS, preset
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError, InputError, with_article
from monoblock.untrusted_files import Folder, parse_json, read_bytes, read_toml, reading, safe_join, write_atomically

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

    from monoblock.tokenizers.formats.gguf import GgufHeader
    from monoblock.tokenizers.tokenizer import Tokenizer

T = TypeVar("T")

CONFIG_FILE, FORMAT_NAME = "config.json", "monoblock"
LABELS_FILE, GENERATION_CONFIG_FILE = "labels.json", "generation_config.json"
RECIPE_FILE = "recipe.toml"  # of a training run, which gets its weights when it has finished
# Fields of our config.json: the fingerprint of the tokenizer, and those of the Hugging Face file that was read.
FINGERPRINT_KEY, HUGGINGFACE_KEY = "tokenizer", "huggingface"
# Fields of a Hugging Face config.json that are written anew, or name code or files elsewhere.
REPLACED_FIELDS = ("auto_map", "dtype", "quantization_config", "torch_dtype", "transformers_version")
# Settings of generation that older Hugging Face folders keep in config.json.
GENERATION_FIELDS = (
    "eos_token_id",
    "pad_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "decoder_start_token_id",
)
DTYPE_NAMES = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
ADVICE = "give a preset, a config.json file or a model folder"


class ModelFolder(Folder):
    """A model folder or a GGUF file; a path like owner/name that does not exist is downloaded from the hub.

    `ignore_fields` are fields of a Hugging Face config.json or GGUF file that are read as if the file did not have
    them.
    """

    def __init__(self, path: str | Path, ignore_fields: Sequence[str] = ()) -> None:
        super().__init__(resolve_model_path(path))
        self.ignore_fields = tuple(ignore_fields)

    @property
    def is_gguf(self) -> bool:
        return self.path.suffix == ".gguf" and self.path.is_file()

    @property
    def is_run(self) -> bool:
        return self.has(RECIPE_FILE)

    @property
    def is_published(self) -> bool:
        """Whether this is a Hugging Face folder."""
        return not self.is_gguf and is_published(self.fields)

    @property
    def format(self) -> str:
        """The format of the model: monoblock, hf or gguf."""
        return "gguf" if self.is_gguf else "hf" if self.is_published else "monoblock"

    @cached_property
    def fields(self) -> Mapping[str, Any]:
        """The content of config.json; {} for a GGUF file."""
        if self.is_gguf:
            return {}
        if not self.has(CONFIG_FILE):
            raise FileError(f"{self.path} is not a model folder: it has no {CONFIG_FILE}")
        return self.read_json(CONFIG_FILE)

    @cached_property
    def gguf(self) -> GgufHeader:
        from monoblock.tokenizers.formats.gguf import read_gguf_header

        return read_gguf_header(self.path)

    @cached_property
    def config(self) -> AnyConfig:
        """The configuration; tie_word_embeddings says whether the output of a Hugging Face model is tied."""
        with reading(self.path):
            if not self.is_gguf:
                return parse_fields(self.fields, self.path / CONFIG_FILE, self.ignore_fields)
            from monoblock.interop.gguf.reader import read_gguf_config

            return read_gguf_config(self.weights, self.ignore_fields)[1]

    @cached_property
    def weights(self) -> Any:
        """The tensors by name, `SafetensorsWeights` or `GgufWeights`; a tensor is read when it is asked for."""
        if self.is_gguf:
            from monoblock.interop.gguf.reader import GgufWeights

            return GgufWeights(self.path, self.gguf)
        from monoblock.interop.weights import INDEX_FILE, WEIGHTS_FILE, open_weights

        if self.is_run and not self.has(WEIGHTS_FILE) and not self.has(INDEX_FILE):
            command = f"monoblock train {self.path / RECIPE_FILE} --out {self.path} --resume"
            raise FileError(f"this training run has not finished; continue it with {command}")
        return open_weights(self)

    @property
    def has_tokenizer(self) -> bool:
        from monoblock.tokenizers.formats import gguf
        from monoblock.tokenizers.formats.vocabulary_files import find_vocabulary

        if self.is_gguf:
            return gguf.has_tokenizer(self.gguf.fields)
        return self.has("tokenizer.json") or find_vocabulary(self.path) is not None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; FileError if there is none."""
        from monoblock.tokenizers.tokenizer import Tokenizer
        from monoblock.tokenizers.tokenizer_json import read_gguf_tokenizer, read_tokenizer

        with reading(self.path):
            content = read_gguf_tokenizer(self.gguf, self.path) if self.is_gguf else read_tokenizer(self)
            return Tokenizer.from_content(*content, self.path)

    def load_tokenizer(self, config: AnyConfig | None = None, *, force: bool = False) -> Tokenizer:
        """Return the tokenizer; raise FileError if it does not fit the model, and warn if it looks as if it did not.

        In a monoblock folder, config.json contains the fingerprint of the tokenizer that the model was trained with.

        config: the configuration of the model, if it is known already.
        force: use the tokenizer of a published folder even if it seems to belong to another model.
        """
        from monoblock.tokenizers.compatibility import check_published_tokenizer, check_tokenizer_fits

        config, tokenizer = self.config if config is None else config, self.tokenizer
        try:
            check_tokenizer_fits(tokenizer, vocab_size(config), self.fingerprint)
            if not self.is_gguf and "format" not in self.fields and not force:
                own_class = self.read_json("tokenizer_config.json").get("tokenizer_class")
                for text in check_published_tokenizer(tokenizer, vocab_size(config), self.fields, own_class):
                    warnings.warn(f"{self.path}: {text}", stacklevel=2)
        except InputError as problem:
            advice = ", or load it anyway with --force (force=True in Python)" if "format" not in self.fields else ""
            raise FileError(f"{self.path}: {problem}{advice}") from None
        return tokenizer

    @property
    def fingerprint(self) -> str | None:
        """The fingerprint of the tokenizer in our config.json, or None."""
        fingerprint = self.fields.get(FINGERPRINT_KEY) if self.fields.get("format") == FORMAT_NAME else None
        return fingerprint if isinstance(fingerprint, str) else None

    @cached_property
    def generation_config(self) -> Mapping[str, Any]:
        """The content of generation_config.json, or what a GGUF file says of it."""
        if not self.is_gguf:
            return self.read_json(GENERATION_CONFIG_FILE)
        from monoblock.interop.generation import read_sampling

        return read_sampling(self.gguf.fields)

    @property
    def generation(self) -> dict[str, Any]:
        """The settings of generation that the files state, as fields of a generation_config.json, unchecked.

        Without do_sample, a folder that is no run means greedy decoding, as in Hugging Face.
        """
        config = self.read_json(CONFIG_FILE)
        published = {} if "format" in config else {key: config[key] for key in GENERATION_FIELDS if key in config}
        stated = {**published, **self.generation_config}
        values = {name: value for name, value in stated.items() if value is not None}
        return {"do_sample": False} | values if values and not self.is_gguf and not self.is_run else values

    @cached_property
    def labels(self) -> list[str]:
        """The class names, or [] if there are none or only placeholders (LABEL_0, LABEL_1, …).

        They are in labels.json, or in the field id2label of a Hugging Face config.json.
        """
        if self.has(LABELS_FILE):
            path = self.path / LABELS_FILE
            labels = parse_json(self.read_bytes(LABELS_FILE), str(path))
            if not isinstance(labels, list) or not all(isinstance(label, str | int | float) for label in labels):
                raise FileError(f'{path} is not a JSON list of labels; write them as ["no", "yes"]')
            return [str(label) for label in labels]
        names = self.fields.get("id2label")
        if not isinstance(names, dict) or sorted(names) != sorted(map(str, range(len(names)))):
            return []
        labels = [str(names[str(n)]) for n in range(len(names))]
        return [] if labels == [f"LABEL_{n}" for n in range(len(labels))] else labels

    @cached_property
    def recipe(self) -> Mapping[str, Any] | None:
        """The tables of the recipe that the model was trained by; None without a recipe."""
        return read_toml(safe_join(self.path, RECIPE_FILE)) if self.is_run else None

    @property
    def published_fields(self) -> dict[str, Any]:
        """The fields of the Hugging Face config.json that a model was read from, now or by an earlier conversion.

        They are {} for other models, and never have fields that name code, or the type of the weights.
        """
        data = self.read_json(CONFIG_FILE)
        fields = data.get(HUGGINGFACE_KEY) if data.get("format") == FORMAT_NAME else data
        if not isinstance(fields, dict) or not fields:
            return {}
        from monoblock.interop.huggingface.load import find_family

        kept = {key: value for key, value in fields.items() if key not in REPLACED_FIELDS and not key.startswith("_")}
        return kept | {"model_type": find_family(fields)[0].model_type}


def write_labels(folder: Path, labels: Sequence[str], model_format: str) -> None:
    """Store class names in a folder that already contains a model; `model_format` is "hf" or "monoblock"."""
    name, content = LABELS_FILE, json.dumps(list(labels), indent=2, ensure_ascii=False)
    if model_format == "hf":
        name, content = CONFIG_FILE, json.dumps({**ModelFolder(folder).fields, **label_fields(labels)}, indent=2)
    write_atomically(folder / name, content + "\n")


def label_fields(labels: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a Hugging Face config.json for class names."""
    names = dict(enumerate(labels))
    return {"id2label": {str(n): label for n, label in names.items()}, "label2id": {x: n for n, x in names.items()}}


# -- configurations ----------------------------------------------------------------------------------------------------


def read_any_config(what: str) -> AnyConfig:
    """Return the configuration of `what`: a preset, a config.json, a GGUF file or a model folder."""
    if what in PRESETS:
        return PRESETS[what].config
    if not what:
        raise ConfigError("WHAT is empty; give the name of a preset, a config.json file or a model folder")
    path = Path(what)
    if path.is_dir() or (path.suffix == ".gguf" and path.is_file()):
        if path.is_dir() and not Folder(path).has(CONFIG_FILE):
            raise FileError(f"the folder {what} has no {CONFIG_FILE}; {ADVICE}")
        return ModelFolder(path).config
    if path.is_file():
        with reading(path):
            return parse_fields(parse_json(read_bytes(path), str(path)), path)
    if path.name != what or path.suffix == ".json":  # it looks like a path
        raise FileError(f"there is no file or folder {what}; {ADVICE}")
    return preset(what)  # raises an error that names similar presets


def is_published(fields: Mapping[str, Any]) -> bool:
    """Return whether these are the fields of a Hugging Face config.json, not of a monoblock one."""
    return "format" not in fields and ("model_type" in fields or "architectures" in fields)


def parse_fields(fields: Any, path: Path, ignore_fields: Sequence[str] = ()) -> AnyConfig:
    """Convert the fields of a config.json, which monoblock or transformers wrote, to a configuration."""
    try:
        if isinstance(fields, dict) and is_published(fields):
            from monoblock.interop.huggingface.load import config_from_hf

            return config_from_hf(fields, ignore_fields)
        if not isinstance(fields, dict) or fields.get("format", FORMAT_NAME) != FORMAT_NAME:
            raise FileError(f'it was not written by monoblock: it does not contain "format": "{FORMAT_NAME}"')
        return parse_config(fields)
    except (ConfigError, FileError) as problem:
        raise FileError(f"{path}: {problem}") from None


def vocab_size(config: AnyConfig) -> int:
    """Return the size of a model's vocabulary; if source and target have different ones, return the smaller size."""
    return min(config.vocab_sizes, default=0)


def format_config(config: AnyConfig, fingerprint: str | None, published: Mapping[str, Any] | None = None) -> str:
    """Return the text of config.json: the model configuration and the fingerprint of its tokenizer.

    published: the fields of the Hugging Face config.json of the model that was converted, or that training started
        from.
    """
    data: dict[str, Any] = {"format": FORMAT_NAME, CONFIG_KEYS[type(config)]: to_dict(config)}
    data |= {HUGGINGFACE_KEY: dict(published)} if published else {}
    data |= {} if fingerprint is None else {FINGERPRINT_KEY: fingerprint}
    return json.dumps(data, indent=2) + "\n"


# -- models ------------------------------------------------------------------------------------------------------------


def load_model(
    cls: type[T],
    folder: str | Path | ModelFolder,
    *,
    dtype: torch.dtype | str | None = None,
    device: str = "cpu",
    ignore_fields: Sequence[str] = (),
    mesh: DeviceMesh | None = None,
) -> T:
    """Load the model of a folder, which is built on the meta device, so that no weight is initialized first.

    dtype: that of the weights, by default float32.
    mesh: processes that share every matrix; each reads its part only.
    """
    import torch

    folder = folder if isinstance(folder, ModelFolder) else ModelFolder(folder, ignore_fields)
    kind: Any = cls
    options: dict[str, Any] = {"dtype": parse_dtype("fp32" if dtype is None else dtype), "device": device, "mesh": mesh}
    with reading(folder.path):
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise InputError(f"device={device!r} is not available: torch finds no GPU; write device='cpu'")
        if folder.is_gguf:
            from monoblock.interop.gguf.reader import load_gguf

            model: Any = load_gguf(kind, folder.weights, folder.ignore_fields, **options)
        elif folder.is_published:
            from monoblock.interop.huggingface.load import load_hf

            model = load_hf(kind, folder.path, folder.fields, folder.weights, folder.ignore_fields, **options)
        else:
            model = _load_own(kind, folder, **options)
    model.loaded_from = folder.path.resolve()
    return model


def _load_own(cls: type[T], folder: ModelFolder, *, dtype: torch.dtype, device: str, mesh: DeviceMesh | None) -> T:
    from monoblock.interop.weights import WeightReader, build_on_meta, check_names, read_weights, same_names

    if folder.ignore_fields:
        raise InputError(f"{folder.path} was written by monoblock, which has no fields to ignore; drop ignore_fields")
    config, stored = folder.config, folder.weights
    quantized = isinstance(config, ModelConfig) and config.quantize is not None
    if mesh is not None and (quantized or not isinstance(config, ModelConfig)):
        kind = "a quantized model" if quantized else "no Transformer, but a model"
        raise InputError(f"{folder.path} contains {kind}, which several processes cannot share; load it in one process")
    build: Any = cls
    if quantized:
        from monoblock.quantization.convert import build_quantized, stored_dtypes

        build = partial(build_quantized, cls, dtype=dtype)
    try:
        model: Any = build_on_meta(build, config, len(stored))
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        names, packed = {name: name for name in stored}, stored_dtypes(model) if quantized else {}
        hint = "; if a subclass of Transformer was trained, give it to mb.load as model_class"
        check_names(names, shapes, hint=hint)
        for name in packed:
            dtype_found, shape_found = stored.entries[name]
            if (dtype_found, shape_found) != (packed[name], shapes[name]):
                raise FileError(
                    f"{name} has dtype {dtype_found} and shape {shape_found}, but the configuration requires "
                    f"{packed[name]} and {shapes[name]}"
                )
        state = {name: stored[name].to(device) for name in packed}
        rest = same_names(name for name in shapes if name not in packed)
        state |= read_weights(model, rest, names, WeightReader(stored, dtype, device), mesh)
    except (ConfigError, FileError) as error:
        raise FileError(str(error) if str(error).startswith(str(folder.path)) else f"{folder.path}: {error}") from None
    model.load_state_dict(state, assign=True, strict=True)
    loaded: T = model.eval()
    return loaded


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return a torch dtype, given as a dtype or by a name such as "float16" or "bf16"."""
    import torch

    parsed = getattr(torch, DTYPE_NAMES.get(dtype, dtype), None) if isinstance(dtype, str) else dtype
    if not isinstance(parsed, torch.dtype) or not parsed.is_floating_point:
        raise InputError(f"dtype={dtype!r} is not a dtype for weights; write {', '.join(DTYPE_NAMES)} or a torch dtype")
    return parsed


# -- the Hugging Face hub ----------------------------------------------------------------------------------------------

ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "*.tiktoken")
# owner/name or owner/name@revision; runs/NAME is always a local folder
REPO_ID = re.compile(r"(?P<name>(?!runs/)\w[\w.-]{0,95}/\w[\w.-]{0,95})(?:@(?P<revision>\w[\w./-]{0,199}))?")
# Who publishes the models that transformers once knew by a name without an owner, by the beginning of this name.
OWNERS = {
    "albert-": "albert",
    "bert-": "google-bert",
    "camembert-": "almanach",
    "distilbert-": "distilbert",
    "distilgpt2": "distilbert",
    "distilroberta-": "distilbert",
    "gpt2": "openai-community",
    "openai-gpt": "openai-community",
    "roberta-": "FacebookAI",
    "t5-": "google-t5",
    "xlm-": "FacebookAI",
}
COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model_path(name_or_path: str | Path) -> Path:
    """Return the local path of a model; download it from the Hugging Face hub if `name_or_path` is like owner/name.

    owner/name@revision is the model of a commit, a tag or a branch. Unless the revision is a commit, a warning says
    which commit was loaded. A path that exists, or whose parent folder exists, is never downloaded. For the name of a
    published model without its owner, raise an error that says what to write.
    """
    if not isinstance(name_or_path, str | PathLike):
        kind = with_article(type(name_or_path).__name__)
        raise InputError(f"a model is loaded from a folder or a file, but got {kind}; give a path or owner/name")
    path = Path(name_or_path)
    if not path.exists() and path.name == str(name_or_path):
        _check_name(path.name)
    match = REPO_ID.fullmatch(str(name_or_path))
    if path.exists() or match is None or path.parent.exists():
        return path
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise FileError(
            f"there is no folder {name_or_path} here; to download a model of that name, pip install huggingface_hub"
        ) from None
    name, revision = match["name"], match["revision"]
    try:
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=list(ALLOW_PATTERNS)))
    except Exception as error:  # whether the library, the network or the server failed, there is no model
        reason = " ".join(str(error).split())[:120] or type(error).__name__
        raise FileError(f"there is no folder {name_or_path} here, and the download failed ({reason})") from None
    if revision != folder.name and COMMIT.fullmatch(folder.name):  # the folder of a snapshot is named after its commit
        warnings.warn(
            f"{name_or_path} may change; this is {name}@{folder.name}, and that name always gives the same model",
            stacklevel=2,
        )
    return folder


def _check_name(name: str) -> None:
    """Raise FileError if `name` is that of a published model, or of a preset, which has no weights."""
    owner = next((owner for start, owner in OWNERS.items() if name.startswith(start)), None)
    if owner is not None and not Path(name).suffix:
        raise FileError(
            f"there is no folder {name} here; write {owner}/{name} for the model of the Hugging Face hub, or the path "
            "of a folder"
        )
    if name in PRESETS:
        raise FileError(
            f"there is no folder {name} here, and the preset {name} has no weights; write mb.Transformer(mb.preset("
            f"{name!r})) to train it, or owner/name for a model of the Hugging Face hub"
        )
