"""Read labelled images: folders of pictures, .npz archives, and the files of MNIST.

    pets/cats/*.png, pets/dogs/*.png                    one tenth of each class is for validation (by_path.py)
    pets/train/cats/*.png, …, pets/valid/…, pets/test/… a folder of classes for each split

A file is untrusted: its header states its size, which is checked before memory is allocated and pixels are decoded.
"""

from __future__ import annotations

import gzip
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, cast
from warnings import warn

from monoblock.data.readers.records import LabelledImage, LabelledPicture
from monoblock.errors import FileError, MonoblockError
from monoblock.untrusted_files import check_expansion, open_regular, safe_folder, safe_join

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# -- pictures, and folders of them with a folder for each class --------------------------------------------------------

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


# -- archives of numpy -------------------------------------------------------------------------------------------------

READ_BYTES = 2**20


def read_images(path: str | Path) -> Iterator[LabelledImage]:
    """Yield the labelled images of a .npz file with the arrays "images" and "labels".

    "images" has shape (count, height, width), (count, channels, height, width) or (count, height, width, channels), and
    "labels" has shape (count,).
    """
    import numpy as np

    images, labels = _load_arrays(path)
    images = channels_first(images)
    check_pixel_range(images, path)
    scale = float(np.iinfo(images.dtype).max) if images.dtype.kind == "u" else 1.0
    for pixels, label in zip(images, labels, strict=True):
        yield LabelledImage((pixels / scale).astype(np.float32).reshape(-1, *images.shape[-2:]), int(label))


def channels_first(images: NDArray[Any]) -> NDArray[Any]:
    """Return images of shape (count, height, width, channels) as (count, channels, height, width), others unchanged."""
    is_last = images.ndim == 4 and images.shape[-1] in (1, 3) and images.shape[1] not in (1, 3)
    return images.transpose(0, 3, 1, 2) if is_last else images


def read_arrays(path: str | Path, names: Sequence[str]) -> list[NDArray[Any]]:
    """Read arrays of a .npz file by their names; their headers state their sizes, which are checked before reading."""
    arrays: list[NDArray[Any]] = []
    try:
        with open_regular(path) as file, zipfile.ZipFile(file) as archive:
            members = {member.filename: member for member in archive.infolist()}
            for name in names:
                if f"{name}.npy" not in members:
                    example = ", ".join(f"{name}=…" for name in names)
                    raise FileError(f"{path} lacks the array {name!r}; save the file with np.savez(path, {example})")
                member = members[f"{name}.npy"]
                check_expansion(path, sum(array.nbytes for array in arrays) + member.file_size)
                if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise FileError(f"{path} is not a .npz file of numpy: {name!r} is compressed in another way")
                with archive.open(member) as stream:
                    arrays.append(_read_npy(stream, member.file_size))
    except FileError:
        raise
    except Exception as problem:  # damage shows in many ways: zlib.error, struct.error, SyntaxError, …
        reason = " ".join(str(problem).split())[:80]
        raise FileError(f"{path} is not a .npz file of plain arrays: {reason or type(problem).__name__}") from problem
    return arrays


def _read_npy(stream: IO[bytes], size: int) -> NDArray[Any]:
    """Read an array from a .npy file of `size` bytes; raise ValueError unless its header states that size."""
    import numpy as np

    versions = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    version = np.lib.format.read_magic(stream)
    if version not in versions:
        raise ValueError(f"the version {version} of its header is not known")
    shape, fortran_order, dtype = versions[version](stream)
    if dtype.hasobject or not all(type(axis) is int and axis >= 0 for axis in shape):
        raise ValueError("it has Python objects, or a negative size")  # objects would be unpickled
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes > size:
        raise ValueError(f"its header states {nbytes:,} bytes, but the file has {size:,}")
    raw = np.empty(nbytes, np.uint8)
    for start in range(0, nbytes, READ_BYTES):  # the archive would copy what it reads at once
        chunk = stream.read(min(READ_BYTES, nbytes - start))
        raw[start : start + len(chunk)] = np.frombuffer(chunk, np.uint8)
        if len(chunk) < min(READ_BYTES, nbytes - start):
            raise ValueError("it ends early")
    order: Literal["F", "C"] = "F" if fortran_order else "C"
    return raw.view(dtype).reshape(shape, order=order)


def _load_arrays(path: str | Path) -> tuple[NDArray[Any], NDArray[Any]]:
    images, labels = read_arrays(path, ("images", "labels"))
    if images.ndim not in (3, 4) or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
        shapes = f"images of shape {images.shape} and {labels.dtype} labels of shape {labels.shape}"
        raise FileError(
            f"{path} holds {shapes}; give images of shape (count, height, width) or (count, channels, height, width) "
            f"and integer labels of shape (count,)"
        )
    if images.dtype.kind not in "uf" or not len(images):
        shape = f"{images.shape} and dtype {images.dtype}"
        raise FileError(
            f"{path} holds images of shape {shape}; give at least one image, as uint8 or as floats from 0 to 1"
        )
    return images, labels


