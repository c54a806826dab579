"""The worker of parallel/test_tensor_parallel: each process compares its part of a model with the whole model.

cases.json maps names to {"folder": …, "kind": …, "generates": …}; each process writes what it saw to seen-RANK.json.
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

import torch

import monoblock as mb
from monoblock.cli.main import run
from monoblock.inference.supported_models import reason_not_to_optimize
from monoblock.interop.model_folder import load_model
from monoblock.parallel import inference
from monoblock.parallel.strategy import whole_tensor
from monoblock.parallel.tensor_parallel import split_model, to_local
from monoblock.parallel.world import World

GENERATION = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "top_p": 0.95, "seed": 3},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "several samples": {"temperature": 1.0, "num_return_sequences": 2, "seed": 1},
    "no cache": {"use_cache": False},
    "prompt lookup": {"prompt_lookup": 3},
}


class KeptWorld(World):
    """Processes that stay together for the next command."""

    def shut_down(self):
        self.barrier()


def make_inputs(kind):
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, 50, (3, 11), generator=generator)
    mask = torch.ones(3, 11, dtype=torch.bool)
    mask[1, 8:] = False
    if kind == "encoder-decoder":
        return {"source": ids, "source_mask": mask, "target": ids.flip(1)[:, :7]}
    if kind == "vision":
        return {"source": torch.randn(2, 3, 12, 12, generator=generator, dtype=torch.float64)}
    return {"source": ids, "attention_mask": mask}


def compute(model, inputs):
    """Return the outputs of a model and the gradient of each weight of a loss that all outputs change."""
    model.zero_grad()
    out = whole_tensor(model(**inputs))
    generator = torch.Generator().manual_seed(8)
    loss = (out * torch.randn(out.shape, generator=generator, dtype=torch.float64)).sum()
    loss.backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    return out.detach(), {name: whole_tensor(grad) for name, grad in grads.items() if grad is not None}


def furthest(first, second):
    """Return the name and the difference, relative to the largest value, of the tensors that differ most."""
    assert first.keys() == second.keys()
    differences = {name: float((t - second[name]).abs().max() / t.abs().max().clamp(1e-3)) for name, t in first.items()}
    worst = max(differences, key=differences.get)
    return worst, differences[worst]


def compare(case, world):
    kind, options = case["kind"], {"dtype": torch.float64, "device": "cpu"}
    whole = load_model(mb.Transformer, case["folder"], **options).eval()
    part = load_model(mb.Transformer, case["folder"], **options, mesh=world.tensor_mesh).eval()
    inputs = make_inputs(kind)
    (expected, expected_grads), (seen, grads) = compute(whole, inputs), compute(part, inputs)
    divided = load_model(mb.Transformer, case["folder"], **options).recompute().train()
    split_model(divided, world.tensor_mesh, sequence=True)
    divided_out, divided_grads = compute(divided, inputs)
    result = {
        "logits": float((expected - seen).abs().max()),
        "gradients": furthest(expected_grads, grads),
        "divided logits": float((expected - divided_out).abs().max()),
        "divided gradients": furthest(expected_grads, divided_grads),
        "stored": sum(to_local(weight).numel() for weight in part.parameters()),
        "memory": sum(to_local(weight).untyped_storage().nbytes() for weight in part.parameters()),
        "whole": sum(weight.numel() for weight in whole.parameters()),
    }
    if case["generates"]:
        result |= compare_generation(whole, part, inputs["source"])
    return result


def compare_generation(whole, part, ids):
    result = {"differ": []}
    for name, options in GENERATION.items():
        if name == "prompt lookup" and part.encoder is not None:
            continue
        texts = [model.generate(ids, max_new_tokens=6, **options).tolist() for model in (whole, part)]
        if texts[0] != texts[1]:
            result["differ"].append(name)
    result["fresh seed"] = part.generate(ids, max_new_tokens=6, temperature=1.0).tolist()
    result["refusal"] = reason_not_to_optimize(part)
    caches = [model.make_cache(3, 32) for model in (whole, part)]
    for model, cache in zip((whole, part), caches, strict=True):
        with torch.no_grad():
            model(ids, cache=cache) if model.encoder is None else model(ids, ids, cache=cache)
    result["cache"] = caches[1].nbytes / caches[0].nbytes
    return result


def run_command(words, text):
    """Run a verb in all processes; return its exit code and what this process printed."""
    out, err = io.StringIO(), io.StringIO()
    sys.stdin = io.StringIO(text)
    with redirect_stdout(out), redirect_stderr(err):
        code = run(words)
    return [code, out.getvalue(), err.getvalue()]


def main(folder):
    cases, commands = json.loads((folder / "cases.json").read_text())
    world = mb.join_processes("cpu")
    seen = {name: compare(case, world) for name, case in cases.items()}
    inference.join_processes = lambda device: KeptWorld(world.rank, world.size, world.mesh)
    seen["commands"] = [run_command(words, text) for words, text in commands]
    world.shut_down()
    (folder / f"seen-{world.rank}.json").write_text(json.dumps(seen))
