"""Read pictures (PNG, JPEG, WebP, GIF, BMP), and folders of them in which each class has a folder of its own.

    pets/cats/*.png, pets/dogs/*.png                    one tenth of each class is for validation (holdout.py)
    pets/train/cats/*.png, …, pets/valid/…, pets/test/… a folder of classes for each split

A picture is untrusted: its header states its size, which is checked before the pixels are decoded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from warnings import warn

from monoblock.data.readers.records import LabelledPicture
from monoblock.errors import FileError, MonoblockError
from monoblock.untrusted_files import open_regular, safe_folder, safe_join

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp")
PICTURE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # in the words of Pillow
MAX_PIXELS = 2**25  # of a picture that is decoded
WEBP_HEADER_BYTES = 30
GRAY_MODES = ("1", "L", "LA", "I;16")  # in the words of Pillow


class PictureSize(NamedTuple):
    channels: int  # 1 if the picture is gray, else 3
    height: int
    width: int


CheckSize = Callable[[int, int], None]  # raises an error for a height and width that the caller cannot use


def read_picture(path: str | Path, channels: int, check_size: CheckSize | None = None) -> NDArray[np.uint8]:
    """Return the pixels of a picture from 0 to 255, of shape (channels, height, width); one channel is gray."""
    import numpy as np

    with _opened(path, check_size) as picture:
        from PIL import ImageOps

        upright = ImageOps.exif_transpose(picture)  # cameras store how the picture is to be turned
        pixels: NDArray[np.uint8] = np.array(upright.convert("L" if channels == 1 else "RGB"))
    return pixels[None] if channels == 1 else np.ascontiguousarray(pixels.transpose(2, 0, 1))


def picture_size(path: str | Path) -> PictureSize:
    """Return the size that the header of a picture states, without decoding it."""
    with _opened(path, None) as picture:
        is_turned = picture.getexif().get(0x0112, 1) >= 5  # the orientation: 5 to 8 swap height and width
        height, width = (picture.width, picture.height) if is_turned else (picture.height, picture.width)
        return PictureSize(1 if picture.mode in GRAY_MODES else 3, height, width)


@contextmanager
def _opened(path: str | Path, check_size: CheckSize | None) -> Iterator[Any]:
    """Open a picture with Pillow after its size is checked; whatever damage raises becomes a FileError of one line."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise FileError(
            f"{path}: reading pictures needs Pillow; run pip install 'monoblock[plot]', or give an .npz file"
        ) from None

    def check(height: int, width: int) -> None:
        if check_size is not None:
            check_size(height, width)
        if height * width > MAX_PIXELS:
            raise FileError(f"{path}: pictures of more than {MAX_PIXELS:,} pixels are not decoded; make it smaller")

    try:
        with open_regular(path) as file:
            size = webp_size(file.read(WEBP_HEADER_BYTES))  # Pillow decodes a WebP file when it opens it
            if size is not None:
                check(*size)
            file.seek(0)
            with Image.open(file, formats=PICTURE_FORMATS) as picture:  # other formats start programs
                check(picture.height, picture.width)
                yield picture
    except MonoblockError:
        raise
    except UnidentifiedImageError:
        raise FileError(f"{path} is not a picture in one of the formats {', '.join(PICTURE_FORMATS)}") from None
    except Exception as problem:  # a damaged picture raises anything, also SyntaxError
        raise FileError(f"{path} cannot be read as a picture: {' '.join(str(problem).split())[:80]}") from problem


def webp_size(header: bytes) -> tuple[int, int] | None:
    """Return the height and width that the first bytes of a WebP file state; None if it is in another format."""
    if header[:4] != b"RIFF" or header[8:12] != b"WEBP":
        return None
    chunk = header[12:16]
    if chunk == b"VP8X":  # 24 bits each, minus one
        return int.from_bytes(header[27:30], "little") + 1, int.from_bytes(header[24:27], "little") + 1
    if chunk == b"VP8L":  # 14 bits each, minus one, after a signature byte
        bits = int.from_bytes(header[21:25], "little")
        return (bits >> 14 & 0x3FFF) + 1, (bits & 0x3FFF) + 1
    if chunk == b"VP8 ":  # 14 bits each, after the frame tag and the start code
        return int.from_bytes(header[28:30], "little") & 0x3FFF, int.from_bytes(header[26:28], "little") & 0x3FFF
    return 0, 0


# -- folders of classes ------------------------------------------------------------------------------------------------


def is_class_folder(path: Path) -> bool:
    """Return whether a folder has folders with pictures, one for each class."""
    return path.is_dir() and any(has_pictures(folder) for folder in _visible(path) if folder.is_dir())


def has_pictures(folder: Path) -> bool:
    """Return whether there is a picture directly in a folder."""
    return any(_is_picture(file) for file in _visible(folder))


def read_class_folders(folder: Path) -> Iterator[LabelledPicture]:
    """Yield the pictures of a folder with their classes, the names of the folders that they lie in.

    They are not decoded yet. Files that are no pictures are left out, and a warning says how many.
    """
    for inside in _visible(folder):
        if not inside.is_dir():
            continue
        files = _visible(safe_folder(folder, inside.name))
        pictures = [file for file in files if _is_picture(file)]
        if len(pictures) < len(files):
            others = next(file.name for file in files if not _is_picture(file))
            warn(
                f"{inside}: {len(files) - len(pictures)} of {len(files)} files, such as {others!r:.40}, are left out: "
                f"pictures are {', '.join(PICTURE_SUFFIXES)} files",
                stacklevel=2,
            )
        yield from (LabelledPicture(str(safe_join(inside, file.name)), inside.name) for file in pictures)


def _is_picture(path: Path) -> bool:
    return path.suffix.lower() in PICTURE_SUFFIXES


def _visible(folder: Path) -> list[Path]:
    """Return what lies in a folder in the order of names, without hidden files such as .DS_Store."""
    return sorted(folder / name for name in os.listdir(folder) if not name.startswith("."))
