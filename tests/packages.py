"""Real vocabularies and checkpoints inside installed packages, found without importing the package."""

from importlib.util import find_spec
from pathlib import Path

import pytest


def package_file(package, *parts):
    """Return the path of a file in a package, or skip the test if it is not installed."""
    spec = find_spec(package)
    locations = list(spec.submodule_search_locations or []) if spec else []
    path = Path(locations[0], *parts) if locations else None
    if path is None or not path.exists():
        pytest.skip(f"{'/'.join(parts)} of the package {package} is not installed here")
    return path
