"""Files inside installed packages: real vocabularies and checkpoints. A test that needs one says plainly when it is not
there; nothing of the package is imported."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def package_file(package, *parts):
    """The path of a file in a package, or the test is skipped."""
    found = find_spec(package)
    places = list(found.submodule_search_locations or []) if found else []
    path = Path(places[0], *parts) if places else None
    if path is None or not path.exists():
        pytest.skip(f"{'/'.join(parts)} of the package {package} is not installed here")
    return path
