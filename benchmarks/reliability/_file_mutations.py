"""Damage files at random: their bytes, the structure and the numbers of JSON, headers, links and sizes."""

from __future__ import annotations

import copy
import gzip
import hashlib
import io
import json
import os
import random
import sys
import zipfile
from pathlib import Path
from typing import Any

HOSTILE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 0.5, -0.0, 1e308, 2**31, 2**63, 10**30, 10**80, "", "\0", "../../x", "/etc/passwd",
    "a" * 70_000, "é\ud7ff\u202e", [], [[]], {}, {"": {}}, [0] * 1000, ["x", 1], {"kind": []}, float("nan"),
    float("inf"), "{{ x.__class__ }}", "%s" * 100, "<0x-1>", "1e9999",
    "A", "B",
)  # fmt: skip
MAX_WRITTEN_DEPTH = 20_000  # of JSON; changes may nest values deeper than Python's encoder allows
LINKS = ("link out", "broken link", "circular link")
TOML_VALUES = (
    "[" * 3000 + "]" * 3000, "9" * 5000, "0x" + "f" * 9000, "inf", "nan", '"../../../X"', "1979-05-27", "{a.b.c = 1}",
    "true", "-1", "0", "1e400", "'x'", "[1, 'a', {b=[]}]", '"\\u0000"', '"""',
)  # fmt: skip
TEMPLATES = (
    "{{ messages * 10**9 }}",
    "{{ 9**9**9**9 }}",
    "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(50) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ ('a' * 10**6).replace('a', 'a' * 10**6) }}",
    "{% include '/etc/passwd' %}",
    "{{ lipsum() }}",
    "{{ messages[0].update(role=1) }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ 1 // 0 }}",
    "{{ " + "(" * 900,
    "{{ self._TemplateReference__context }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% raw %}",
)


def damage(path: Path, rng: random.Random, outside: Path | None) -> str:
    """Change one file of a case at random; return what was done.

    outside: where a link may lead that replaces the file; None for no links, since a file that the user names may be
    one.
    """
    if rng.random() < 0.03:
        return _replace_entry(path, rng, outside)
    raw = path.read_bytes()
    changes = [_change_bytes]
    if path.suffix == ".json":
        changes = [_change_json] * 4 + [_change_bytes]
    elif path.suffix == ".safetensors":
        changes = [_change_header] * 3 + [_change_bytes]
    elif path.suffix == ".toml":
        changes = [_change_toml] * 3 + [_change_bytes]
    elif path.suffix == ".jinja":
        changes = [lambda raw, rng: rng.choice(TEMPLATES).encode()] + [_change_bytes] * 2
    elif path.suffix == ".npz":
        changes = [_change_npz] * 2 + [_change_bytes]
    elif path.suffix == ".gz":
        changes = [_change_gzip] * 2 + [_change_bytes]
    elif path.suffix == ".jsonl":
        changes = [_change_line, _change_bytes]
    change = rng.choice(changes)
    path.write_bytes(change(raw, rng))
    return getattr(change, "__name__", "template").strip("_")


