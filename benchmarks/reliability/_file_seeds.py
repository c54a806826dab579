"""Write valid files of every kind that the package reads, and read them as its users do."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import monoblock as mb
from monoblock.config.parts import PatchConfig
from monoblock.data.readers.by_path import read_split
from monoblock.interop.adapters import load_adapter, save_adapter
from monoblock.interop.convert import pickle_to_safetensors
from monoblock.interop.gguf.writer import save_gguf
from monoblock.interop.huggingface.export import export_hf
from monoblock.interop.model_folder import read_any_config
from monoblock.interop.save import save_model
from monoblock.nn.lora import add_lora
from monoblock.runs.recipe import read_recipe
from monoblock.tasks.images import read_pixels
from monoblock.training import checkpoint, resume_state

TEXTS = [
    "In the beginning God created the heaven and the earth.",
    "And the earth was without form, and void; ﬁ Ａ é 日",
]
SIZES: dict[str, Any] = {"width": 24, "depth": 2, "heads": 3}
TEMPLATE = """{%- for m in messages %}{{ '<|' + m['role'] + '|>' }}{{ m['content'] | trim }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""
RECIPE = """name = "fuzzed"
about = "A recipe."
[data]
corpus = "reverse"
[tokenizer]
kind = "char"
[model]
family = "gpt"
width = 32
depth = 2
heads = 2
context = 32
[train]
steps = 10
lr = 3e-4
"""
IMAGE = 8
# A tokenizer.json with components that the trained tokenizers do not have.
TEXT_A, TEXT_B = {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}
COMPONENTS: dict[str, Any] = {
    "version": "1.0", "truncation": None, "padding": None,
    "added_tokens": [{
        "id": 3, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
        "special": True,
    }],
    "normalizer": {"type": "Sequence", "normalizers": [
        {"type": "NFKC"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"},
        {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Prepend", "prepend": "▁"},
    ]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
        {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
        {"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Isolated"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ]},
    "post_processor": {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}, TEXT_A],
        "pair": [TEXT_A, TEXT_B], "special_tokens": {"<x>": {"id": "<x>", "ids": [3], "tokens": ["<x>"]}},
    },
    "decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]},
    "model": {"type": "WordLevel", "vocab": {"[UNK]": 0, "the": 1, "▁": 2}, "unk_token": "[UNK]"},
}  # fmt: skip


class Seed(NamedTuple):
    """A folder of valid files, the names of those to change, and the function that reads the folder."""

    kind: str
    folder: Path
    files: tuple[str, ...]
    read: str  # a key of READERS
    has_child: bool = False  # it is read in a process of its own
    is_valid: bool = True

    def refuses_link(self, file: str) -> bool:
        """Return whether `file` may not be a link out of the folder; the user names a file, or only its folder."""
        return self.read not in NAMED_BY_USER or "labels-idx1" in file


# -- reading -----------------------------------------------------------------------------------------------------------


def read_model(folder: Path) -> None:
    pipe = mb.load(folder, device="cpu")
    if pipe.tokenizer is not None:
        pipe.tokenizer.encode(TEXTS[0])


def read_weights(folder: Path) -> None:
    mb.Transformer.from_pretrained(folder)


def read_tokenizer(folder: Path) -> None:
    tokenizer = mb.Tokenizer.from_pretrained(folder)
    for text in (*TEXTS, "", "a" * 1000):
        tokenizer.decode(tokenizer.encode(text, add_specials=True))


def read_chat(folder: Path) -> None:
    tokenizer = mb.Tokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": TEXTS[1]}]
    tokenizer.apply_chat_template(messages)


@cache
def _base_model() -> mb.Transformer:
    torch.manual_seed(0)
    return mb.Transformer(mb.gpt(vocab=31, **SIZES, context=16))


def read_adapter(folder: Path) -> None:
    load_adapter(copy.deepcopy(_base_model()), folder)


def read_data(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        if "labels-idx1" not in path.name:
            read_split(str(path), "all", None, "file")


def read_data_folder(folder: Path) -> None:
    read_split(str(folder), "all", None, "file")


def read_picture(folder: Path) -> None:
    for path in sorted(folder.iterdir()):
        read_pixels(path, PatchConfig(image=IMAGE, patch=4, channels=3))


def read_checkpoint(folder: Path) -> None:
    newest, problems = checkpoint.find_newest(folder)
    if newest is None:
        raise mb.FileError(f"no checkpoint is intact: {problems}")
    state = checkpoint.load(newest)
    resume_state.check_metadata(state.metadata, scaler={})


def read_pickle(folder: Path) -> None:
    pickle_to_safetensors(folder / "model.pt", folder / "out.safetensors", timeout=60)


def read_config(folder: Path) -> None:
    read_any_config(str(folder))


READERS: dict[str, Callable[[Path], None]] = {
    "model": read_model,
    "weights": read_weights,
    "config": read_config,
    "tokenizer": read_tokenizer,
    "chat": read_chat,
    "adapter": read_adapter,
    "data": read_data,
    "data folder": read_data_folder,
    "picture": read_picture,
    "recipe": lambda folder: read_recipe(folder / "recipe.toml") and None,
    "checkpoint": read_checkpoint,
    "pickle": read_pickle,
    "gguf": lambda folder: read_weights(folder / "model.gguf"),
    "gguf tokenizer": lambda folder: read_tokenizer(folder / "model.gguf"),
}

NAMED_BY_USER = ("data", "picture", "recipe", "gguf", "gguf tokenizer", "pickle")  # the path of a file is given


# -- writing -----------------------------------------------------------------------------------------------------------


def write_seeds(root: Path, variant: int) -> list[Seed]:
    """Write one valid folder of every kind; variants differ in their sizes and weights."""
    torch.manual_seed(variant)
    seeds: list[Seed] = []

    def add(kind: str, files: str, read: str, has_child: bool = False) -> Path:
        folder = root / f"{kind.replace(' ', '-')}-{variant}"
        folder.mkdir(parents=True)
        seeds.append(Seed(kind, folder, tuple(files.split()), read, has_child))
        return folder

    tokenizers = {
        kind: mb.Tokenizer.train(kind, TEXTS * 3, 280 + variant)
        for kind in ("bpe", "unigram", "wordpiece", "word", "char")
    }
    for kind, tokenizer in tokenizers.items():
        tokenizer.save_pretrained(add(f"tokenizer {kind}", "tokenizer.json tokenizer_config.json", "tokenizer"))
    (add("tokenizer components", "tokenizer.json", "tokenizer") / "tokenizer.json").write_text(json.dumps(COMPONENTS))
    _write_vocabularies(add, tokenizers["bpe"])
    _write_models(add, tokenizers["bpe"])
    _write_data(add, np.random.default_rng(variant))
    folder = add("chat template", "chat_template.jinja tokenizer_config.json", "chat", True)
    tokenizers["bpe"].save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (add("recipe", "recipe.toml", "recipe") / "recipe.toml").write_text(RECIPE)
    folder = add("checkpoint", "step-5/state.json step-5/model.safetensors step-5/manifest.json latest", "checkpoint")
    guard = dict.fromkeys(("mean", "good", "bad_in_a_row", "good_in_a_row", "rollbacks"), 1)
    metadata = {"tokens": 100, "micro_batches": 1, "guard": guard, "best": {"step": 5, "loss": 1.5}, "last_good": 5}
    metadata |= {"identity": {}, "environment": {}, "scaler": {}}
    checkpoint.save(folder, checkpoint.Checkpoint(5, {"model": {"w": torch.randn(3, 4)}}, metadata))
    folder = add("pickle", "model.pt", "pickle", True)
    torch.save({"weight": torch.randn(3, 4), "bias": torch.zeros(3)}, folder / "model.pt")
    return seeds


def _write_models(add: Callable[..., Path], tokenizer: mb.Tokenizer) -> None:
    gpt = mb.Transformer(mb.gpt(vocab=tokenizer.vocab_size, **SIZES, context=32))
    llama = mb.Transformer(mb.llama(vocab=tokenizer.vocab_size, **SIZES, kv_heads=3, hidden=40, context=32))
    generation = {"do_sample": True, "temperature": 0.8, "top_k": 5, "max_new_tokens": 8}
    folder = add("model", "config.json model.safetensors generation_config.json tokenizer_config.json", "model")
    save_model(gpt, folder)
    tokenizer.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    save_model(gpt, add("config", "config.json", "config"))
    save_model(gpt, add("shards", "model.safetensors.index.json config.json", "weights"), max_shard_size=20_000)
    for name, model in (("gpt2", gpt), ("llama", llama)):
        export_hf(model, add(f"hf {name}", "config.json model.safetensors", "weights"))
        export_hf(model, add(f"hf config {name}", "config.json", "config"))
    bert = mb.vary(mb.bert(vocab=tokenizer.vocab_size, **SIZES, context=32), head="classifier", classes=2)
    folder = add("labels", "labels.json config.json", "model")
    save_model(mb.Transformer(bert), folder)
    tokenizer.save_pretrained(folder)
    (folder / "labels.json").write_text(json.dumps(["no", "yes"]))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    folder = add("gguf", "model.gguf", "gguf")
    gpt2 = mb.Tokenizer.from_pretrained(next(folder.parent.glob("vocab.json-*")))
    small = mb.Transformer(mb.llama(vocab=gpt2.vocab_size, **SIZES, kv_heads=3, hidden=40, context=32))
    save_gguf(small, folder / "model.gguf", tokenizer=gpt2)
    save_gguf(small, add("gguf tokenizer", "model.gguf", "gguf tokenizer") / "model.gguf", tokenizer=gpt2)
    adapted = copy.deepcopy(_base_model())
    add_lora(adapted, rank=2)
    save_adapter(adapted, add("adapter", "adapter_config.json adapter_model.safetensors", "adapter"))


def _write_vocabularies(add: Callable[..., Path], bpe: mb.Tokenizer) -> None:
    model: Any = bpe.content()[0]["model"]
    folder = add("vocab.json", "vocab.json merges.txt", "tokenizer")
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]) + "\n")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz", "##e", "##n", "the"]
    (add("vocab.txt", "vocab.txt", "tokenizer") / "vocab.txt").write_text("\n".join(words) + "\n")
    import base64

    tokens = [bytes([n]) for n in range(256)] + [b"th", b"he", b"the"]
    rows = (f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(tokens))
    (add("tiktoken", "a.tiktoken", "tokenizer") / "a.tiktoken").write_text("".join(rows))
    (add("sentencepiece", "tokenizer.model", "tokenizer") / "tokenizer.model").write_bytes(_sentencepiece_model())


