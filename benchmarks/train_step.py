"""A training step (forward, loss, backward) of a GPT preset beside transformers' GPT-2 of the same shape.

Both run eagerly in one process, without dropout, interleaved so that neither has the quieter machine; the table gives
the median step of each.  --smoke runs a toy size once, to see that the script still works.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from transformers import GPT2Config, GPT2LMHeadModel

import monoblock as mb


def reference(config: mb.ModelConfig) -> GPT2LMHeadModel:
    attention = next(config.decoder.layers()).attention
    sizes = {"n_embd": config.width, "n_layer": config.depth, "n_head": attention.heads, "n_positions": config.context}
    settings = GPT2Config(vocab_size=config.input.vocab, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **sizes)
    return GPT2LMHeadModel(settings)


def step(model: torch.nn.Module, ids: torch.Tensor) -> float:
    """Seconds of one forward, loss and backward."""
    model.zero_grad(set_to_none=True)
    begun = time.perf_counter()
    out = model(ids)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="gpt2")
    parser.add_argument("--compile", action="store_true", help="a third column: ours compiled")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    config = mb.tiny("gpt2") if given.smoke else mb.preset(given.preset)
    batch, length, rounds = (2, 16, 1) if given.smoke else (given.batch, given.length, given.rounds)
    torch.manual_seed(0)
    ids = torch.randint(0, config.input.vocab, (batch, length))
    models: dict[str, torch.nn.Module] = {"monoblock": mb.Transformer(config), "transformers": reference(config)}
    if given.compile:
        models["monoblock, compiled"] = torch.compile(mb.Transformer(config))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for turn in range(rounds + 2):
        for name, model in models.items():
            taken = step(model.train(), ids)
            if turn >= min(2, rounds):  # the first rounds warm up
                seconds[name].append(taken)
    medians = {name: statistics.median(times or [0.0]) for name, times in seconds.items()}
    ratio = medians["transformers"] / max(medians["monoblock"], 1e-9)
    if given.json:
        print(json.dumps({"batch": batch, "length": length, "seconds": medians, "times_faster": ratio}))
        return
    print(
        f"{given.preset}, batch {batch}, length {length}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, taken in medians.items():
        speed = f"{batch * length / taken:8.0f} tokens/s"
        print(f"  {name:<20} {taken:8.3f} s a step  {speed}  best {min(seconds[name]):.3f} s")
    for name, taken in medians.items():
        if name != "transformers":
            print(f"  {name} is {medians['transformers'] / max(taken, 1e-9):.3f} times as fast as transformers")


if __name__ == "__main__":
    main()
