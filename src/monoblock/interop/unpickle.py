"""A program of its own: tensors out of a .pt or .bin file, into safetensors, in a process that can do nothing else.

It is started by convert.py, as a file and isolated, so it imports nothing of the package. A job comes as JSON on the
standard input, the answer goes as JSON to the standard output. Between them: `torch.load` with `weights_only=True` and
no other way to try; limits on memory, time and files; no network; and whatever Python would tell an audit hook about
(a program started, a socket, a file opened elsewhere) ends it.
"""

import contextlib
import json
import os
import re
import resource
import sys
import zipfile
from typing import Any

LEAST_TORCH = (2, 10)  # before it, files could corrupt memory even so (CVE-2025-32434, CVE-2026-24747)
MOST_TENSORS = 100_000
LONGEST_NAME = 512
GB = 2**30
INSIDE = ("state_dict", "model_state_dict", "model")  # where a training checkpoint keeps the weights
# What the unpickler needs of Python while it runs; everything else that is audited is refused.
HARMLESS = {"object.__getattr__", "object.__setattr__", "object.__delattr__", "code.__new__", "marshal.loads"}
HARMLESS |= {"sys._getframe", "sys._getframemodulename", "compile", "exec", "import", "os.listdir", "os.scandir"}
HARMLESS |= {"pickle.find_class", "mmap.__new__", "builtins.id", "gc.get_objects", "time.sleep"}


class Refused(Exception):
    """Why a file is not read."""


def main() -> None:
    job = json.loads(sys.stdin.read())
    answer: dict[str, Any]
    try:
        answer = {"tensors": convert(job["source"], job["target"])}
    except Refused as problem:
        answer = {"error": str(problem)}
    except MemoryError:
        answer = {"error": "it needs more memory than a file of its size may"}
    except BaseException as problem:
        said = " ".join(str(problem).split())
        wanted = re.search(r"GLOBAL ([\w.]+)", said)
        reason = f"it holds more than tensors, it asks for {wanted[1]}" if wanted else said.split(". ")[0][:160]
        answer = {"error": reason if wanted else f"{type(problem).__name__}: {reason}"}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # nothing that was read gets to run when Python ends


def convert(source: str, target: str) -> int:
    """Read, check, write; the number of tensors."""
    size = os.path.getsize(source)
    zipped = check_zip(source, size)
    import torch
    from safetensors.torch import save_file
    from torch._weights_only_unpickler import Unpickler  # noqa: F401  what is needed later is imported before the limits

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < LEAST_TORCH:
        raise Refused(f"torch {torch.__version__} reads such files unsafely; install 2.10 or later")
    save_file({"warm": torch.zeros(1)}, target)
    confine(size, {os.path.realpath(source), os.path.realpath(target)})
    loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)
    tensors = {name: tensor.detach() for name, tensor in found(loaded, torch).items()}
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > 4 * size + 2**20:
        raise Refused("its tensors claim more than the file holds")
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, target)
    return len(tensors)


def check_zip(source: str, size: int) -> bool:
    """Whether the file is a zip archive; one that would unpack to more than itself is refused."""
    if not zipfile.is_zipfile(source):
        return False
    with zipfile.ZipFile(source) as archive:
        rows = archive.infolist()
    if len(rows) > MOST_TENSORS or sum(row.file_size for row in rows) > size:
        raise Refused("it would unpack to more than itself")
    if any(row.compress_type != zipfile.ZIP_STORED or row.flag_bits & 1 for row in rows):
        raise Refused("its parts are compressed or locked, which torch never writes")
    return True


def confine(size: int, paths: set[str]) -> None:
    """Limits, and an end to whatever else this process might be made to do."""
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else contextlib.nullcontext() as file:
        held = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") if file else 16 * GB
    limits = {
        resource.RLIMIT_AS: held + 4 * size + GB,
        resource.RLIMIT_CPU: 60 + size // (16 * 2**20),
        resource.RLIMIT_FSIZE: 4 * size + 64 * 2**20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for what, most in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a limit that is lower already stays
            resource.setrlimit(what, (most, most))
    leave_network()
    libraries = tuple({os.path.realpath(folder) + os.sep for folder in sys.path if folder})

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in HARMLESS:
            return
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(args[0]))
            reads = not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if path in paths or (reads and path.startswith(libraries)):
                return
        elif event.startswith(("torch.", "cpython.", "numpy.")):
            return
        raise Refused(f"it tried {event}")

    sys.addaudithook(audit)


def leave_network() -> None:
    """A network of its own with nobody on it, where the system lets us have one."""
    import ctypes

    user, network = 0x10000000, 0x40000000
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(network):
            libc.unshare(user | network)


def found(loaded: Any, torch: Any) -> dict[str, Any]:
    """The table of tensors in what was loaded."""
    for key in INSIDE:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
            break
    if not isinstance(loaded, dict) or not loaded:
        raise Refused(f"it holds a {type(loaded).__name__}, not a table of tensors")
    if len(loaded) > MOST_TENSORS:
        raise Refused(f"it holds more than {MOST_TENSORS:,} tensors")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not 0 < len(name) <= LONGEST_NAME or not name.isprintable():
            raise Refused(f"{name!r:.60} is no name of a tensor")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise Refused(f"{name!r:.60} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            raise Refused(f"{name!r:.60} is no plain tensor")
    return loaded


if __name__ == "__main__":
    main()
