"""Plan a training run on many GPUs: memory, communication and time of a step on each rank, GPU hours and money.

With n ranks in a group, and rings, which send every element as seldom as possible, a rank sends

    all-reduce              2 (n-1)/n of the tensor
    all-gather              (n-1)/n of the gathered tensor
    reduce-scatter          (n-1)/n of the tensor before it is scattered
    point to point          the tensor

    ddp       an all-reduce of the fp32 gradients, once a step
    fsdp      an all-gather of the 16-bit weights in the forward and again in the backward pass, and a reduce-scatter of
              the fp32 gradients, for every micro-batch
    tp        in every block an all-reduce of the 16-bit hidden states after attention (and cross-attention) and after
              the feed-forward network, and of their gradients in the backward pass; checkpointing repeats those of the
              forward pass, also if it is selective, because it keeps the parts of a sum but not the sum; one of the
              embedding in the forward pass, one of the head in the backward pass.  The last all-reduce of a block is
              always counted as repeated, but without dropout or a norm after it torch stops the recomputation before it
    pp        for every micro-batch the hidden states to the next stage, and their gradients to the stage before

The time of a step, with m micro-batches and p pipeline stages:

    compute      the FLOPs of the forward and backward pass on a rank, with checkpointing also those of the recomputed
                 blocks, at the peak speed times `utilization`; selective checkpointing recomputes almost no matrix
                 product, and the time of norms, activation functions and dropout is not modelled
    exposed      the time of transfers that the rank waits for: those of tensor parallelism and pipelines fully, those
                 of fsdp as far as they take longer than the computation, and those of ddp as far as they take longer
                 than the backward pass of the last micro-batch
    bubble       (p-1)/(m+p-1) of the time, in which a pipeline stage waits for the first and after the last micro-batch
    step         (compute + exposed) / (1 - bubble), but the exposed time of ddp and fsdp is added after the division
    mfu          the FLOPs of the model, without recomputation, over step × peak × GPUs
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from monoblock.accounting.activations import block_mode, recomputes_scores
from monoblock.accounting.flops import BatchShape, Flops, block_flops, flops
from monoblock.accounting.fused_loss import fuses_loss
from monoblock.accounting.parallel import GPUS_PER_NODE, ParallelPlan, split_stages
from monoblock.accounting.parameters import count_blocks
from monoblock.accounting.rank_memory import RankMemory, rank_memory
from monoblock.config.model import ModelConfig
from monoblock.config.parts import CheckpointMode
from monoblock.errors import InputError


@dataclass(frozen=True)
class Transfer:
    """What a rank sends along one dimension of the plan in a step."""

    dimension: str
    operation: str
    bytes: int
    between_nodes: bool
    overlaps: bool  # whether it happens while the rank computes

    def seconds(self, intra_bandwidth: float, inter_bandwidth: float) -> float:
        """Return the time at a bandwidth in bytes per second of one GPU, within a node and between nodes."""
        return self.bytes / (inter_bandwidth if self.between_nodes else intra_bandwidth)


def all_reduce_bytes(size: int, ranks: int) -> int:
    return 2 * size * (ranks - 1) // ranks


def all_gather_bytes(size: int, ranks: int) -> int:
    """Return the bytes that a rank sends in an all-gather or a reduce-scatter of `size` bytes."""
    return size * (ranks - 1) // ranks


def step_transfers(
    config: ModelConfig,
    shape: BatchShape,
    plan: ParallelPlan,
    *,
    checkpointing: CheckpointMode = False,
    micro_batches: int = 1,
    gpus_per_node: int,
) -> list[Transfer]:
    """Return what a rank of the largest pipeline stage sends in a step of `micro_batches` passes."""
    parameters = max(stage.parameters.total for stage in split_stages(config, plan))
    hidden = shape.batch * shape.target * config.width
    gathers = 2 * all_gather_bytes(2 * parameters, plan.shard) + all_gather_bytes(4 * parameters, plan.shard)
    sent = {  # dimension -> the operation, its bytes, and whether it overlaps with the computation
        "data": ("all-reduce of gradients", all_reduce_bytes(4 * parameters, plan.data), True),
        "shard": ("all-gather of weights, reduce-scatter of gradients", micro_batches * gathers, True),
        "tensor": (
            "all-reduce of hidden states",
            micro_batches * _tensor_bytes(config, shape, plan, checkpointing),
            False,
        ),
        "pipeline": (
            "hidden states to the next stage, gradients back",
            micro_batches * 2 * plan.stream_bytes * hidden,
            False,
        ),
    }
    return [
        Transfer(dimension, operation, size, plan.crosses_nodes(dimension, gpus_per_node), overlaps)
        for dimension, (operation, size, overlaps) in sent.items()
        if getattr(plan, dimension) > 1
    ]


def _tensor_bytes(config: ModelConfig, shape: BatchShape, plan: ParallelPlan, checkpointing: CheckpointMode) -> int:
    """Return the bytes of the all-reduces of a pass: of each sublayer two or three, and two of embedding and head."""
    passes, rows = 3 if checkpointing else 2, 2 * shape.target
    for name, stack in config.stacks.items():
        length = shape.length(name)
        rows += passes * length * sum(len(block.sublayers) for block in stack.layers())
    return -(-all_reduce_bytes(2 * shape.batch * rows * config.width, plan.tensor) // plan.pipeline)


INTRA_BANDWIDTH = 450e9  # bytes per second that a GPU sends over NVLink 4 (H100, H200)
INTER_BANDWIDTH = 50e9  # bytes per second for each GPU over a 400 Gbit/s network
PIPELINE_MICRO_BATCHES = 4  # for each stage, by default


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The speed and memory of the GPUs and of the network between them."""

    peak: float = 989e12  # FLOP/s of one GPU: H100 and H200, dense bf16
    utilization: float = 0.4  # share of the peak that a rank reaches while it computes
    gpus_per_node: int = GPUS_PER_NODE
    intra_bandwidth: float = INTRA_BANDWIDTH
    inter_bandwidth: float = INTER_BANDWIDTH
    memory: int = 80 * 10**9  # bytes of one GPU

    def __post_init__(self) -> None:
        for name in ("peak", "gpus_per_node", "intra_bandwidth", "inter_bandwidth", "memory"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name}={getattr(self, name):g} is too small; write a number above 0")
        if not 0 < self.utilization <= 1:
            raise InputError(f"mfu={self.utilization:g} is out of range; write a number above 0 and up to 1")


