"""One object that answers every question of cost: `account("gpt2").parameters`, `.flops(…)`, `.training_bytes(…)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from monoblock.accounting.decoding import Decoding, decoding
from monoblock.accounting.flops import Flops, flops, gpu_hours, rule_of_six, sizes
from monoblock.accounting.memory import TRAINED_IN, TrainingBytes, kv_cache, stored_bytes, training_bytes
from monoblock.accounting.parameters import parameters
from monoblock.accounting.quantized import weight_bytes
from monoblock.accounting.recurrent import recurrent_parameters
from monoblock.config import ModelConfig, RecurrentConfig
from monoblock.presets import preset


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Training on so many tokens: exact work, the 6N estimate, and the time of it."""

    tokens: int
    flops: int
    rule_of_six: int
    gpu_hours: float
    days: float  # on all GPUs together


@dataclass(frozen=True, kw_only=True)
class Account:
    name: str
    config: ModelConfig | RecurrentConfig
    components: Mapping[str, int]
    active_components: Mapping[str, int]  # of the experts, only those that one token passes through

    @property
    def family(self) -> str:
        return "recurrent" if isinstance(self.config, RecurrentConfig) else self.config.family

    @property
    def parameters(self) -> int:
        return sum(self.components.values())

    @property
    def active_parameters(self) -> int:
        return sum(self.active_components.values())

    def flops(self, batch: int = 1, length: int | None = None, target_length: int | None = None) -> Flops:
        """The work of a pass; without a length, over the model's context."""
        return flops(self.config, batch=batch, length=length, target_length=target_length)

    def decoding(
        self,
        *,
        new: int,
        prompt: int = 1,
        batch: int = 1,
        beams: int = 1,
        cached: bool = True,
        source: int | None = None,
        dtype: str = "bf16",
    ) -> Decoding:
        """The cost of writing `new` tokens, greedily or with beams, with the cache or without."""
        return decoding(
            self.config, prompt=prompt, new=new, batch=batch, beams=beams, cached=cached, source=source, dtype=dtype
        )

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Of all weights; the matrices of a quantised model as they are packed, the rest in `dtype`."""
        if isinstance(self.config, RecurrentConfig):
            return stored_bytes(self.parameters, dtype)
        return weight_bytes(self.config, dtype)

    def kv_cache_bytes(
        self, batch: int = 1, length: int | None = None, dtype: str = "bf16", target_length: int | None = None
    ) -> int:
        """Keys and values kept after `length` tokens; an encoder-decoder also keeps those of its source."""
        return stored_bytes(kv_cache(self.config, sizes(self.config, batch, length, target_length)), dtype)

    def training_bytes(
        self,
        batch: int = 1,
        length: int | None = None,
        dtype: str = "bf16",
        optimizer: str = "adamw",
        fused: bool = True,
        checkpointing: bool = False,
        target_length: int | None = None,
        gpus: int = 1,
    ) -> TrainingBytes:
        """Weights, gradients, optimizer and activations of a step with `batch` sequences on each GPU."""
        return training_bytes(
            self.config,
            sizes(self.config, batch, length, target_length),
            dtype=dtype,
            optimizer=optimizer,
            fused=fused,
            checkpointing=checkpointing,
            gpus=gpus,
        )

    def budget(
        self,
        tokens: int,
        *,
        peak: float,
        mfu: float = 0.4,
        gpus: int = 1,
        length: int | None = None,
        target_length: int | None = None,
    ) -> Budget:
        """Training on `tokens` tokens in sequences of `length`, on GPUs of `peak` FLOP/s used to the share `mfu`."""
        one = self.flops(1, length, target_length)
        work = one.training * tokens // one.tokens
        hours = gpu_hours(work, peak=peak, mfu=mfu)
        estimate = rule_of_six(self.active_parameters, tokens)
        return Budget(tokens=tokens, flops=work, rule_of_six=estimate, gpu_hours=hours, days=hours / 24 / gpus)

    def to_dict(
        self,
        *,
        batch: int = 1,
        length: int | None = None,
        target_length: int | None = None,
        dtype: str = "bf16",
        optimizer: str = "adamw",
        gpus: int = 1,
    ) -> dict[str, Any]:
        """Everything as plain numbers; where `dtype` only stores weights, training and cache are counted in bf16."""
        trained_in = dtype if dtype in TRAINED_IN else "bf16"
        training = {
            ("fused" if fused else "plain") + ("_checkpointed" if checkpointing else ""): self.training_bytes(
                batch, length, trained_in, optimizer, fused, checkpointing, target_length, gpus
            ).to_dict()
            for fused in (True, False)
            for checkpointing in (False, True)
        }
        return {
            "name": self.name,
            "family": self.family,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "components": dict(self.components),
            "flops": self.flops(batch, length, target_length).to_dict(),
            "memory": {
                "dtype": dtype,
                "weights": self.weight_bytes(dtype),
                "trained_in": trained_in,
                "optimizer": optimizer,
                "gpus": gpus,
                "training": training,
            },
            "kv_cache_bytes": self.kv_cache_bytes(batch, length, trained_in, target_length),
        }


def account(what: ModelConfig | RecurrentConfig | str, *, name: str | None = None) -> Account:
    """Account for a configuration, or for a preset by its name."""
    config = preset(what) if isinstance(what, str) else what
    if isinstance(config, RecurrentConfig):
        counts = active = recurrent_parameters(config)
    else:
        counts, active = parameters(config), parameters(config, active=True)
    return Account(
        name=name or (what if isinstance(what, str) else "model"),
        config=config,
        components=MappingProxyType(counts),
        active_components=MappingProxyType(active),
    )
