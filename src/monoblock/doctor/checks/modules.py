"""Checks of the modules: dropout, tied weights, residual connections, and what is called and registered."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from monoblock.doctor.checks.causality import KEEPS_STATE, STATE_FIX
from monoblock.doctor.examination import MEASURED, Examination, check, fail, warn
from monoblock.doctor.recorder import Recorder
from monoblock.doctor.report import Finding, NotChecked, Outcome
from monoblock.doctor.subject import difference, hooks

PROMPT = 3  # tokens to generate from


@check("embedding and output share a tensor if they are meant to", "tokens", "module")
def check_tying(exam: Examination) -> Outcome:
    """Compare the storage of the token embedding with that of the output matrix."""
    if found := find_shared_blocks(exam):
        return found
    owner: Any = exam.module
    declared, vocab = exam.subject.declared.tied, exam.subject.vocab
    if hasattr(owner, "get_input_embeddings") and hasattr(owner, "get_output_embeddings"):
        first, last = [owner.get_input_embeddings()], [owner.get_output_embeddings()]
    else:
        first = [m for m in owner.modules() if isinstance(m, nn.Embedding) and m.num_embeddings == vocab]
        last = [m for m in owner.modules() if isinstance(m, nn.Linear) and m.out_features == vocab][-1:]
    tables = [table.weight for table in first if isinstance(table, nn.Embedding)]
    outputs = [layer.weight for layer in last if isinstance(layer, nn.Linear)]
    pairs = [(table, output) for table in tables for output in outputs if table.shape == output.shape]
    if not pairs and declared:
        return None  # there is no second matrix that could differ
    if not pairs:
        return NotChecked("no output matrix of the shape of the embedding was found")
    table, output = next((pair for pair in pairs if pair[0].data_ptr() == pair[1].data_ptr()), pairs[0])
    is_shared = table.data_ptr() == output.data_ptr()
    is_copy = not is_shared and difference(table, output) < 1e-3
    if is_shared and declared is False and type(exam.subject).__name__ != "PlainSubject":
        return fail(
            {"shared": 1, "declared": 0},
            "the output shares the matrix of the embedding, although the configuration says that it has its own",
            "build the output as a matrix of its own, or write tie = true in the configuration",
        )
    if is_shared or not (declared or is_copy):
        return None
    values = "with the same values" if is_copy else "with other values"
    return fail(
        {"shared": 0, "difference": difference(output, table)},
        f"the embedding and the output are meant to be tied, but are two tensors {values}: they drift apart in "
        f"training, and {table.numel():,} parameters are counted twice",
        "share the parameter itself, last in __init__: self.head.weight = self.embedding.weight (no .clone(), no "
        "nn.Parameter(…), no initialization after it)",
    )


@check("two runs agree; the declared dropout reaches every layer", explains=f"{MEASURED} label_shift pad_in_loss heads")
def check_dropout(exam: Examination) -> Finding | None:
    """Run twice in evaluation mode, and compare the probabilities of all dropouts with the declared one."""
    first, second = exam.output, exam.run(exam.ids)
    if not torch.equal(first.nan_to_num(), second.nan_to_num()) and difference(first, second) > exam.subject.tolerance:
        draws = exam.recorded.random_draws
        if not draws and exam.subject.module is not None:
            return fail(
                {"difference_between_two_runs": difference(first, second), "random_operations": 0},
                f"two runs on the same ids differ, although no random numbers are drawn: {KEEPS_STATE}",
                STATE_FIX,
            )
        return fail(
            {"difference_between_two_runs": difference(first, second), "random_operations": draws},
            "two runs on the same ids differ: dropout (or other noise) is on in evaluation",
            "call model.eval() before use; write F.dropout(x, p, training=self.training), or use nn.Dropout",
        )
    module = exam.subject.module
    if module is None:
        return None
    found = _check_logits_kept(exam, module) or _check_probabilities(exam, module)
    return found or _check_mode_of_generation(exam, module)


class _CountDropouts(TorchDispatchMode):
    """Counts the dropouts that are on."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("native_dropout", "bernoulli", "bernoulli_")
        return func(*args, **(kwargs or {}))


def _check_mode_of_generation(exam: Examination, module: nn.Module) -> Finding | None:
    """Generate from a model in training mode, as a training loop leaves it: its dropouts must be switched off."""
    if exam.options.generate is None:
        return None
    with exam.subject.evaluating(), _CountDropouts() as dropouts:
        module.train()
        exam.options.generate(exam.ids[:1, :PROMPT].clone())
    if not dropouts.count:
        return None
    return fail(
        {"dropouts_that_are_on": dropouts.count, "expected": 0},
        "text is generated in training mode: model.eval() is not called before, so that dropout changes every token",
        "call model.eval() before you generate, and model.train() before training goes on",
        "no eval() in generation",
    )


