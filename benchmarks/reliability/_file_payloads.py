"""Write files that try to run a program, to read outside of their folder or to fill the memory."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from _file_mutations import TEMPLATES
from _file_seeds import Seed

CALLS = (
    ("os", "system"), ("posix", "system"), ("subprocess", "call"), ("subprocess", "Popen"), ("builtins", "exec"),
    ("builtins", "eval"), ("runpy", "run_path"), ("importlib", "import_module"), ("torch", "load"), ("shutil", "copy"),
)  # fmt: skip
PATHS = ("../outside.safetensors", "/etc/passwd", "..", "a/../../b", "C:\\x", "\0", "./model.safetensors", "~/x")
CODE_FIELDS: tuple[dict[str, Any], ...] = (
    {"auto_map": {"AutoModel": "evil.Model", "AutoConfig": "evil.Config"}},
    {"_attn_implementation_internal": "evil/kernel"},
    {"trust_remote_code": True, "auto_map": {"AutoConfig": "evil.Config"}},
    {"attn_implementation": "evil/kernel"},
    {"quantization_config": {"quant_method": "evil.Method"}},
    {"architectures": ["evil.Model"]},
)


def write_payloads(root: Path, seeds: list[Seed], canary: Path) -> Iterator[Seed]:
    """Yield a folder for each payload; one that runs creates the file `canary`."""
    by_kind = {seed.kind: seed for seed in seeds}

    def take(kind: str, name: str) -> tuple[Seed, Path]:
        seed = by_kind[kind]
        folder = root / name
        shutil.copytree(seed.folder, folder)
        return seed._replace(kind=f"payload: {name.rpartition('-')[0]}", folder=folder, is_valid=False), folder

    for number, (module, function) in enumerate(CALLS if "pickle" in by_kind else ()):
        for kind in ("zip", "plain"):
            seed, folder = take("pickle", f"pickle-{number}{kind}")
            _write_pickle(folder / "model.pt", module, function, f"touch {canary}", kind == "zip")
            yield seed
    for number, template in enumerate(TEMPLATES):
        seed, folder = take("chat template", f"template-{number}")
        (folder / "chat_template.jinja").write_text(template)
        yield seed
    for number, name in enumerate(PATHS):
        seed, folder = take("shards", f"path-{number}")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        index["weight_map"][next(iter(index["weight_map"]))] = name
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        yield seed
    for number, fields in enumerate(CODE_FIELDS):
        seed, folder = take("hf llama", f"code-{number}")
        config = json.loads((folder / "config.json").read_text()) | fields
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "evil.py").write_text(f"open({str(canary)!r}, 'w')\n")
        yield seed
    for number, (kind, name) in enumerate([(row, name) for row in LINKED for name in by_kind[row].files]):
        seed, folder = take(kind, f"link-{number}")
        outside = root / f"outside-{number}"
        shutil.move(folder / name, outside)
        (folder / name).symlink_to(outside)
        yield seed
    for number, (kind, name, write) in enumerate(BOMBS):
        seed, folder = take(kind, f"bomb-{number}")
        write(folder / name)
        yield seed


LINKED = ("model", "config", "shards", "labels", "adapter", "chat template", "data folder")


def _write_pickle(path: Path, module: str, function: str, argument: str, zipped: bool) -> None:
    """Write a pickle that calls module.function(argument)."""
    text = argument.encode()
    raw = b"\x80\x02c" + f"{module}\n{function}\n".encode() + b"X" + len(text).to_bytes(4, "little") + text + b"\x85R."
    if not zipped:
        path.write_bytes(raw)
        return
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", raw)
        archive.writestr("archive/version", "3\n")


# -- bombs -------------------------------------------------------------------------------------------------------------


def _npz_bomb(path: Path) -> None:
    header = str({"descr": "|u1", "fortran_order": False, "shape": (10**9, 3, 3)}).encode().ljust(117) + b"\n"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name in ("images", "labels"):
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                file.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
                for _ in range(600):
                    file.write(bytes(2**20))


def _gzip_bomb(path: Path) -> None:
    sizes = b"".join(size.to_bytes(4, "big") for size in (600, 1024, 1024))
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(bytes((0, 0, 8, 3)) + sizes)
        for _ in range(600):
            file.write(bytes(2**20))


def _png_bomb(path: Path) -> None:
    def chunk(name: bytes, data: bytes) -> bytes:
        return len(data).to_bytes(4, "big") + name + data + zlib.crc32(name + data).to_bytes(4, "big")

    size = (20_000).to_bytes(4, "big")
    pixels, compress = io.BytesIO(), zlib.compressobj(1)
    for _ in range(20_000):
        pixels.write(compress.compress(bytes(60_001)))
    pixels.write(compress.flush())
    header = chunk(b"IHDR", size + size + bytes((8, 2, 0, 0, 0)))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels.getvalue()) + chunk(b"IEND", b""))


def _postscript(path: Path) -> None:
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n")


def _text(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text)


BOMBS: tuple[tuple[str, str, Callable[[Path], object]], ...] = (
    ("npz", "data.npz", _npz_bomb),
    ("idx", "train-images-idx3-ubyte.gz", _gzip_bomb),
    ("picture png", "a.png", _png_bomb),
    ("picture png", "a.png", _postscript),
    ("recipe", "recipe.toml", _text(".".join(["a"] * 30_000) + " = 1")),
    ("recipe", "recipe.toml", _text('name = "../../../X"\n[data]\ncorpus = "x"\n[model]\nfamily = "gpt"')),
    ("config", "config.json", _text("[" * 10**6)),
    ("squad", "data.json", _text('{"data": [' + "[" * 10**5)),
)
