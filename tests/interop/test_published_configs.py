"""The config.json of published checkpoints: all are read, a model is built from each, and others are refused plainly.

data/published_configs.jsonl has one checkpoint a line: the whole file, where it was found and, if a page or its name
states one, its number of parameters.  A name such as "owner/copy (owner/original)" is a published copy or fine-tuned
model, whose file was found, and the checkpoint it was made from.  Names that are only nominal, such as falcon-40b with
41.3 billion parameters, are not listed as counts.  data/refused_configs.jsonl has checkpoints that cannot be read, and
a word of the reason.
"""

import json
import re
import warnings
from pathlib import Path

import pytest
import torch

from monoblock.accounting.report import account
from monoblock.errors import FileError, InputError, MonoblockError
from monoblock.interop.huggingface.field_rules import is_harmless
from monoblock.interop.huggingface.load import FAMILIES, config_from_hf, find_family
from monoblock.model import Transformer

DATA = Path(__file__).with_name("data")


def read_table(name):
    rows = [json.loads(line) for line in (DATA / name).read_text(encoding="utf-8").splitlines()]
    return {row["name"]: row for row in rows}


PUBLISHED, REFUSED = read_table("published_configs.jsonl"), read_table("refused_configs.jsonl")
UNITS = {"M": 10**6, "B": 10**9}


def printed_count(text):
    """Return a printed count, such as 8.2B, and the value of its last digit."""
    number, unit = text[:-1], UNITS[text[-1]]
    return float(number) * unit, unit / 10 ** len(number.partition(".")[2])


def count_parameters(model):
    computed = set(getattr(model, "_keys_to_ignore_on_save", None) or ())  # tables of transformers that are not stored
    return sum(weight.numel() for name, weight in model.named_parameters() if name not in computed)


def test_the_table_has_at_least_eighty_checkpoints_with_their_sources():
    assert len(PUBLISHED) >= 80
    assert all(re.match(r"https://|github\.com/", row["source"]) for row in (PUBLISHED | REFUSED).values())
    assert len({find_family(row["config"])[0].model_type for row in PUBLISHED.values()}) >= 30
    assert sum("parameters" in row for row in PUBLISHED.values()) >= 40


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_configuration_is_read_and_its_model_has_the_published_size(name):
    row = PUBLISHED[name]
    config = config_from_hf(row["config"])
    with torch.device("meta"):
        count = count_parameters(Transformer(config))
    assert count == account(config).parameters
    if "parameters" in row:
        stated, last_digit = printed_count(row["parameters"])
        assert abs(count - stated) < last_digit


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_a_model_of_the_same_size_from_a_published_configuration(name):
    transformers = pytest.importorskip("transformers")
    fields = PUBLISHED[name]["config"]
    config = config_from_hf(fields)
    with warnings.catch_warnings(), torch.device("meta"):
        warnings.simplefilter("ignore")
        cls = getattr(transformers, find_family(fields)[1])
        theirs = count_parameters(cls(cls.config_class.from_dict(dict(fields))))
    # The class of T5 ties the output even if the file says otherwise, until it finds a separate output in the weights.
    separate = fields["vocab_size"] * fields["d_model"] if "T5For" in cls.__name__ and config.tie != "three_way" else 0
    assert account(config).parameters == theirs + separate


@pytest.mark.parametrize("name", REFUSED)
def test_a_configuration_that_cannot_be_read_is_refused_in_one_line(name):
    row = REFUSED[name]
    with pytest.raises(MonoblockError, match=re.escape(row["refused_for"])) as error:
        config_from_hf(row["config"])
    assert "\n" not in str(error.value)


# -- unknown fields ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "harmless"),
    [
        ("use_mrope", False, True),
        ("use_mrope", True, False),
        ("rope_interleaved", False, True),
        ("rope_interleaved", True, False),
        ("is_llama_config", True, True),
        ("_num_labels", 3, True),
        ("router_scale", None, True),
        ("router_scale", 0.0, False),
        ("extra_layers", 0, False),
        ("extra_layers", [], True),
        ("extra_layers", [3], False),
        ("positions", "", True),
        ("positions", "spiral", False),
        ("position_embedding_type", "absolute", True),
        ("position_embedding_type", "relative_key", False),
        ("quantization_config", {}, True),
        ("quantization_config", {"bits": 4}, False),
        ("is_decoder", True, False),
    ],
)
def test_an_unknown_field_is_harmless_if_it_is_off_or_bookkeeping(name, value, harmless):
    assert is_harmless(name, value) is harmless


def test_ignored_fields_are_read_as_if_the_file_did_not_have_them():
    row = REFUSED["humain-ai/ALLaM-7B-Instruct-preview"]
    with pytest.raises(FileError, match=r"write ignore_fields=\['internal_version'\], or monoblock convert"):
        config_from_hf(row["config"])
    without = {name: value for name, value in row["config"].items() if name != "internal_version"}
    assert config_from_hf(row["config"], ["internal_version"]) == config_from_hf(without)
    with pytest.raises(InputError, match="has no field 'internal_versoin'; did you mean 'internal_version'"):
        config_from_hf(row["config"], ["internal_versoin"])


def test_a_class_name_decides_the_family_of_an_old_file_and_is_of_one_family():
    classes = [name for family in FAMILIES.values() for name in family.classes]
    assert len(classes) == len(set(classes))
    fields = PUBLISHED["deepset/gbert-large (without model_type)"]["config"]
    assert find_family(fields)[0].model_type == "bert"
    with pytest.raises(FileError, match="model_type=None is none of the"):
        find_family({"architectures": ["WeatherModel"]})