DEFAULT_HARDWARE = Hardware()


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The costs of a training step under a plan; bytes and seconds are those of the rank that needs most."""

    parallel: ParallelPlan
    micro_batches: int
    checkpointing: CheckpointMode
    tokens_per_step: int
    memory: RankMemory
    fits: bool  # whether the peak is below the memory of a GPU
    transfers: tuple[Transfer, ...]
    compute_seconds: float
    transfer_seconds: float  # all transfers, also those that overlap with computation
    exposed_seconds: float
    bubble: float
    step_seconds: float
    mfu: float

    @property
    def tokens_per_second(self) -> float:
        """The speed of all GPUs together."""
        return self.tokens_per_step / self.step_seconds

    def gpu_hours(self, tokens: int) -> float:
        """Return the GPU hours of training on `tokens` tokens."""
        return tokens / self.tokens_per_second * self.parallel.size / 3600

    def to_dict(self) -> dict[str, object]:
        return {**asdict(self), "tokens_per_second": self.tokens_per_second}


def pipeline_bubble(stages: int, micro_batches: int) -> float:
    """Return the share of a step in which a pipeline stage waits: (p-1)/(m+p-1)."""
    return (stages - 1) / (micro_batches + stages - 1)


def plan_training(
    config: ModelConfig,
    parallel: ParallelPlan,
    *,
    batch: int = 1,
    length: int | None = None,
    target_length: int | None = None,
    micro_batches: int | None = None,
    checkpointing: CheckpointMode = False,
    optimizer: str = "adamw",
    hardware: Hardware = DEFAULT_HARDWARE,
) -> TrainingPlan:
    """Compute memory, communication and time of a training step.

    batch: the sequences of a micro-batch on each rank of the data dimension.
    micro_batches: the passes of a step on each rank; by default 1, or PIPELINE_MICRO_BATCHES for each pipeline stage.
    """
    if micro_batches is None:
        micro_batches = PIPELINE_MICRO_BATCHES * parallel.pipeline if parallel.pipeline > 1 else 1
    if micro_batches < 1:
        raise InputError(f"micro_batches={micro_batches} is too small; write 1 or more")
    costs = flops(config, batch=batch, length=length, target_length=target_length)
    memory = rank_memory(
        config, costs.shape, parallel, optimizer=optimizer, checkpointing=checkpointing, micro_batches=micro_batches
    )
    transfers = step_transfers(
        config,
        costs.shape,
        parallel,
        checkpointing=checkpointing,
        micro_batches=micro_batches,
        gpus_per_node=hardware.gpus_per_node,
    )
    seconds = {t.dimension: t.seconds(hardware.intra_bandwidth, hardware.inter_bandwidth) for t in transfers}
    rank_flops = (costs.training + recomputed_flops(config, costs, checkpointing)) / (
        parallel.tensor * parallel.pipeline  # which do equal parts
    )
    compute = micro_batches * rank_flops / (hardware.peak * hardware.utilization)
    in_pass = seconds.get("tensor", 0.0) + seconds.get("pipeline", 0.0)
    last_backward = compute / micro_batches * costs.backward / costs.training
    after = max(0.0, seconds.get("data", 0.0) - last_backward) + max(0.0, seconds.get("shard", 0.0) - compute)
    bubble = pipeline_bubble(parallel.pipeline, micro_batches)
    step = (compute + in_pass) / (1 - bubble) + after
    passes = micro_batches * parallel.batch_parts
    return TrainingPlan(
        parallel=parallel,
        micro_batches=micro_batches,
        checkpointing=checkpointing,
        tokens_per_step=passes * costs.tokens,
        memory=memory,
        fits=memory.peak <= hardware.memory,
        transfers=tuple(transfers),
        compute_seconds=compute,
        transfer_seconds=sum(seconds.values()),
        exposed_seconds=in_pass + after,
        bubble=bubble,
        step_seconds=step,
        mfu=passes * costs.training / (step * hardware.peak * parallel.size),
    )


def recomputed_flops(config: ModelConfig, costs: Flops, checkpointing: CheckpointMode) -> int:
    """Return the FLOPs that the backward pass computes a second time because of checkpointing."""
    total, shape = 0, costs.shape
    for name, stack in config.stacks.items():
        length = shape.length(name)
        for block, times in count_blocks(stack).items():
            mode, components = block_mode(block, checkpointing), block_flops(block, shape.batch, length, shape.source)
            if mode is True:
                total += times * sum(components.values())
            elif mode == "selective" and recomputes_scores(block.attention, length):
                total += times * components["attention.scores"]
    return total


def list_assumptions(config: ModelConfig, parallel: ParallelPlan, hardware: Hardware) -> list[str]:
    """Return what the plan assumes, in words."""
    lines = [
        f"a GPU computes at {hardware.utilization:.0%} of {hardware.peak / 1e12:g} TFLOP/s, bf16, not compiled",
        f"bandwidth of one GPU: {hardware.intra_bandwidth / 1e9:g} GB/s within a node of {hardware.gpus_per_node} "
        f"GPUs, {hardware.inter_bandwidth / 1e9:g} GB/s between nodes; no latency",
        "fused attention; memory is what PyTorch allocates, without the CUDA context, NCCL and fragmentation",
        "memory is that of a step that is not compiled; that of a compiled step was not measured against the plan",
        "selective checkpointing: recomputed norms, activation functions and dropout take no time",
    ]
    if fuses_loss(config, parallel):
        lines.append("the loss is computed together with the last matrix product, so that the logits are not stored")
    if parallel.shard > 1:
        lines.append("fsdp: fp32 shards, 16-bit weights gathered in each pass; transfers overlap with computation")
    else:
        lines.append("fp32 weights under autocast, with 16-bit copies of the matrices during a pass")
    if parallel.data > 1:
        lines.append(
            "ddp: fp32 gradients are views of buckets, summed during the backward pass of the last micro-batch"
        )
    if parallel.tensor > 1:
        lines.append("tp: heads, hidden features and vocabulary are divided, the loss too; all-reduces do not overlap")
    if parallel.pipeline > 1:
        lines.append("pp: schedule 1F1B, equal stages, no overlap; embedding and head on the first and last stage")
    return lines