def _check_logits_kept(exam: Examination, module: nn.Module) -> Finding | None:
    """Run once in training mode: a dropout after the logits sets some of them to 0."""
    if exam.is_per_token and exam.output.shape[-1] < exam.subject.vocab:
        return None  # hidden states, on which a head follows
    buffers = {buffer: buffer.clone() for buffer in module.buffers()}  # those of a batch norm move
    with exam.subject.evaluating():
        module.train()
        output = exam.subject.logits(exam.ids)
    for buffer, kept in buffers.items():
        buffer.copy_(kept)
    dropped = float((output == 0).float().mean())
    if dropped < 0.01 or bool((exam.output == 0).any()):
        return None
    return fail(
        {"share_of_logits_set_to_0": dropped},
        f"in training {dropped:.0%} of the logits are set to 0, because dropout comes after the output layer: the loss "
        "is computed from scores, some of which are lost, often that of the right token",
        "put dropout before the output layer, or leave it out there: return self.head(x)",
        "dropout after the logits",
    )


def _check_probabilities(exam: Examination, module: nn.Module) -> Finding | None:
    """Look for dropouts whose probability is not the declared one: it was not passed on."""
    declared = exam.subject.declared.dropout
    parts = [(name, part) for name, part in module.named_modules() if name]
    found = {name: part.p for name, part in parts if isinstance(part, nn.modules.dropout._DropoutNd)}
    found |= {name: float(p) for name, part in parts if isinstance(p := getattr(part, "dropout", None), float)}
    if total := [name for name, p in found.items() if p >= 1]:
        return fail(
            {"probability": found[total[0]], "where": total[0], "dropouts": len(total)},
            f"{total[0]} drops everything: with p = {found[total[0]]:g} its output in training is 0",
            "p is the share that is dropped, not kept: nn.Dropout(0.1)",
        )
    if declared is None:
        return None
    other = {name: p for name, p in found.items() if p > 0 and abs(p - declared) > 1e-9}  # 0 is switched off
    active = [p for p in found.values() if p > 0]
    fix = "pass it on to every layer: Block(width, heads, dropout=dropout)"
    if declared > 0 and not active:
        reason = f"dropout={declared:g} is declared, but no part of the model has it"
        return warn({"declared": declared, "dropouts_with_it": 0}, reason, fix)
    if not other:
        return None
    name, p = next(iter(other.items()))
    reason = f"dropout={declared:g} is declared, but {name} has {p:g}: the argument is not passed on to it"
    return warn(
        {"declared": declared, "found": p, "where": name, "dropouts_with_another_value": len(other)}, reason, fix
    )


ATTENTION_FIX = "x = x + self.attention(self.norm1(x))"
FEEDFORWARD_FIX = "x = x + self.feedforward(self.norm2(x))"
MISSING = {  # branch -> title, what is wrong, the line to write
    "attention": (
        "no residual connection around attention",
        "the result of attention replaces the stream x instead of being added to it",
        ATTENTION_FIX,
    ),
    "feedforward": (
        "no residual connection around the feed-forward layer",
        "the result of the feed-forward layer replaces the stream x instead of being added to it",
        FEEDFORWARD_FIX,
    ),
    "both": (
        "no residual connections",
        "the results of attention and of the feed-forward layer replace the stream x instead of being added to it",
        f"{ATTENTION_FIX}; {FEEDFORWARD_FIX}",
    ),
}


# -- residual connections -------------------------------------------------------------------------------------------


class _Stage(NamedTuple):
    """What an attention layer, or the output layer, reads: the terms of the stream and their sum; and its results."""

    stream: frozenset[int]
    given: Tensor
    results: set[int]


def find_lost_residuals(exam: Examination) -> Finding | None:
    """Follow the terms of the stream: what goes into a layer must still be in what goes into the next one."""
    stages = _stages(exam)
    pairs, layers = enumerate(pairwise(stages)), len(stages) - 1
    lost = [(layer, branch) for layer, (this, after) in pairs if (branch := _lost(exam.recorded, this, after))]
    if not lost or layers < 2:
        return None
    branches = {branch for _, branch in lost}
    title, cause, fix = MISSING[branches.pop() if len(branches) == 1 else "both"]
    where = f"all {layers} layers" if len(lost) == layers else f"layer {', '.join(str(layer) for layer, _ in lost)}"
    return warn(
        {"layers_without": len(lost), "layers": layers, "first": lost[0][0]},
        f"in {where} {cause}: a residual connection is missing. What the layer was given is lost, and the gradient "
        "reaches the layers below only through its matrices, so a deep model hardly learns",
        fix,
        title,
    )


