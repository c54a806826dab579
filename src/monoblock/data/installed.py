"""Files inside installed packages.  Nothing of the package is imported: only its data are wanted."""

from importlib.util import find_spec
from pathlib import Path

from monoblock.errors import FileError


def file_in(package: str, *parts: str) -> Path:
    """The path of a file in a package."""
    found = find_spec(package)
    for place in (found.submodule_search_locations or []) if found is not None else []:
        path = Path(place, *parts)
        if path.is_file():
            return path
    raise FileError(f"the package {package} installed here has no {'/'.join(parts)}; install it again")
