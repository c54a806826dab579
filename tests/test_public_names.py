"""The public names: sorted, complete, importable, and available without importing torch before it is needed."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import monoblock

ROOT = Path(__file__).parents[1]
PACKAGE = Path(monoblock.__file__).parent


def test_all_is_sorted_and_is_what_dir_shows():
    assert monoblock.__all__ == sorted(set(monoblock.__all__))
    assert set(dir(monoblock)) == {*monoblock.__all__, "__version__"}
    assert len(monoblock.__all__) == (PACKAGE / "__init__.pyi").read_text(encoding="utf-8").count(" as ")


@pytest.mark.parametrize("name", monoblock.__all__)
def test_every_public_name_is_the_object_of_its_module(name):
    value = getattr(monoblock, name)
    module = sys.modules[f"monoblock.{monoblock._HOME[name]}"]
    assert value is getattr(module, name)


def test_no_public_name_is_also_a_module_or_a_folder():
    modules = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert not modules & set(monoblock.__all__), "importing the module would hide the name"


def test_an_unknown_name_raises_an_attribute_error_with_a_suggestion():
    with pytest.raises(AttributeError, match="did you mean 'Transformer'"):
        _ = monoblock.Transfomer
    assert not hasattr(monoblock, "nothing_like_this")


def test_the_version_is_that_of_the_project():
    assert monoblock.__version__ == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


@pytest.mark.parametrize(
    "statement",
    ["import monoblock", "from monoblock import ModelConfig, ConfigError", "from monoblock import PRESETS, gpt"],
)
def test_configurations_never_import_torch(statement):
    heavy = "{'torch', 'numpy', 'rich', 'click'}"
    code = f"import sys\n{statement}\nloaded = {heavy} & set(sys.modules)\nassert not loaded, loaded"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_a_model_is_there_before_the_compiler_of_torch():
    """Importing the compiler takes two seconds, which every command would wait for."""
    code = "import sys, monoblock.model, monoblock.baselines.carried\nassert 'torch._dynamo' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