def _stages(exam: Examination) -> list[_Stage]:
    """Return the attention layers, then the output layer; heads that are computed one by one are one layer."""
    recorder, stages = exam.recorded, list[_Stage]()
    products = {product.number: product for product in recorder.products}
    for record in recorder.attentions:
        projections = [products[n] for n in record.query_terms if n in products]
        stream = frozenset[int]().union(*(p.reads for p in projections))
        if stages and stages[-1].stream == stream:
            stages[-1].results.add(record.term)
        else:
            stages.append(_Stage(stream, projections[0].given if projections else record.query, {record.term}))
    head = recorder.products[-1] if recorder.products else None
    if head is None or not head.given.shape[-1] != head.width == exam.output.shape[-1]:
        return stages and [*stages, _Stage(frozenset(), stages[-1].given, set())]  # not known
    of_attention = {record.term for record in recorder.attentions}
    while len(head.reads) == 1 and (before := products.get(min(head.reads))):
        if not before.reads or before.is_lookup or before.number in of_attention:
            break
        head = before  # two linear layers in a row
    return [*stages, _Stage(head.reads, head.given, set())]


def _lost(recorder: Recorder, stage: _Stage, following: _Stage) -> str | None:
    """Return which branch of a layer loses the stream that it was given; None if none is known to do so."""
    stream, after, results = stage.stream, following.stream, stage.results
    products, lookups = recorder.products, {p.number for p in recorder.products if p.is_lookup}
    restarts = any(p.is_lookup or p.reads & lookups for p in products if p.number in after)  # as a decoder does
    if not stream or not after or stream & after or restarts:
        return None
    a, b = stage.given.flatten().float(), following.given.flatten().float()
    if stage.given.shape == following.given.shape and float(torch.cosine_similarity(a, b, dim=0)) > 0.5:
        return None  # nearly equal: operations that are not tracked may have passed the stream on
    updates = results | {p.number for p in products if p.reads & results}
    if after & updates:
        return "attention"
    readers = [p for p in products if p.reads & updates and p.number not in updates]
    return "feedforward" if any(p.reads & stream for p in readers) else "both"


# -- feed-forward layers and norms ----------------------------------------------------------------------------------


def find_missing_nonlinearity(exam: Examination) -> Finding | None:
    """Look for a product that widens each vector and one that narrows it again, with nothing between them."""
    products = {product.number: product for product in exam.recorded.products}
    found = list[tuple[int, int]]()
    for down in products.values():
        up = products[min(down.reads)] if down.is_direct else None
        if up is None or up.is_lookup or not exam.recorded.attentions:
            continue
        if up.given.shape[-1] == down.width < up.width:
            found.append((down.width, up.width))
    if not found:
        return None
    width, inner = found[0]
    return warn(
        {"feed_forward_layers_without": len(found), "width": width, "inner_width": inner},
        f"there is no non-linearity between the two linear layers of the feed-forward layer ({width} to {inner} to "
        f"{width}): two linear layers in a row are a single linear layer, so it computes no more than one matrix could",
        f"put one between them: nn.Sequential(nn.Linear({width}, {inner}), nn.GELU(), nn.Linear({inner}, {width}))",
        "no non-linearity in the feed-forward layer",
    )


def find_missing_norms(exam: Examination) -> Finding | None:
    """Look for a norm anywhere in a model of several attention layers."""
    layers = len(_stages(exam)) - 1
    if layers < 2 or exam.recorded.norms:
        return None
    return warn(
        {"attention_layers": layers, "norms": 0},
        "no norm is computed anywhere: the size of the stream and of its gradients depends on the depth and on every "
        "weight, so training needs a small learning rate and easily diverges",
        "normalize before each sublayer, self.norm1 = nn.LayerNorm(width) and x = x + self.attention(self.norm1(x)), "
        "and once before the output: logits = self.head(self.norm(x))",
        "no norm",
    )


# -- modules and weights --------------------------------------------------------------------------------------------


