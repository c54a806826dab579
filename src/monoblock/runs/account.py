"""`mb.account`: the parameters, FLOPs and memory of a preset, a configuration, a recipe, a model or a stored model."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from monoblock.accounting.report import Account, account as account_config
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import HEADS_WITH_CLASSES
from monoblock.config.presets import PRESETS
from monoblock.errors import ConfigError
from monoblock.interop.model_folder import CONFIG_FILE, ModelFolder, read_any_config
from monoblock.runs.recipe import Overrides, build_model_config, list_recipes, read_recipe, task_of_recipe
from monoblock.untrusted_files import Folder

if TYPE_CHECKING:  # counting needs no torch, unless weights are counted
    from monoblock.baselines.lstm import Recurrent
    from monoblock.model import Transformer

SIZED_TOKENIZERS = ("bpe", "wordpiece", "unigram")  # the size of the vocabulary is set in the recipe
WEIGHT_FILES = ("model.safetensors", "model.safetensors.index.json")
# Stored tensors that are not trained: running statistics of a batch norm, and an output bias that is fixed.
NOT_TRAINED = re.compile(r"(.*\.)?(running_mean|running_var|num_batches_tracked|fixed_bias)")


def account(
    what: ModelConfig | RecurrentConfig | Transformer | Recurrent | str | Path,
    *,
    name: str | None = None,
    overrides: Overrides = (),
) -> Account:
    """Return the costs of a model, computed from its configuration.

    The parameters of a model, or of a folder with weights, are those that are there: what the configuration does not
    describe, such as a layer in a block of your own, is counted as well, and listed in `Account.not_covered`.

    what: a configuration, a model, the name of a preset or of a recipe, or the path of a recipe, a model folder, a
        config.json or a GGUF file.
    name: the name in the report; by default that of the preset or the recipe, or the path.
    overrides: "section.key=value" for a recipe.
    """
    if isinstance(what, ModelConfig | RecurrentConfig):
        return account_config(what, name=name)
    if not isinstance(what, str | Path):
        from monoblock.baselines.lstm import Recurrent
        from monoblock.model import Transformer
        from monoblock.nn.arguments import check_model

        check_model(what, (Transformer, Recurrent), "account", also="a configuration or the name of a preset")
        weights = {path.replace(".base.", "."): weight.numel() for path, weight in what.named_parameters()}  # of LoRA
        return account_config(what.config, name=name, not_covered=_compare(what.config, weights))
    if is_recipe(str(what)):
        return account_config(config_of_recipe(str(what), overrides), name=name or str(what))
    if str(what) in PRESETS or not Folder(what).has(CONFIG_FILE):
        return account_config(read_any_config(str(what)), name=name or str(what))
    folder = ModelFolder(what)
    is_stored = folder.format == "monoblock" and any(map(folder.has, WEIGHT_FILES))
    weights = {}
    if is_stored:  # the headers of the files tell the sizes
        shapes = folder.weights.shapes.items()
        weights = {path: math.prod(shape) for path, shape in shapes if not NOT_TRAINED.fullmatch(path)}
    not_covered = _compare(folder.config, weights) if is_stored else {}
    return account_config(folder.config, name=name or str(what), not_covered=not_covered)


# -- recipes -----------------------------------------------------------------------------------------------------------


def is_recipe(what: str) -> bool:
    """Return whether this is a recipe: a TOML file, or the name of a recipe that is not that of a preset or a file."""
    return what.endswith(".toml") or (what not in PRESETS and what in list_recipes() and not Path(what).exists())


def config_of_recipe(what: str, overrides: Overrides = ()) -> ModelConfig | RecurrentConfig:
    """Return the configuration of the model that a recipe trains; raise ConfigError if only its data tell a size."""
    recipe = read_recipe(what, overrides)
    has_size = recipe.tokenizer.kind in SIZED_TOKENIZERS and not recipe.tokenizer.folder
    keys = {"vocab": not has_size and recipe.model.get("family") != "vit"}
    keys["classes"] = task_of_recipe(recipe).head in HEADS_WITH_CLASSES
    keys["image"] = recipe.model.get("family") == "vit"
    if "folder" not in recipe.model and "preset" not in recipe.model:
        missing = [f"model.{key}=…" for key, is_needed in keys.items() if is_needed and key not in recipe.model]
        if missing:
            raise ConfigError(
                f"the recipe {what} does not say all sizes of its model, which follow from its data; give "
                f"{' '.join(missing)} as well, or the folder of a run"
            )
    return build_model_config(recipe, recipe.tokenizer.vocab if has_size else None)


# -- weights that are there --------------------------------------------------------------------------------------------


def _compare(config: ModelConfig | RecurrentConfig, weights: Mapping[str, int]) -> dict[str, int]:
    """Return by how many parameters modules have more, or fewer, than the configuration says: {"decoder.*.extra": 99}.

    weights: the number of elements of each weight that is there.
    """
    is_quantized = isinstance(config, ModelConfig) and config.quantize is not None  # its matrices are packed
    if is_quantized or sum(weights.values()) == account_config(config).parameters:
        return {}
    from monoblock.baselines.lstm import Recurrent
    from monoblock.interop.weights import build_on_meta
    from monoblock.model import Transformer

    kind: Any = Transformer if isinstance(config, ModelConfig) else Recurrent
    plain = build_on_meta(kind, config, 2**31)
    expected = {name: weight.numel() for name, weight in plain.named_parameters()}
    counts: Counter[str] = Counter()
    for weight in dict.fromkeys((*expected, *weights)):
        difference = weights.get(weight, 0) - expected.get(weight, 0)
        module = weight.rpartition(".")[0] or weight
        counts[re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)] += difference
    return {module: count for module, count in counts.items() if count}
