"""A Hugging Face model family as data: a template, rules for config fields and weight names, and its classes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monoblock.config.model import HeadConfig, ModelConfig
from monoblock.config.parts import VOCABULARY_HEADS
from monoblock.config.schema import to_dict
from monoblock.errors import ConfigError, FileError
from monoblock.interop.huggingface.field_rules import (
    MISSING,
    ConfigTree,
    FieldRule,
    check_fields,
    config_difference,
    config_to_tree,
    is_harmless,
    read_fields,
    resolve_sizes,
    tree_to_config,
)
from monoblock.interop.rename import Rule


def head_tree(kind: Any, **options: Any) -> ConfigTree:
    return to_dict(HeadConfig(kind=kind, **options))


LM_HEAD = head_tree("language_model")
LM_HEAD_BIAS = head_tree("language_model", bias="learned")
LM_HEAD_FIXED_BIAS = head_tree("language_model", bias="fixed")


def derive(rules: Sequence[FieldRule], *changes: FieldRule, drop: str = "") -> tuple[FieldRule, ...]:
    """Return the rules of another family, with differences.

    changes: rules that are added, and replace those for the same fields.
    drop: the names of fields whose rules are left out, separated by spaces.
    """
    gone = set(drop.split()).union(*(rule.defaults for rule in changes))
    return (*(rule for rule in rules if gone.isdisjoint(rule.defaults)), *changes)


def is_gated(config: ModelConfig) -> bool:
    """Return whether the feed-forward layers of an encoder are gated."""
    assert config.encoder is not None
    return next(config.encoder.layers()).feedforward.gated


@dataclass(frozen=True, kw_only=True)
class Family:
    """How to read and write the config.json and the weights of one model_type.

    `weights` has the weight names of classes with a head; `unprefixed_classes` store the same names without `prefix`.
    """

    model_type: str
    template: ModelConfig  # the structure of the family; its sizes are replaced by those in the file
    fields: Sequence[FieldRule]
    weights: Sequence[Rule]
    classes: Mapping[str, ConfigTree | None]  # heads by class name; the first is the default class
    class_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of a class in some files
    encoder_classes: tuple[str, ...] = ()  # classes of an encoder-decoder family that are its encoder alone
    prefix: str = ""
    unprefixed_classes: tuple[str, ...] = ()
    ignored_weights: tuple[str, ...] = ()  # not needed, though files may have them; `*` is a number
    weight_aliases: Mapping[str, str] = field(default_factory=dict)  # other names of a tensor in some files
    tied_by_default: bool = True  # if a file has no tie_word_embeddings
    field_aliases: Mapping[str, str] = field(default_factory=dict)  # older names of fields
    # (predicate, rules): rules that replace `weights` if the predicate is true for the configuration.
    weight_variants: tuple[tuple[Callable[[ModelConfig], bool], Sequence[Rule]], ...] = ()
    head_weights: Mapping[str, Sequence[Rule]] = field(default_factory=dict)  # by class name; before `weights`
    # A function (tree, fields, tied) that returns the tree, changed if it depends on whether the output is tied.
    apply_tying: Callable[[ConfigTree, Mapping[str, Any], bool], ConfigTree] = lambda tree, fields, tied: tree

    def weight_rules(self, config: ModelConfig, class_name: str) -> tuple[Rule, ...]:
        """Return the weight rules for a class of this family and a configuration."""
        rules = next((variant for applies, variant in self.weight_variants if applies(config)), self.weights)
        return (*self.head_weights.get(class_name, ()), *rules)

    def config_tree(
        self, fields: Mapping[str, Any], class_name: str, harmless: Callable[[str, Any], bool] = is_harmless
    ) -> ConfigTree:
        """Convert the fields of a config.json to our configuration tree; `build_config` sets weight tying later."""
        if class_name not in self.classes:
            known_classes = ", ".join(self.classes)
            raise FileError(
                f"the class {class_name!r} is not supported; the classes of {self.model_type} are {known_classes}"
            )
        renamed = {new: fields[old] for old, new in self.field_aliases.items() if old in fields}
        fields = renamed | {name: value for name, value in fields.items() if name not in self.field_aliases}
        filled = check_fields(self.fields, fields, harmless)
        tree = read_fields(self.fields, filled, self.template, copy.deepcopy(self.classes[class_name]))
        return tree | {"decoder": None, "target": None} if class_name in self.encoder_classes else tree

    def build_config(self, tree: ConfigTree, fields: Mapping[str, Any], *, tied: bool) -> ModelConfig:
        """Convert the tree of these fields to a configuration; `tied`: whether the output is tied to the embedding."""
        tree = self.apply_tying(tree, fields, tied)
        has_vocabulary_head = tree["head"] is not None and tree["head"]["kind"] in VOCABULARY_HEADS
        shared = tree["encoder"] is not None and tree["decoder"] is not None and tree["share"]
        ties = {(False, False): "none", (False, True): "output", (True, False): "source_target"}
        tree["tie"] = ties.get((shared, tied and has_vocabulary_head), "three_way")
        return tree_to_config(tree)

    def write_config(self, config: ModelConfig, class_name: str) -> dict[str, Any]:
        """Convert our configuration to config.json fields; raise ConfigError if the family cannot express it.

        The fields are converted back and compared with the configuration, so that nothing is lost silently.
        """
        tied = config.tie in ("output", "three_way")
        fields = {"architectures": [class_name], "model_type": self.model_type, "tie_word_embeddings": tied}
        try:
            tree = config_to_tree(resolve_sizes(config))
            for rule in self.fields:
                fields |= {name: value for name, value in rule.write(tree).items() if value is not MISSING}
            read_back = self.build_config(self.config_tree(fields, class_name), fields, tied=tied)
        except (KeyError, TypeError, AttributeError, IndexError, ZeroDivisionError, StopIteration) as error:
            raise ConfigError(f"the model's structure differs from that of {self.model_type} models") from error
        except FileError as error:
            raise ConfigError(str(error)) from None
        difference = config_difference(config, read_back)
        if difference is not None:
            raise ConfigError(f"{self.model_type} cannot express {difference}")
        return fields