def check_pixel_range(images: NDArray[Any], path: str | Path) -> None:
    """Raise FileError if float pixels lie outside [0, 1] or are NaN."""
    if images.dtype.kind == "f" and not ((images >= 0) & (images <= 1)).all():  # NaN fails both comparisons
        low, high = images.min(), images.max()
        raise FileError(
            f"{path}: pixels range from {low:g} to {high:g}; write floats from 0 to 1, or uint8 from 0 to 255"
        )


# -- IDX, the format of MNIST (LeCun et al. 1998) ----------------------------------------------------------------------
# A file begins with the four bytes 00 00 08 n, where 08 is the code of unsigned bytes and n the number of axes.  The
# sizes of the n axes follow as big-endian 32-bit integers, then the data.

IMAGES, LABELS = "images", "labels"
IMAGE_FILE_SUFFIXES = tuple(f"-images{dash}idx3-ubyte{gz}" for dash in "-." for gz in ("", ".gz"))
UINT8_TYPE_CODE = 8  # the code of unsigned bytes in an IDX header
MAX_DEFLATE_RATIO = 1032  # the highest compression ratio that deflate can reach


def is_idx_images(path: Path) -> bool:
    """Return whether a file is named like train-images-idx3-ubyte.gz."""
    return path.name.endswith(IMAGE_FILE_SUFFIXES)


def labels_path(path: Path) -> Path:
    """Return the path of the labels for a file of images.

    The labels of train-images-idx3-ubyte.gz are in train-labels-idx1-ubyte.gz.
    """
    stem, _, ending = path.name.rpartition(IMAGES)
    return path.with_name(f"{stem}{LABELS}{ending.replace('idx3', 'idx1')}")


def read_idx(path: str | Path) -> Iterator[LabelledImage]:
    """Yield the images of a file with their labels, which are read from the file at `labels_path(path)`."""
    import numpy as np

    path = Path(path)
    images = read_idx_array(path, ndim=3)
    labels = read_idx_array(safe_join(path.parent, labels_path(path).name), ndim=1)
    if len(images) != len(labels):
        raise FileError(
            f"{path} holds {len(images)} images, but {labels_path(path).name} holds {len(labels)} labels; "
            f"give one label for each image"
        )
    for image, label in zip(images, labels.tolist(), strict=True):
        yield LabelledImage(image[None].astype(np.float32) / np.float32(255), label)  # (1, height, width)


def read_idx_array(path: Path, ndim: int) -> NDArray[np.uint8]:
    """Read an IDX file of unsigned bytes with `ndim` axes into an array; the header gives its shape."""
    import numpy as np

    try:
        with open_regular(path) as raw_file, gzip.open(raw_file) if path.suffix == ".gz" else raw_file as file:
            shape = _read_shape(cast(BinaryIO, file), path, ndim)
            size = math.prod(shape)
            if size > path.stat().st_size * (MAX_DEFLATE_RATIO if path.suffix == ".gz" else 1):
                raise FileError(f"{path} is too short for the {'×'.join(map(str, shape))} bytes that its header states")
            check_expansion(path, size)
            raw = file.read(size + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as problem:
        raise FileError(f"{path} is not a complete .gz file: {problem!s:.60}") from None
    except OSError as problem:
        raise FileError(f"{path} cannot be read: {problem.strerror or problem}") from None
    if len(raw) != size:
        comparison = "more" if len(raw) > size else "fewer"
        raise FileError(f"{path} holds {comparison} bytes than the {'×'.join(map(str, shape))} that its header states")
    return np.frombuffer(raw, np.uint8).reshape(shape)


def _read_shape(file: BinaryIO, path: Path, ndim: int) -> tuple[int, ...]:
    header = file.read(4 + 4 * ndim)
    if len(header) < 4 + 4 * ndim or header[:4] != bytes((0, 0, UINT8_TYPE_CODE, ndim)):
        axes = f"{ndim} ax{'i' if ndim == 1 else 'e'}s"
        raise FileError(f"{path} is not an IDX file of bytes with {axes}: its header is wrong")
    shape = tuple(int.from_bytes(header[start : start + 4], "big") for start in range(4, 4 + 4 * ndim, 4))
    if not all(shape):
        raise FileError(f"{path} states the shape {'×'.join(map(str, shape))}; no size may be 0")
    return shape