def _sentencepiece_model() -> bytes:
    """Return a small Unigram model as a protocol buffer."""

    def field(number: int, value: bytes) -> bytes:
        return bytes([number << 3 | 2, len(value)]) + value

    def piece(text: str, score: float, kind: int) -> bytes:
        score_bytes = b"\x15" + np.float32(score).tobytes()
        return field(1, field(1, text.encode()) + score_bytes + bytes([3 << 3, kind]))

    rows = [piece("<unk>", 0, 2), piece("<s>", 0, 3), piece("</s>", 0, 3)]
    rows += [piece(letter, -float(n), 1) for n, letter in enumerate("▁abcdefghijklmnopqrstuvwxyz", 1)]
    return b"".join(rows) + field(2, bytes([3 << 3, 1]))


def _write_data(add: Callable[..., Path], rng: np.random.Generator) -> None:
    images, labels = rng.integers(0, 256, (12, 8, 8), np.uint8), rng.integers(0, 3, 12)
    np.savez(add("npz", "data.npz", "data") / "data.npz", images=images, labels=labels)
    np.savez_compressed(add("npz floats", "data.npz", "data") / "data.npz", images=images / 255.0, labels=labels)
    folder = add("idx", "train-images-idx3-ubyte.gz train-labels-idx1-ubyte.gz", "data")
    header = bytes((0, 0, 8, 3)) + b"".join(size.to_bytes(4, "big") for size in images.shape)
    (folder / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + images.tobytes()))
    header = bytes((0, 0, 8, 1)) + len(labels).to_bytes(4, "big")
    (folder / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(header + labels.astype(np.uint8).tobytes()))
    rows = [{"text": text, "label": "a"} for text in TEXTS]
    (add("jsonl", "data.jsonl", "data") / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chats = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}] * 3
    (add("chats", "data.jsonl", "data") / "data.jsonl").write_text("\n".join(map(json.dumps, chats)))
    question = {"id": "1", "question": "Who?", "answers": [{"text": "God", "answer_start": 17}]}
    squad = {"version": "2", "data": [{"title": "", "paragraphs": [{"context": TEXTS[0], "qas": [question]}]}]}
    (add("squad", "data.json", "data") / "data.json").write_text(json.dumps(squad))
    (add("conll", "data.conll", "data") / "data.conll").write_text("In O\nEden B-LOC\n\nAdam B-PER\n")
    (add("pairs", "data.tsv", "data") / "data.tsv").write_text("one\teins\ntwo\tzwei\n")
    folder = add("data folder", "train.jsonl valid.jsonl", "data folder")
    for name in ("train", "valid"):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    from PIL import Image

    for suffix in ("png", "jpg", "gif", "bmp", "webp"):
        pixels = rng.integers(0, 256, (IMAGE, IMAGE, 3), np.uint8)
        Image.fromarray(pixels).save(add(f"picture {suffix}", f"a.{suffix}", "picture") / f"a.{suffix}")
