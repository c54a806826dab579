"""A separate program that converts a .pt or .bin file to safetensors in a sandboxed process.

convert.py starts this program in Python's isolated mode, so it imports nothing from the package.  It reads a job as
JSON from standard input and writes the result as JSON to standard output.  The .pt or .bin file is loaded only with
`torch.load(weights_only=True)`, with limits on memory, time and files and without a network.  An audit hook stops every
other action, such as starting a program or opening a socket or another file.
"""

import contextlib
import io
import json
import os
import re
import resource
import sys
import warnings
import zipfile
from typing import Any

MIN_TORCH = (2, 10)  # in earlier versions weights_only was not safe (CVE-2025-32434, CVE-2026-24747)
MAX_TENSORS = 100_000
MAX_NAME_LENGTH = 512
GB = 2**30
STATE_DICT_KEYS = ("state_dict", "model_state_dict", "model")  # where a training checkpoint keeps the weights
# Audit events of Python that loading a file causes; every other event is refused.
ALLOWED_AUDIT_EVENTS = {
    "object.__getattr__", "object.__setattr__", "object.__delattr__", "code.__new__", "marshal.loads", "sys._getframe",
    "sys._getframemodulename", "compile", "exec", "import", "os.listdir", "os.scandir", "pickle.find_class",
    "mmap.__new__", "builtins.id", "gc.get_objects", "time.sleep",
}  # fmt: skip


class UnsafeFileError(Exception):
    """The file is refused, for the reason in the message."""


def main() -> None:
    warnings.simplefilter("ignore")  # to print one, Python would open the source that warns
    job = json.loads(sys.stdin.read())
    result: dict[str, Any]
    try:
        result = {"tensors": convert_file(job["source"], job["target"])}
    except UnsafeFileError as error:
        result = {"error": str(error)}
    except MemoryError:
        result = {"error": "reading it needs more memory than a file of its size should"}
    except BaseException as error:
        message = " ".join(str(error).split())
        forbidden = re.search(r"GLOBAL ([\w.]+)", message)
        if forbidden:
            result = {"error": f"it contains more than tensors: it would call {forbidden[1]}"}
        else:
            result = {"error": f"{type(error).__name__}: {message.split('. ')[0][:160]}"}
    sys.stdout.write(json.dumps(result))
    sys.stdout.flush()
    os._exit(0)  # skip Python's shutdown, which could run code of loaded objects


def convert_file(source: str, target: str) -> int:
    """Load the pickle `source`, check it and write its tensors to `target`; return the number of tensors."""
    size = os.path.getsize(source)
    import torch
    from safetensors.torch import save_file

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if version < MIN_TORCH:
        raise UnsafeFileError(f"torch {torch.__version__} cannot load such files safely; install torch 2.10 or later")
    import_lazy_modules(torch)
    save_file({"warm": torch.zeros(1)}, target)  # imports what writing needs, before the sandbox forbids it
    sandbox_process(size, {os.path.realpath(source), os.path.realpath(target)})
    zipped = check_zip(source, size)
    loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=zipped)
    tensors = {name: tensor.detach() for name, tensor in extract_tensors(loaded, torch).items()}
    if sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) > 4 * size + 2**20:
        raise UnsafeFileError("its tensors claim more bytes than the file holds")
    save_file(separate_tensors(tensors), target)
    return len(tensors)


def separate_tensors(tensors: dict[str, Any]) -> dict[str, Any]:
    """Copy tensors that share the memory of another or are not contiguous, which safetensors refuses; keep the rest."""
    separate, used = {}, set()
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        can_stay = tensor.is_contiguous() and address not in used
        separate[name] = tensor if can_stay else tensor.contiguous().clone()
        used.add(address)
    return separate


def import_lazy_modules(torch: Any) -> None:
    """Read small files of both formats, so that reading imports nothing in the sandbox."""
    "".encode("cp437")  # of the names in zip archives
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save({"w": torch.zeros(1)}, stream, _use_new_zipfile_serialization=zipped)
        stream.seek(0)
        torch.load(stream, map_location="cpu", weights_only=True)


def check_zip(source: str, size: int) -> bool:
    """Return whether the file is a zip archive; refuse an archive that would unpack to more bytes than it has."""
    if not zipfile.is_zipfile(source):
        return False
    with zipfile.ZipFile(source) as archive:
        members = archive.infolist()
    if len(members) > MAX_TENSORS or sum(member.file_size for member in members) > size:
        raise UnsafeFileError("it would unpack to more bytes than it has")
    if any(member.compress_type != zipfile.ZIP_STORED or member.flag_bits & 1 for member in members):
        raise UnsafeFileError("it is a zip archive with compressed or encrypted members, which torch never writes")
    return True


def sandbox_process(size: int, paths: set[str]) -> None:
    """Limit the resources of this process, and refuse every action except reading and writing `paths`."""
    with open("/proc/self/statm") if os.path.exists("/proc/self/statm") else contextlib.nullcontext() as file:
        address_space = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") if file else 16 * GB
    limits = {
        resource.RLIMIT_AS: address_space + 4 * size + GB,
        resource.RLIMIT_CPU: 60 + size // (16 * 2**20),
        resource.RLIMIT_FSIZE: 4 * size + 64 * 2**20,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for kind, limit in limits.items():
        with contextlib.suppress(ValueError, OSError):  # a lower limit is set already
            resource.setrlimit(kind, (limit, limit))
    isolate_network()
    libraries = tuple({os.path.realpath(folder) + os.sep for folder in sys.path if folder})

    def audit(event: str, args: tuple[Any, ...]) -> None:
        if event in ALLOWED_AUDIT_EVENTS:
            return
        if event == "open" and isinstance(args[0], (str, bytes)):
            path = os.path.realpath(os.fsdecode(args[0]))
            read_only = not (args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if path in paths or (read_only and path.startswith(libraries)):
                return
        elif event.startswith(("torch.", "cpython.", "numpy.")):
            return
        raise UnsafeFileError(f"loading it attempted a forbidden action: {event}")

    sys.addaudithook(audit)


def isolate_network() -> None:
    """Move this process to a network namespace without any connection, if the operating system permits."""
    import ctypes

    CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
    with contextlib.suppress(Exception):
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.unshare(CLONE_NEWNET):
            libc.unshare(CLONE_NEWUSER | CLONE_NEWNET)


def extract_tensors(loaded: Any, torch: Any) -> dict[str, Any]:
    """Return the state_dict in a loaded object; raise UnsafeFileError unless it contains only plain tensors."""
    for key in STATE_DICT_KEYS:
        if isinstance(loaded, dict) and isinstance(loaded.get(key), dict):
            loaded = loaded[key]
            break
    if not isinstance(loaded, dict) or not loaded:
        raise UnsafeFileError(f"it contains a {type(loaded).__name__}, not a dict of tensors")
    if len(loaded) > MAX_TENSORS:
        raise UnsafeFileError(f"it contains more than {MAX_TENSORS:,} tensors, which is the limit")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH or not name.isprintable():
            raise UnsafeFileError(f"{name!r:.60} is not a valid tensor name")
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise UnsafeFileError(f"{name!r:.60} is a {type(tensor).__name__}, not a tensor")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_complex():
            raise UnsafeFileError(f"{name!r:.60} is not a plain tensor, but sparse, quantized, complex or without data")
    return loaded


if __name__ == "__main__":
    main()
