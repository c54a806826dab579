"""A training loop of your own: mixed precision, activation checkpointing, accumulation, learning rates by depth.

python own_loop.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import monoblock as mb
from monoblock.config.parts import CheckpointMode

VOCAB, LENGTH = 17, 24


def make_batch(rows: int, generator: torch.Generator) -> Tensor:
    """Count upwards in steps of 1 to 5: the third token tells all that follow."""
    start, step = (torch.randint(low, high, (rows, 1), generator=generator) for low, high in ((0, VOCAB), (1, 6)))
    return (start + step * torch.arange(LENGTH)) % VOCAB


def build_optimizer(model: mb.Transformer, lr: float = 3e-3, decay: float = 0.9) -> torch.optim.Optimizer:
    """Let each block learn a little more slowly than the one above it."""
    blocks = model.decoder.blocks
    groups = [
        {"params": [*block.parameters()], "lr": lr * decay ** (len(blocks) - n)} for n, block in enumerate(blocks)
    ]
    grouped = {id(weight) for group in groups for weight in group["params"]}
    rest = [weight for weight in model.parameters() if id(weight) not in grouped]  # embeddings, last norm, head
    return torch.optim.AdamW([*groups, {"params": rest}], lr=lr)


def compute_gradients(model: nn.Module, batch: Tensor, parts: int = 2, dtype: torch.dtype = torch.bfloat16) -> float:
    """Add up the gradients of a batch in `parts` micro-batches; return the loss, the mean over all targets."""
    total, targets = 0.0, batch[:, 1:].numel()
    for part in batch.chunk(parts):
        with torch.autocast(batch.device.type, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(part[:, :-1])
        losses = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten(), reduction="sum")
        loss = losses / targets  # a sum divided by all targets: the same, whatever the number of parts
        loss.backward()
        total += loss.item()
    return total


def train(
    steps: int, recompute: CheckpointMode = "selective", device: str = "cpu"
) -> tuple[mb.Transformer, list[float]]:
    torch.manual_seed(0)
    config = mb.gpt(vocab=VOCAB, width=32, depth=4, heads=4, context=LENGTH)
    model = mb.Transformer(config).to(device).train().recompute(recompute)
    optimizer, generator = build_optimizer(model), torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        losses.append(compute_gradients(model, make_batch(32, generator).to(device)))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model.eval(), losses


if __name__ == "__main__":
    model, losses = train(60)
    print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
    print(model.generate(torch.tensor([[1, 4, 7]]), max_new_tokens=5).tolist())  # steps of 3
