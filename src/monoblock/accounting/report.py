"""All costs of a model in one object, such as `account("gpt2").parameters`, `.flops(…)` and `.training_bytes(…)`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from monoblock.accounting.activations import lstm_activations, model_activations
from monoblock.accounting.decoding import DecodingCost, decoding_cost
from monoblock.accounting.flops import Flops, flops, gpu_hours, resolve_batch_shape, rule_of_six
from monoblock.accounting.lstm import recurrent_parameters
from monoblock.accounting.memory import (
    TRAINING_DTYPES,
    TrainingBytes,
    activation_bytes,
    kv_cache_bytes,
    optimizer_states,
    stored_bytes,
    weight_bytes,
)
from monoblock.accounting.parallel import plan_ranks
from monoblock.accounting.parameters import count_parameters, model_matrix_weights
from monoblock.accounting.training_plan import DEFAULT_HARDWARE, Hardware, TrainingPlan, plan_training
from monoblock.config.model import ModelConfig, RecurrentConfig
from monoblock.config.parts import CheckpointMode
from monoblock.config.presets import preset
from monoblock.errors import ConfigError

# What `to_dict` adds to the name of a kernel -> the mode of checkpointing, from most to least memory.
CHECKPOINT_ENDINGS: dict[str, CheckpointMode] = {"": False, "_selective": "selective", "_checkpointed": True}


@dataclass(frozen=True, kw_only=True)
class TrainingBudget:
    """The FLOPs and the time of training on `tokens` tokens; `rule_of_six` is the estimate 6 · parameters · tokens."""

    tokens: int
    flops: int
    rule_of_six: int
    gpu_hours: float
    days: float  # on all GPUs together
    cost: float | None = None  # of all GPU hours, if their price is given


@dataclass(frozen=True, kw_only=True)
class Account:
    """The costs of a model, computed from its configuration.

    not_covered: by how many parameters modules have more, or fewer, than the configuration says, because the model is a
        subclass or was changed. They are counted among the parameters, but FLOPs and memory leave them out.
    """

    name: str
    config: ModelConfig | RecurrentConfig
    components: Mapping[str, int]
    active_components: Mapping[str, int]  # counting only the experts that one token uses
    not_covered: Mapping[str, int]

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
        """Compute the FLOPs of a pass over `batch` sequences of `length` tokens, by default the model's context."""
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
    ) -> DecodingCost:
        """Compute the cost of generating `new` tokens after `prompt` tokens; `source` is for an encoder-decoder."""
        return decoding_cost(
            self.config, prompt=prompt, new=new, batch=batch, beams=beams, cached=cached, source=source, dtype=dtype
        )

    def weight_bytes(self, dtype: str = "bf16") -> int:
        """Return the size of all weights in bytes: matrices packed if the model is quantized, others in `dtype`."""
        if isinstance(self.config, RecurrentConfig):
            return stored_bytes(self.parameters, dtype)
        return weight_bytes(self.config, dtype)

    def kv_cache_bytes(
        self, batch: int = 1, length: int | None = None, dtype: str = "bf16", target_length: int | None = None
    ) -> int:
        """Return the size of the key/value cache in bytes after `length` tokens.

        In an encoder-decoder `length` counts source tokens, and the cache also holds `target_length` target tokens.
        """
        shape = resolve_batch_shape(self.config, batch, length, target_length)
        return kv_cache_bytes(self.config, shape, dtype)

    def training_bytes(
        self,
        batch: int = 1,
        length: int | None = None,
        dtype: str = "bf16",
        optimizer: str = "adamw",
        fused: bool = True,
        checkpointing: CheckpointMode = False,
        target_length: int | None = None,
        gpus: int = 1,
    ) -> TrainingBytes:
        """Compute the memory of a training step with `batch` sequences on each GPU.

        Weights, gradients and optimizer states are sharded over `gpus`.  `fused` attention saves no attention weights.
        `checkpointing` is False, True or "selective", as in nn/activation_checkpointing.py.
        """
        if dtype not in TRAINING_DTYPES:
            raise ConfigError(f"dtype={dtype!r} is not for training; write one of {', '.join(TRAINING_DTYPES)}")
        if gpus < 1:
            raise ConfigError(f"gpus={gpus} is too small; write 1 or more")
        shape = resolve_batch_shape(self.config, batch, length, target_length)
        if isinstance(self.config, RecurrentConfig):
            count, matrices = sum(recurrent_parameters(self.config).values()), 0
            saved = lstm_activations(self.config, shape)
        else:
            count, matrices = sum(count_parameters(self.config).values()), model_matrix_weights(self.config)
            saved = model_activations(self.config, shape, fused=fused, checkpointing=checkpointing)
        states = optimizer_states(optimizer, count, matrices) + (0 if dtype == "fp32" else count)  # and master weights
        activations, attention = activation_bytes(saved, dtype)
        return TrainingBytes(
            weights=-(-stored_bytes(count, dtype) // gpus),
            gradients=-(-stored_bytes(count, dtype) // gpus),
            optimizer=-(-4 * states // gpus),
            activations=activations,
            attention_matrices=attention,
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
        price: float | None = None,
    ) -> TrainingBudget:
        """Compute the cost of training on `tokens` tokens in sequences of `length` tokens.

        It runs on `gpus` GPUs of `peak` FLOP/s at a model FLOPs utilization of `mfu`; `price` is that of a GPU hour.
        """
        sequence = self.flops(1, length, target_length)
        total = sequence.training * tokens // sequence.tokens
        hours = gpu_hours(total, peak=peak, mfu=mfu)
        estimate = rule_of_six(self.active_parameters, tokens)
        return TrainingBudget(
            tokens=tokens,
            flops=total,
            rule_of_six=estimate,
            gpu_hours=hours,
            days=hours / 24 / gpus,
            cost=None if price is None else hours * price,
        )

    def plan(
        self,
        strategy: str = "ddp",
        gpus: int = 1,
        *,
        tensor: int | None = None,
        pipeline: int | None = None,
        batch: int = 1,
        length: int | None = None,
        target_length: int | None = None,
        micro_batches: int | None = None,
        checkpointing: CheckpointMode = False,
        optimizer: str = "adamw",
        hardware: Hardware = DEFAULT_HARDWARE,
    ) -> TrainingPlan:
        """Compute the memory, communication and time of a training step on each of `gpus` GPUs.

        `batch` is the number of sequences in a micro-batch on each rank of the data dimension; see training_plan.py.
        `checkpointing` is False, True or "selective", as in nn/activation_checkpointing.py.
        """
        if isinstance(self.config, RecurrentConfig):
            raise ConfigError("plans are for Transformers, but this model is an LSTM")
        return plan_training(
            self.config,
            plan_ranks(
                self.config, strategy, gpus, tensor=tensor, pipeline=pipeline, gpus_per_node=hardware.gpus_per_node
            ),
            batch=batch,
            length=length,
            target_length=target_length,
            micro_batches=micro_batches,
            checkpointing=checkpointing,
            optimizer=optimizer,
            hardware=hardware,
        )

    def to_dict(
        self,
        *,
        batch: int = 1,
        length: int | None = None,
        target_length: int | None = None,
        dtype: str = "bf16",
        optimizer: str = "adamw",
        gpus: int = 1,
    ) -> dict[str, object]:
        """Convert all costs to JSON values.

        If models cannot be trained in `dtype`, as in int8, training and the key/value cache are counted in bf16.
        """
        training_dtype = dtype if dtype in TRAINING_DTYPES else "bf16"
        training = {
            kernel + ending: self.training_bytes(
                batch, length, training_dtype, optimizer, kernel == "fused", checkpointing, target_length, gpus
            ).to_dict()
            for kernel in ("fused", "plain")
            for ending, checkpointing in CHECKPOINT_ENDINGS.items()
        }
        return {
            "name": self.name,
            "family": self.family,
            "parameters": self.parameters,
            "active_parameters": self.active_parameters,
            "components": dict(self.components),
            "not_covered": dict(self.not_covered),
            "flops": self.flops(batch, length, target_length).to_dict(),
            "memory": {
                "dtype": dtype,
                "weights": self.weight_bytes(dtype),
                "trained_in": training_dtype,
                "optimizer": optimizer,
                "gpus": gpus,
                "training": training,
            },
            "kv_cache_bytes": self.kv_cache_bytes(batch, length, training_dtype, target_length),
        }


def account(
    config_or_preset: ModelConfig | RecurrentConfig | str,
    *,
    name: str | None = None,
    not_covered: Mapping[str, int] = MappingProxyType({}),
) -> Account:
    """Return the costs of a model, given by its configuration or by the name of a preset.

    not_covered: by how many parameters modules of a model differ from its configuration.
    """
    config = preset(config_or_preset) if isinstance(config_or_preset, str) else config_or_preset
    if isinstance(config, RecurrentConfig):
        counts = active = recurrent_parameters(config)
    else:
        counts, active = count_parameters(config), count_parameters(config, active=True)
    return Account(
        name=name or (config_or_preset if isinstance(config_or_preset, str) else "model"),
        config=config,
        components=MappingProxyType(_add(counts, not_covered)),
        active_components=MappingProxyType(_add(active, not_covered)),
        not_covered=MappingProxyType(dict(not_covered)),
    )


def _add(counts: Mapping[str, int], more: Mapping[str, int]) -> dict[str, int]:
    return {name: counts.get(name, 0) + more.get(name, 0) for name in (*counts, *more)}