def find_unregistered(exam: Examination) -> Finding | None:
    """Look for weights that PyTorch does not see: in plain tensors, and in plain lists of modules that are called."""
    module = exam.module
    registered, called = {id(part) for part in (*module.modules(), *module.parameters())}, set[nn.Module]()
    parts = {
        (owner, name, part)
        for owner in module.modules()
        for name, value in vars(owner).items()
        if not name.startswith("_")
        for part in _parts(value)
        if id(part) not in registered
    }
    unregistered = [part for _, _, part in parts if isinstance(part, nn.Module)]
    with hooks([part.register_forward_pre_hook(lambda part, inputs: called.add(part)) for part in unregistered]):
        exam.run(exam.ids[:1])
    lost: dict[tuple[str, str], int] = {}
    for _, name, part in parts:
        weights = [part] if isinstance(part, Tensor) else list(part.parameters()) if part in called else []
        key = name, "" if isinstance(part, Tensor) else type(part).__name__
        lost[key] = lost.get(key, 0) + sum(w.numel() for w in weights if id(w) not in registered)
    lost = {key: count for key, count in lost.items() if count}
    if not lost:
        return None
    name, kind = min(lost)
    culprits = f"the modules in self.{name} ({kind}) are" if kind else f"the weights in self.{name} are"
    line = f"nn.ModuleList([{kind}(…) for _ in range(…)])" if kind else "nn.Parameter(…), or nn.ParameterList([…])"
    return fail(
        {"weights_not_registered": sum(lost.values()), "where": name, "lists": len(lost)},
        f"{culprits} in a plain {'Python list' if kind else 'tensor or Python list'}, which PyTorch does not look "
        "into: model.parameters() leaves out their weights, so the optimizer never trains them, and model.eval(), "
        "model.to(device) and state_dict() pass them by",
        f"self.{name} = {line}",
        "weights that are not registered",
        explains=("dropout", "overfit", "optimizer"),
    )


def _parts(value: Any) -> Iterator[nn.Module | Tensor]:
    """Return the modules and the weights in an attribute: in a list, a tuple or a dictionary, or a weight by itself."""
    if isinstance(value, nn.Module) or (isinstance(value, Tensor) and value.is_leaf and value.requires_grad):
        yield value
    elif isinstance(value, list | tuple | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _parts(part)


def find_uncalled(blocks: list[nn.Module], without: list[int], used: set[nn.Module]) -> Finding | None:
    """Look among the blocks without a gradient for those that the forward pass does not call, nor any part of them."""
    unused = [index for index in without if not used & set(blocks[index].modules())]
    if not unused:
        return None
    which = "the blocks are" if len(unused) == len(blocks) else f"of the {len(blocks)} blocks, {unused[:8]} are"
    return fail(
        {"blocks_never_called": len(unused), "blocks": len(blocks)},
        f"{which} never called in the forward pass, so their weights do nothing and are not trained",
        "call each block in forward: for block in self.blocks: x = block(x)",
        "blocks that are never called",
        explains=("positions", "overfit"),
    )


def find_uninitialized(exam: Examination) -> Finding | None:
    """Look for matrices all of whose numbers are equal."""
    module = exam.module
    matrices = [p.detach() for p in module.parameters() if p.dim() > 1 and p.numel() > 1]
    constant = [w for w in matrices if bool((w == w.flatten()[0]).all())]
    if not matrices or len(constant) <= len(matrices) / 2:
        return None
    value = float(constant[0].flatten()[0])
    number = "zero" if value == 0 else f"the same number, {value:g}"
    return fail(
        {"matrices": len(matrices), "of_one_number": len(constant), "number": value},
        f"the weights of {len(constant)} of {len(matrices)} matrices are all {number}: they were not initialized, so "
        "all outputs are equal, and equal weights get equal gradients or none",
        "begin with random numbers: nn.init.normal_(layer.weight, mean=0.0, std=0.02), or leave out what overwrites "
        "those of PyTorch",
        "weights that are not initialized",
        explains=("positions", "tying", "heads", "overfit", "collapse"),
    )


def find_shared_blocks(exam: Examination) -> Finding | None:
    """Look for a module that holds the same block several times."""
    module = exam.module
    for name, part in module.named_modules():
        children = [child for child in part._modules.values() if child is not None and list(child.children())]
        if len(set(children)) < len(children):
            repeated = max(children, key=children.count)
            kind, times = type(repeated).__name__, children.count(repeated)
            is_head = "head" in f"{name.rpartition('.')[2]} {kind}".lower() and _reads_one_tensor(exam, repeated)
            noun, plural, each = (
                ("head", "heads", "each head") if is_head else ("block", "layers", "a block for each layer")
            )
            return warn(
                {"times": times, "weights": sum(p.numel() for p in repeated.parameters()), "where": name},
                f"{name} holds the same {noun} {times} times: its {times} {plural} have one set of weights, because "
                f"{kind}(…) is called once and then repeated",
                f"build {each}: nn.ModuleList([{kind}(…) for _ in range({times})])",
                f"one {noun} several times",
            )
    return None


def _reads_one_tensor(exam: Examination, part: nn.Module) -> bool:
    """Return whether the calls of a module in a row read the same tensor, as those of heads; layers read new ones."""
    given = list[Any]()
    with part.register_forward_pre_hook(lambda _, inputs: given.append(inputs[0] if inputs else None)):
        exam.run(exam.ids[:1])
    return len(given) > 1 and given[0] is given[1]