def repair_manifest(path: Path) -> None:
    """Write the hash of a changed file of a checkpoint into its manifest, as somebody would who edits a state."""
    manifest_path = path.parent / "manifest.json"
    try:
        manifest = json.loads(manifest_path.read_text())
        raw = path.read_bytes()
        manifest["files"][path.name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        manifest_path.write_text(json.dumps(manifest))
    except (OSError, ValueError, KeyError, TypeError):
        return


def _replace_entry(path: Path, rng: random.Random, outside: Path | None) -> str:
    """Replace a file by a link, a pipe, a folder or nothing."""
    kind = rng.choice(("pipe", "folder", "missing", "empty") + (() if outside is None else LINKS))
    raw = path.read_bytes()
    path.unlink()
    if kind == "link out" and outside is not None:
        outside.write_bytes(raw)
        path.symlink_to(outside)
    elif kind == "broken link":
        path.symlink_to("/nowhere/at/all")
    elif kind == "circular link":
        path.symlink_to(path.name)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    return kind


def _change_bytes(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 5, 50))):
        start = rng.randrange(len(data) + 1) if rng.random() < 0.6 else rng.randrange(min(len(data), 64) + 1)
        stop = min(len(data), start + rng.choice((1, 1, 4, 8, 64)))
        match rng.randrange(8):
            case 0:
                data[start:stop] = rng.randbytes(stop - start)
            case 1:
                del data[start:stop]
            case 2:
                data[start:start] = rng.randbytes(rng.choice((1, 4, 100)))
            case 3:
                data[start:stop] = b"\xff" * (stop - start)
            case 4:
                data[start:stop] = b"\0" * (stop - start)
            case 5:
                del data[start:]
            case 6:
                data[start:start] = data[start:stop] * rng.choice((1, 50))
            case 7:
                data[start:start] = rng.choice(
                    (b"[" * 5000, b"9" * 5000, b"{", b'"', b"\xed\xa0\x80", b"\r\n", b"1e999")
                )
    return bytes(data)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) of every value in a JSON document."""
    places, stack = [], [value]
    while stack and len(places) < 5000:
        item = stack.pop()
        rows = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, child in rows:
            places.append((item, key))
            stack.append(child)
    return places


def _change_value(data: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        places = _places(data)
        if not places:
            return copy.deepcopy(rng.choice(HOSTILE))
        container, key = rng.choice(places)
        match rng.randrange(6):
            case 0 if isinstance(container, dict):
                del container[key]
            case 1 if isinstance(container, dict):
                container[rng.choice(("kind", "type", "x", "", str(key) + "_"))] = container[key]
            case 2:
                deep: Any = 0
                for _ in range(rng.choice((20, 40, 900))):
                    deep = [deep] if rng.random() < 0.5 else {"a": deep}
                container[key] = deep
            case 3 if isinstance(container[key], int | float) and not isinstance(container[key], bool):
                container[key] *= rng.choice((-1, 0, 2, 1000, 10**12, 0.5))
            case _:
                container[key] = copy.deepcopy(rng.choice(HOSTILE))
    return data


def _change_json(raw: bytes, rng: random.Random) -> bytes:
    data = _change_value(json.loads(raw), rng)
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(MAX_WRITTEN_DEPTH)
    try:
        text = json.dumps(data)
    finally:
        sys.setrecursionlimit(limit)
    if rng.random() < 0.05:
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode("utf-8", "surrogatepass")


def _change_line(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.split(b"\n")
    index = rng.randrange(len(lines))
    lines[index] = _change_json(lines[index], rng)
    return b"\n".join(lines)


def _change_header(raw: bytes, rng: random.Random) -> bytes:
    length = int.from_bytes(raw[:8], "little")
    header = _change_json(raw[8 : 8 + length], rng)
    size = len(header) if rng.random() < 0.9 else rng.choice((0, 1, 2**40, 2**64 - 1))
    return size.to_bytes(8, "little") + header + raw[8 + length :]


def _change_toml(raw: bytes, rng: random.Random) -> bytes:
    lines = raw.decode(errors="replace").splitlines()
    index = rng.randrange(len(lines))
    key = lines[index].partition("=")[0].strip() or "x"
    match rng.randrange(5):
        case 0:
            lines[index] = ".".join(["a"] * rng.choice((5, 20, 30_000))) + " = 1"
        case 1:
            lines.insert(index, lines[index])
        case 2:
            lines[index] = f"[{'.'.join(['a'] * rng.choice((2, 40, 9000)))}]"
        case _:
            lines[index] = f"{key} = {rng.choice(TOML_VALUES)}"
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _change_npz(raw: bytes, rng: random.Random) -> bytes:
    """Write one member again with another header, shape or content."""
    import numpy as np

    with zipfile.ZipFile(io.BytesIO(raw)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = rng.choice(sorted(members))
    methods = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2]
    match rng.randrange(5):
        case 0:
            members[name] = _change_bytes(members[name], rng)
        case 1:
            shape = rng.choice(((0,), (2**40,), (-1, 8, 8), (12, 8, 9), (2**31, 2**31), (12,)))
            header = str({"descr": "|u1", "fortran_order": False, "shape": shape}).encode().ljust(117) + b"\n"
            members[name] = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(768)
        case 2:
            count, methods = rng.choice((10**6, 10**8)), [zipfile.ZIP_DEFLATED]
            header = str({"descr": "|u1", "fortran_order": False, "shape": (count, 2, 2)}).encode().ljust(117) + b"\n"
            members[name] = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(4 * count)
        case 3:
            dtype = rng.choice(("O", "S8", "M8[s]", "complex64", "bool", "float16", "i8,f4", "U4"))
            stream = io.BytesIO()
            np.save(stream, np.zeros((12, 8, 8), dtype), allow_pickle=True)
            members[name] = stream.getvalue()
        case 4:
            del members[name]
    result = io.BytesIO()
    with zipfile.ZipFile(result, "w", rng.choice(methods), compresslevel=1) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return result.getvalue()


def _change_gzip(raw: bytes, rng: random.Random) -> bytes:
    data = bytearray(gzip.decompress(raw))
    if rng.random() < 0.4:  # a header that states large sizes, and zeros after it
        count = rng.choice((10**5, 10**7, 3 * 10**8))
        return gzip.compress(bytes(data[:4]) + count.to_bytes(4, "big") + data[8:16] + bytes(min(count, 10**8)), 1)
    return gzip.compress(_change_bytes(bytes(data), rng))
