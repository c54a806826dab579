"""Find data files inside installed packages without importing the package."""

from importlib.util import find_spec
from pathlib import Path

from monoblock.errors import FileError


def find_package_file(package: str, *parts: str) -> Path:
    """Return the path of the file at `parts` inside an installed package."""
    spec = find_spec(package)
    for location in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(location, *parts)
        if path.is_file():
            return path
    raise FileError(f"the installed package {package} has no {'/'.join(parts)}; reinstall it")
