"""Malformed and hostile files, each with the reader it is meant for; run as a program, it tries them all.

Every file must end in one of our errors, of one line, quickly and with little memory; no program may be run and no file
outside its folder opened.  An audit hook cannot be removed, so all of it happens in a separate process: the argument is
a folder to work in, the result is JSON on standard output.
"""

import json
import math
import os
import pickle
import random
import resource
import struct
import sys
import time
import zipfile
from pathlib import Path

import torch
from safetensors.torch import save as to_bytes

import monoblock as mb
from monoblock.errors import MonoblockError
from monoblock.interop.convert import pickle_to_safetensors
from monoblock.interop.huggingface.export import export_hf
from monoblock.interop.model_folder import ModelFolder
from monoblock.model import Transformer
from monoblock.tokenizers.chat_template import render_chat
from monoblock.tokenizers.tokenizer import Tokenizer

RANDOM = random.Random(5)
MESSAGES = [{"role": "user", "content": "hello"}]


# -- safetensors -------------------------------------------------------------------------------------------------------


def safetensors_bytes(header, body=b"", *, length=None):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + body


def header_entry(dtype="F32", shape=(2, 3), offsets=(0, 24)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def weight_files():
    """Yield (name, bytes of a model.safetensors)."""
    good = to_bytes({"a": torch.ones(2, 3), "b": torch.zeros(5), "c": torch.ones(7, 2)})
    for n in range(45):
        yield f"cut {n}", good[: int(len(good) * n / 45)]
    for n, length in enumerate([0, 1, 2**16, 2**31, 2**40, 2**63, 2**64 - 1, 17 * 2**20, len(good), len(good) - 7]):
        yield f"header length {n}", struct.pack("<Q", length) + good[8:]
    yield "header beyond the limit", safetensors_bytes(b"{" + b" " * (17 * 2**20) + b"}")
    entries = {"a": header_entry(), "b": header_entry()}
    for n, offsets in enumerate([(0, 24), (12, 36), (23, 47), (25, 49), (48, 72), (24, 47), (24, 49), (48, 24)]):
        yield f"bytes {n}", safetensors_bytes(entries | {"b": header_entry(offsets=offsets)}, bytes(48))
    yield "bytes left over", safetensors_bytes({"a": header_entry()}, bytes(25))
    yield "bytes missing", safetensors_bytes({"a": header_entry()}, bytes(23))
    for n, shape in enumerate([(2, 4), (3, 3), (6, 0), (2**32, 2**32), (2**63,), (1,) * 9, (24,), (2, 3, 2), (-2, -3)]):
        yield f"shape {n}", safetensors_bytes({"a": header_entry(shape=shape)}, bytes(24))
    values = [
        None,
        "2",
        2.0,
        True,
        math.nan,
        math.inf,
        -1,
        10**400,
        [2],
        {},
        [[2], 3],
        [2, None],
        [True, 24],
        ["2", "3"],
    ]
    for n, value in enumerate(values):
        yield f"odd shape {n}", safetensors_bytes({"a": header_entry() | {"shape": value}}, bytes(24))
        yield f"odd offsets {n}", safetensors_bytes({"a": header_entry() | {"data_offsets": value}}, bytes(24))
    for n, dtype in enumerate(["F31", "f32", "", None, 4, "Q4_0", ["F32"], "F64", "F16", "I8", "BOOL", "OBJECT"]):
        yield f"dtype {n}", safetensors_bytes({"a": header_entry() | {"dtype": dtype}}, bytes(24))
    entry_json = json.dumps(header_entry())
    yield "a key twice", safetensors_bytes(f'{{"a": {entry_json}, "a": {entry_json}}}'.encode(), bytes(24))
    yield (
        "a field twice",
        safetensors_bytes(b'{"a": {"dtype":"F32","dtype":"F32","shape":[6],"data_offsets":[0,24]}}', bytes(24)),
    )
    yield "a field too many", safetensors_bytes({"a": header_entry() | {"code": "x"}}, bytes(24))
    yield "a field too few", safetensors_bytes({"a": {"dtype": "F32", "shape": [6]}}, bytes(24))
    for n, name in enumerate(["", "a" * 600, "a\nb", "a\0", "\x1b[31m"]):
        yield f"name {n}", safetensors_bytes({name: header_entry()}, bytes(24))
    for n, value in enumerate([3, "x", [], None, {"a": 1}, {"a": {"b": "c"}}, {"a": None}]):
        yield f"metadata {n}", safetensors_bytes({"a": header_entry(), "__metadata__": value}, bytes(24))
        yield f"no entry {n}", safetensors_bytes({"a": value}, bytes(24))
    yield "deep", safetensors_bytes(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}")
    yield "many values", safetensors_bytes(b'{"a":[' + b"[]," * 5_000_000 + b"[]]}")
    yield "many tensors", safetensors_bytes({str(n): header_entry(shape=[0], offsets=[0, 0]) for n in range(100_001)})
    for n, text in enumerate([b"", b"{}x", b"[]", b"{'a': 1}", b"\xff\xfe", b"{" * 99, b'{"a": NaN}', b'{"a": 1e999}']):
        yield f"no header {n}", safetensors_bytes(text or b" ", bytes(24))


# -- folders -----------------------------------------------------------------------------------------------------------


def index_files(secret):
    """Yield (name, the value of weight_map or the text of the index)."""
    shards = [
        "../secret.safetensors",
        "/etc/passwd",
        str(secret),
        "a/../../x",
        "..",
        ".",
        "",
        "x\\y",
        "c:x",
        "a\0b",
        "no",
    ]
    shards += ["link.safetensors", "folder.safetensors", "pipe.safetensors", "missing.safetensors", "one.bin", "~/x"]
    shards += ["./one.safetensors", "one.safetensors/", "ONE.SAFETENSORS", "%2e%2e/x.safetensors", "file:///etc/passwd"]
    for n, shard in enumerate(shards):
        yield f"place {n}", {"a": shard}
    for n, value in enumerate([None, 3, 2.5, True, ["one.safetensors"], {"x": "y"}]):
        yield f"odd place {n}", {"a": value}
    for n, value in enumerate([None, [], {}, "one.safetensors", 3]):
        yield f"odd map {n}", value
    yield "twice", {"a": "one.safetensors", "b": "again.safetensors"}
    yield "elsewhere", {"a": "two.safetensors"}
    yield "not listed", {"c": "two.safetensors"}
    yield "not there", {"a": "one.safetensors", "zzz": "one.safetensors"}
    yield "text: key", '{"weight_map": {"a": "one.safetensors", "a": "one.safetensors"}}'
    yield "text: maps", '{"weight_map": {}, "weight_map": {"a": "one.safetensors"}}'
    yield "text: cut", '{"weight_map": {"a": "one.safe'
    yield "text: nan", '{"weight_map": {"a": "one.safetensors"}, "metadata": {"total_size": NaN}}'
    yield "text: list", "[1, 2, 3]"
    yield "text: deep", '{"weight_map": ' + '{"a":' * 5000 + "1" + "}" * 5001
    for n in range(12):
        yield (
            f"many {n}",
            {f"t{k}": f"{k}-{n}.safetensors" for k in range(2_001)} if n == 0 else {"a": f"x{n}/one.safetensors"},
        )


BAD_CONFIG_VALUES = {
    "hidden_size": [None, "96", -1, 0, 2.5, [96], {}, True, 10**30, 10**9, 97],
    "num_hidden_layers": [None, "2", -1, 0, 10**9, 2.5, [], 9_999],
    "num_attention_heads": [None, "6", -1, 0, 5, 10**9, []],
    "vocab_size": [None, "x", -5, 0, 10**12, 1.5],
    "rms_norm_eps": ["small", [], {}, -1.0],
    "hidden_act": ["__import__('os').system('id')", 3, [], None, "mish"],
    "rope_parameters": [{"rope_type": "evil", "rope_theta": 1e4}, {"rope_type": "yarn", "code": 1}, [1]],
    "model_type": [3, "gpt5", "../llama", ["llama"]],
    "architectures": [["Evil"], "LlamaForCausalLM", [1], [], ["LlamaForCausalLM", "x"], {}],
    "unheard_of_field": [1, "x"],
}


def config_files(good):
    """Yield (name, text of a config.json)."""
    for field, values in BAD_CONFIG_VALUES.items():
        for n, value in enumerate(values):
            yield f"{field} {n}", json.dumps(good | {field: value})
    text = json.dumps(good)
    for n in range(12):
        yield f"cut {n}", text[: len(text) * n // 12]
    for n, more in enumerate(['"x": NaN', '"x": Infinity', '"x": 1e999', '"hidden_size": 96', '"x": ' + "9" * 5000]):
        yield f"text {n}", text[:-1] + ", " + more + "}"
    yield "deep", text[:-1] + ', "x": ' + "[" * 20_000 + "]" * 20_000 + "}"
    yield "list", "[" + text + "]"
    yield "bytes", "\udcff" + text
    yield "ours by name only", json.dumps({"format": "monoblock"})
    yield "ours and odd", json.dumps({"format": "monoblock", "model": {"input": 3}})
    yield "ours and unknown", json.dumps({"format": "monoblock", "model": {"inputs": {}}})


# -- tokenizers --------------------------------------------------------------------------------------------------------


def tokenizer_files(good):
    """Yield (name, text of a tokenizer.json)."""

    def changed(path, value):
        data = json.loads(good)
        node = data
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        return json.dumps(data)

    bomb = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa" * 40}
    for n, pattern in enumerate(
        ["(a+)+$", "(.*)*x", "(?:a|aa)+b", "(\\w+\\s?)*!", "(x+x+)+y", "((a*)*)*b", "\\p{L}+?"]
    ):
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        yield f"regex {n}", changed(["pre_tokenizer"], split)
        yield f"nested regex {n}", changed(["pre_tokenizer"], {"type": "Sequence", "pretokenizers": [split]})
    yield "growth", changed(["normalizer"], {"type": "Sequence", "normalizers": [bomb] * 20})
    yield "many parts", changed(["normalizer"], {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 1000})
    nest = {"type": "NFC"}
    for _ in range(12):
        nest = {"type": "Sequence", "normalizers": [nest]}
    yield "deep parts", changed(["normalizer"], nest)
    for n, value in enumerate([2**62, -1, 1.5, "1", None, True, 2_000_000, 10**30]):
        yield f"id {n}", changed(["model", "vocab", "a"], value)
        yield f"added id {n}", changed(["added_tokens", 0, "id"], value)
    for n, value in enumerate(
        [None, [], "BPE", 3, {"type": "Evil"}, {"type": "BPE"}, {"type": "Unigram", "vocab": {}}]
    ):
        yield f"model {n}", changed(["model"], value)
    for n, value in enumerate(["a", [["a"]], [["a", "b", "c"]], [["q", "☃"]], [[1, 2]], {"a": "b"}]):
        yield f"merges {n}", changed(["model", "merges"], value)
    for section in ("normalizer", "pre_tokenizer", "post_processor", "decoder"):
        for n, value in enumerate([{"type": "Evil"}, {}, "x", 3]):
            yield f"{section} {n}", changed([section], value)
    for n in range(10):
        yield f"cut {n}", good[: len(good) * n // 10]
    yield "twice", good[:-1] + ', "model": {}}'
    yield "deep", "[" * 100_000


def vocabulary_files():
    """Yield (name, {file: bytes})."""
    vocab = json.dumps({"a": 0, "b": 1, "ab": 2}).encode()
    yield "merge of strangers", {"vocab.json": vocab, "merges.txt": b"#version\na q\n"}
    yield "merge of three", {"vocab.json": vocab, "merges.txt": b"a b c\n"}
    yield "no merges", {"vocab.json": vocab}
    yield "merges no text", {"vocab.json": vocab, "merges.txt": b"\xff\xfe"}
    yield "vocab list", {"vocab.json": b"[]", "merges.txt": b""}
    yield "vocab twice", {"vocab.json": b'{"a": 0, "a": 1}', "merges.txt": b""}
    yield "vocab same id", {"vocab.json": b'{"a": 0, "b": 0}', "merges.txt": b""}
    yield "vocab huge id", {"vocab.json": b'{"a": 99999999999}', "merges.txt": b""}
    yield (
        "strange class",
        {"vocab.json": vocab, "merges.txt": b"a b", "tokenizer_config.json": b'{"tokenizer_class": "Evil"}'},
    )
    yield "vocab.txt twice", {"vocab.txt": b"[UNK]\na\na\n"}
    yield "vocab.txt no unknown", {"vocab.txt": b"a\nb\n", "tokenizer_config.json": b'{"unk_token": 3}'}
    yield "vocab.txt no text", {"vocab.txt": b"\xc3\x28\n"}
    yield "tiktoken", {"x.tiktoken": b"!!!! 0\n"}
    yield "tiktoken without bytes", {"x.tiktoken": b"YQ== 0\nYg== 1\n"}
    yield "tiktoken rank", {"x.tiktoken": b"YQ== 99999999999999\n"}
    yield "added", {"vocab.txt": b"[UNK]\na\n", "added_tokens.json": b'{"x": "y"}'}
    proto = b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02" + b"\n\x08\n\x01a\x15\x00\x00\x80\xbf"
    for n in range(1, len(proto)):
        if n != 16:  # a model with only an unknown token is valid
            yield f"protobuf cut {n}", {"tokenizer.model": proto[:n]}
    flips = [(0, 0x0B), (1, 0xFF), (3, 0xFF), (16, 0x0F), (17, 0x7F), (14, 0x01)]
    for place, value in flips:
        yield f"protobuf byte {place}", {"tokenizer.model": proto[:place] + bytes([value]) + proto[place + 1 :]}
    yield "protobuf endless number", {"tokenizer.model": b"\x08" + b"\xff" * 100}


# -- GGUF --------------------------------------------------------------------------------------------------------------


def gguf_string(value):
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def gguf_field(name, kind, raw):
    return gguf_string(name) + struct.pack("<I", kind) + raw


def gguf_tensor(name="token_embd.weight", shape=(8, 4), kind=0, offset=0):
    return gguf_string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def gguf_bytes(fields=(), tensors=(), data=b"", *, version=3, counts=None, magic=b"GGUF"):
    numbers = counts if counts is not None else (len(tensors), len(fields))
    raw = magic + struct.pack("<IQQ", version, *numbers) + b"".join(fields) + b"".join(tensors)
    return raw + bytes(-len(raw) % 32) + data


def gguf_files():
    """Yield (name, bytes of a model.gguf)."""
    name = gguf_field("general.architecture", 8, gguf_string("llama"))
    good = gguf_bytes([name], [gguf_tensor()], bytes(128))
    for n in range(24):
        yield f"cut {n}", good[: len(good) * n // 24]
    for n, counts in enumerate(
        [(2**63, 1), (1, 2**63), (2**40, 2**40), (10**6, 1), (1, 10**6), (2, 1), (1, 2), (2**32, 0)]
    ):
        yield f"counts {n}", gguf_bytes([name], [gguf_tensor()], bytes(128), counts=counts)
    yield "magic", gguf_bytes([name], [gguf_tensor()], bytes(128), magic=b"GGML")
    for version in (0, 1, 4, 2**31, 0x03000000):
        yield f"version {version}", gguf_bytes([name], [gguf_tensor()], bytes(128), version=version)
    for n, size in enumerate([2**63, 2**40, 10**6, 400]):
        long = gguf_string("general.architecture") + struct.pack("<IQ", 8, size) + b"llama"
        yield f"text {n}", gguf_bytes([long], [gguf_tensor()], bytes(128))
        items = gguf_field("x", 9, struct.pack("<IQ", 4, size) + bytes(8))
        yield f"list {n}", gguf_bytes([name, items], [gguf_tensor()], bytes(128))
        words = gguf_field("x", 9, struct.pack("<IQ", 8, size) + gguf_string("a"))
        yield f"texts {n}", gguf_bytes([name, words], [gguf_tensor()], bytes(128))
    yield (
        "list of lists",
        gguf_bytes([name, gguf_field("x", 9, struct.pack("<IQ", 9, 1) + bytes(64))], [gguf_tensor()], bytes(128)),
    )
    yield "field kind", gguf_bytes([name, gguf_field("x", 77, bytes(8))], [gguf_tensor()], bytes(128))
    yield "field twice", gguf_bytes([name, name], [gguf_tensor()], bytes(128))
    yield "tensor twice", gguf_bytes([name], [gguf_tensor(), gguf_tensor(offset=128)], bytes(256))
    yield (
        "alignment",
        gguf_bytes([name, gguf_field("general.alignment", 4, struct.pack("<I", 0))], [gguf_tensor()], bytes(128)),
    )
    yield (
        "alignment 3",
        gguf_bytes([name, gguf_field("general.alignment", 4, struct.pack("<I", 3))], [gguf_tensor()], bytes(128)),
    )
    for n, shape in enumerate([(), (1,) * 5, (2**62, 4), (2**32, 2**32), (0,), (8, 400), (2**47,)]):
        yield f"shape {n}", gguf_bytes([name], [gguf_tensor(shape=shape)], bytes(128))
    for n, (kind, shape) in enumerate(
        [(999, (8, 4)), (2, (8, 4)), (8, (33, 4)), (4, (32, 1)), (5, (32, 1)), (30, (9999, 9))]
    ):
        yield f"kind {n}", gguf_bytes([name], [gguf_tensor(kind=kind, shape=shape)], bytes(128))
    for n, offset in enumerate([1, 96, 2**40, 2**63]):
        yield f"offset {n}", gguf_bytes([name], [gguf_tensor(offset=offset)], bytes(128))
    yield "overlap", gguf_bytes([name], [gguf_tensor(), gguf_tensor("output.weight", offset=32)], bytes(256))
    yield "no architecture", gguf_bytes([], [gguf_tensor()], bytes(128))
    yield (
        "strange architecture",
        gguf_bytes([gguf_field("general.architecture", 8, gguf_string("evil"))], [gguf_tensor()], bytes(128)),
    )
    yield (
        "architecture no text",
        gguf_bytes([gguf_field("general.architecture", 4, struct.pack("<I", 7))], [gguf_tensor()], bytes(128)),
    )
    yield "no sizes", good
    yield "bytes for a name", gguf_bytes([gguf_field(b"\xff\xfe", 4, bytes(4)), name], [gguf_tensor()], bytes(128))


# -- programs ----------------------------------------------------------------------------------------------------------

GOOD_TEMPLATE = "{{ messages[0].content }}"
HOSTILE_TEMPLATES = """{{ ''.__class__.__mro__[1].__subclasses__() }}
{{ cycler.__init__.__globals__.os.system('touch CANARY') }}
{{ self.__init__.__globals__.__builtins__.__import__('os').system('touch CANARY') }}
{{ namespace.__init__.__globals__['os'].popen('touch CANARY').read() }}
{{ raise_exception.__globals__ }}
{{ strftime_now.__globals__['__builtins__'] }}
{{ (messages|attr('__class__')) }}
{{ messages.__class__.__base__ }}
{{ messages[0].__class__ }}
{{ '%c' % 0 }}{{ ''['__class__'].mro() }}
{{ '{0.__class__}'.format(1) }}
{{ '{0.__class__.__init__.__globals__}'.format_map({}) }}
{{ messages.append(1) }}
{{ messages[0].update({'role': 'x'}) }}
{{ messages[0].pop('role') }}
{{ messages.clear() }}
{% include '/etc/passwd' %}
{% import '/etc/passwd' as x %}
{% from 'os' import system %}
{% extends '/etc/passwd' %}
{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}
{{ range(10**9)|list }}
{{ 'a' * 10**10 }}
{{ ['a'] * 10**10 }}
{{ 10**(10**10) }}
{{ 'a'.center(10**9) }}
{{ 'a'.ljust(10**9) }}
{{ 'a'|center(10**9) }}
{{ '%9999999999d' % 1 }}
{{ '%*d' % (10**9, 1) }}
{{ lipsum(n=10**6) }}
{{ messages|tojson(indent=10**9) }}
{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}
{% set n = namespace(x=['a']) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}
{% set n = namespace(x=2) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}{{ n.x }}
{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}
{% set x = 'aaaaaaaaaa' * 100000 %}{{ x|replace('a', x) }}
{% set x = 'aaaaaaaaaa' * 100000 %}{{ x.replace('a', x) }}
{% set x %}{% for i in range(99999) %}LONG{% endfor %}{% endset %}{{ x }}
{{ '%1000000000d' % 3 }}
{{ undefined_thing.method() }}
{% if %}
{{
{% for %}{% endfor %}
{{ messages|nothing }}
{{ messages is nothing }}
{{ 'x'|map('attr', '__class__')|list }}{{ nothing() }}"""


class Payload:
    """A call that unpickling would run."""

    def __init__(self, *call):
        self.call = call

    def __reduce__(self):
        return self.call


def pickle_files(folder):
    """Yield (name, bytes of a .pt file)."""
    canary = str(folder / "CANARY")
    touch = f"open({canary!r}, 'w').close()"
    for n, call in enumerate([(os.system, (f"touch {canary}",)), (eval, (touch,)), (exec, (touch,))]):
        torch.save({"a": torch.ones(2), "b": Payload(*call)}, folder / "x.pt")
        yield f"torch {n}", (folder / "x.pt").read_bytes()
    yield "plain pickle", pickle.dumps({"a": Payload(os.system, (f"touch {canary}",))})
    torch.save({"a": torch.ones(1).expand(2**32)}, folder / "x.pt")
    yield "one number four billion times", (folder / "x.pt").read_bytes()
    with zipfile.ZipFile(folder / "x.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(10**8))
    yield "zip bomb", (folder / "x.pt").read_bytes()
    torch.save({"a": torch.eye(3).to_sparse()}, folder / "x.pt")
    yield "sparse", (folder / "x.pt").read_bytes()


# -- trials -----------------------------------------------------------------------------------------------------------


class ReaderTrial:
    """Run readers, and record their errors, their time and whatever they run or open."""

    def __init__(self, root):
        self.root, self.results, self.events = root, [], []
        self.is_watching, self.allowed_paths = False, ()
        self.num_folders = 0

    def write_folder(self, files):
        """Write files, given as bytes or text, into a new folder."""
        self.num_folders += 1
        folder = self.root / "tried" / str(self.num_folders)
        folder.mkdir(parents=True)
        for name, raw in files.items():
            (folder / name).write_bytes(raw if isinstance(raw, bytes) else raw.encode("utf-8", "surrogateescape"))
        return folder

    def audit(self, event, args):
        if not self.is_watching:
            return
        if event.startswith(
            ("os.system", "subprocess.", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "socket.")
        ):
            self.events.append(event)
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(args[0]))
            if not path.startswith(self.allowed_paths):
                self.events.append(f"open {path}")

    def run(self, group, name, reader, *, allowed_folder):
        """Call a reader that may open files only in one folder and in Python's libraries."""
        libraries = [os.path.realpath(folder) for folder in sys.path if folder] + [sys.prefix, sys.base_prefix]
        self.allowed_paths = (str(allowed_folder), *libraries, "/usr/lib", "/proc/self/statm")
        before = time.process_time(), sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        self.is_watching = True
        try:
            reader()
            message, error_name = "it was read", ""
        except MonoblockError as error:
            message, error_name = str(error), type(error).__name__
        except BaseException as error:
            message, error_name = f"{type(error).__name__}: {error}"[:300], ""
        self.is_watching = False
        seconds = time.process_time() - before[0] + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before[1]
        self.results.append({"name": f"{group}: {name}", "error": error_name, "message": message, "seconds": seconds})


def try_weights(trial, secret):
    for name, raw in weight_files():
        folder = trial.write_folder({"model.safetensors": raw})
        trial.run("safetensors", name, lambda f=folder: dict(ModelFolder(f).weights), allowed_folder=folder)
    one, two = to_bytes({"a": torch.ones(3)}), to_bytes({"b": torch.ones(3)})
    again = to_bytes({"a": torch.ones(3), "b": torch.ones(1)})
    for name, value in index_files(secret):
        index = value if isinstance(value, str) and name.startswith("text") else json.dumps({"weight_map": value})
        shards = {"one.safetensors": one, "two.safetensors": two, "again.safetensors": again, "one.bin": one}
        folder = trial.write_folder(shards | {"model.safetensors.index.json": index})
        (folder / "link.safetensors").symlink_to(secret)
        (folder / "folder.safetensors").mkdir()
        os.mkfifo(folder / "pipe.safetensors")
        trial.run("index", name, lambda f=folder: dict(ModelFolder(f).weights), allowed_folder=folder)


def try_configs(trial, good_folder):
    config = json.loads((good_folder / "config.json").read_text())
    weights = (good_folder / "model.safetensors").read_bytes()
    for name, text in config_files(config):
        folder = trial.write_folder({"config.json": text, "model.safetensors": weights})
        trial.run("config", name, lambda f=folder: Transformer.from_pretrained(f), allowed_folder=folder)
    for name in ("config.json", "model.safetensors"):
        folder = trial.write_folder({"config.json": json.dumps(config)})
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(good_folder / name)
        trial.run("link", name, lambda f=folder: Transformer.from_pretrained(f), allowed_folder=folder)


def try_tokenizers(trial, good_folder):
    for name, text in tokenizer_files((good_folder / "tokenizer.json").read_text()):
        folder = trial.write_folder({"tokenizer.json": text})
        trial.run("tokenizer", name, lambda f=folder: Tokenizer.from_pretrained(f), allowed_folder=folder)
    folder = trial.write_folder({})
    with open(folder / "tokenizer.json", "wb") as file:
        file.truncate(65 * 2**20)
    trial.run("tokenizer", "65 MB", lambda: Tokenizer.from_pretrained(folder), allowed_folder=folder)
    for name, files in vocabulary_files():
        folder = trial.write_folder(files)
        trial.run("vocabulary", name, lambda f=folder: Tokenizer.from_pretrained(f), allowed_folder=folder)


def try_gguf(trial):
    for name, raw in gguf_files():
        folder = trial.write_folder({"model.gguf": raw})
        trial.run("gguf", name, lambda f=folder: Transformer.from_pretrained(f / "model.gguf"), allowed_folder=folder)


def try_templates(trial):
    for n, template in enumerate(HOSTILE_TEMPLATES.splitlines()):
        text = template.replace("CANARY", str(trial.root / "CANARY")).replace("LONG", "x" * 60_000)
        reader = lambda text=text: render_chat(text, MESSAGES)
        render_chat(GOOD_TEMPLATE, MESSAGES)  # starts the process of the renderer again if the last template ended it
        trial.run("template", f"{n} {template[:40]}", reader, allowed_folder=trial.root / "none")


def try_pickle(name, folder):
    """Try a pickle, which is read by a separate process: starting that one is no violation."""
    before = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
    try:
        pickle_to_safetensors(folder / "pytorch_model.bin", folder / "out.safetensors")
        message, error_name = "it was read", ""
    except MonoblockError as error:
        message, error_name = str(error), type(error).__name__
    seconds = sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) - before
    return {"name": f"pickle: {name}", "error": error_name, "message": message, "seconds": seconds}


def write_good_folder(root):
    """Write a valid model and tokenizer, and read them once, so that no library is imported during the trials."""
    model = Transformer(mb.llama(vocab=31, width=12, depth=2, heads=2, hidden=20, context=16)).eval()
    export_hf(model, root / "good")
    tokenizer = Tokenizer.train("bpe", ["a quick brown fox and a lazy dog " * 9], vocab_size=300)
    tokenizer.save_pretrained(root / "good")
    Transformer.from_pretrained(root / "good")
    Tokenizer.from_pretrained(root / "good")
    render_chat(GOOD_TEMPLATE, MESSAGES)
    return root / "good"


def main(root):
    trial = ReaderTrial(root)
    secret = root / "secret.safetensors"
    secret.write_bytes(to_bytes({"a": torch.ones(3)}))
    good_folder = write_good_folder(root)
    memory_before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sys.addaudithook(trial.audit)
    trial.run("control", "two events", lambda: (open(secret).close(), os.system("true")), allowed_folder=good_folder)
    control, trial.events, trial.results = trial.events, [], []
    try_weights(trial, secret)
    try_configs(trial, good_folder)
    try_tokenizers(trial, good_folder)
    try_gguf(trial)
    try_templates(trial)
    memory_after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for name, raw in pickle_files(root):
        trial.results.append(try_pickle(name, trial.write_folder({"pytorch_model.bin": raw})))
    return {
        "results": trial.results,
        "events": sorted(set(trial.events)),
        "control": control,
        "canary": (root / "CANARY").exists(),
        "megabytes": (memory_after - memory_before) // 1024,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]))))
