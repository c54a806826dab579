"""`generate` leaves a model as it was, and a model with hooks, own modules or parametrizations is run as it is."""

import copy
import gc
import threading
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from generate_support import IDS, NEW, eager, generate, gpt, translator
from operator_support import record_operator_steps
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

import monoblock as mb
from monoblock.config.model import BlockConfig
from monoblock.inference.runners import cpu
from monoblock.inference.runners.plain import evaluation_mode
from monoblock.inference.supported_models import SUPPORTED, unsupported_field
from monoblock.nn.block import Block

# -- what generate leaves behind ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"use_cache": False}])
def test_parameters_keep_their_storage_and_modules_their_mode(options, kernels):
    model = gpt()
    model.decoder.blocks[1].train()  # a mode of its own
    before = {name: (weight.data_ptr(), weight.clone()) for name, weight in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    generate(model, **options)
    after = dict(model.named_parameters())
    assert {name: weight.data_ptr() for name, weight in after.items()} == {n: p for n, (p, _) in before.items()}
    assert all(torch.equal(weight, before[name][1]) for name, weight in after.items())
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"draft": "8-bit"}, {"prompt_lookup": 2}])
def test_an_optimized_model_is_freed_with_all_it_has_made(options, kernels):
    fast = mb.optimize(gpt())
    generate(fast, **options)
    references = [weakref.ref(one) for one in (fast, fast.plain, fast.model, *fast.model.modules())]
    del fast
    gc.collect()
    assert not [reference() for reference in references if reference() is not None]


def test_a_closed_optimized_model_decodes_again(kernels):
    model = gpt()
    with mb.optimize(model) as fast:
        wanted = generate(fast, draft="8-bit")
        draft = fast.draft("8-bit")
    assert torch.equal(generate(fast, draft="8-bit"), wanted)
    assert fast.draft("8-bit") is not draft
    assert torch.equal(wanted, generate(model))


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("write", ["step", "data", "load", "rebind"])
def test_train_generate_train_generate_is_what_eager_gives(write, options, kernels):
    model, other = gpt(), gpt(seed=1)
    for _ in range(3):
        reference = generate(copy.deepcopy(model), use_cache=False, **options)
        assert torch.equal(generate(model, **options), reference)
        assert torch.equal(generate(mb.optimize(model.eval()), **options), reference)
        if write == "step":
            optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
            model.train()(IDS).logsumexp(-1).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        elif write == "load":
            model.load_state_dict({name: 1.1 * weight for name, weight in other.state_dict().items()})
        else:
            for weight in model.parameters():
                noise = 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(weight)))
                if write == "data":
                    weight.data.add_(noise)
                else:
                    weight.data = weight.data + noise


@pytest.mark.parametrize("state", ["training", "autocast"])
def test_training_mode_and_autocast_are_refused(state):
    model = gpt()
    model.train(state == "training")
    with torch.autocast("cpu", enabled=state == "autocast"), pytest.raises(mb.InputError, match=state):
        mb.optimize(model)


def test_what_users_do_to_a_module_works_after_a_generate():
    model = gpt()
    wanted = generate(model)
    assert torch.equal(generate(copy.deepcopy(model)), wanted)
    assert torch.equal(generate(model.share_memory()), wanted)
    assert torch.equal(generate(model.double()), wanted)
    assert all(weight.is_contiguous() and weight.storage_offset() == 0 for weight in model.parameters())


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"temperature": 0.9, "seed": 3}])
@pytest.mark.parametrize("optimized", [False, True])
def test_four_threads_share_a_model(options, optimized, kernels):
    model = mb.Transformer(replace(gpt().config)).train()
    model.load_state_dict(gpt().state_dict())
    decoder = mb.optimize(model.eval()) if optimized else model
    model.train()
    prompts = [(IDS + shift) % 31 for shift in range(4)]
    wanted = [generate(copy.deepcopy(model), prompt, **options) for prompt in prompts]
    found, problems = {}, []

    def work(number):
        try:
            for _ in range(5):
                found.setdefault(number, []).append(generate(decoder, prompts[number], **options))
        except Exception as problem:  # shown by the assertion
            problems.append(problem)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert all(torch.equal(text, wanted[number]) for number, texts in found.items() for text in texts)
    assert model.training
    assert all(module.training for module in model.modules())


def test_threads_share_a_training_mode_model_with_hooks():
    model = gpt(dropout=0.4).train()
    model.decoder.blocks[0].register_forward_hook(lambda *_: None)
    wanted, found = eager(model), []
    threads = [threading.Thread(target=lambda: found.append(generate(model))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert all(torch.equal(text, wanted) for text in found)
    assert all(module.training for module in model.modules())


def test_modes_are_restored_when_the_last_user_of_a_model_is_done():
    model = gpt().train()
    first, second = evaluation_mode(model), evaluation_mode(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(module.training for module in model.modules())
    second.__exit__(None, None, None)
    assert all(module.training for module in model.modules())


# -- modules that are more than ours --------------------------------------------------------------------------------


PLACES = ("decoder.0", "decoder.1.attention", "decoder.1.attention.query", "decoder.0.feedforward.up", "decoder.norm")


@pytest.mark.parametrize("place", PLACES)
def test_forward_hooks_fire_at_every_step(place, kernels):
    model, calls = gpt(), []
    wanted = eager(model)
    module = model.get_submodule(place)
    module.register_forward_pre_hook(lambda *_: calls.append("before"))
    module.register_forward_hook(lambda *_: calls.append("after"))
    assert torch.equal(generate(model), wanted)
    assert calls == ["before", "after"] * NEW


def test_a_hook_that_changes_an_output_changes_the_text(kernels):
    model = gpt()
    wanted = generate(model)
    handle = model.decoder.blocks[0].feedforward.register_forward_hook(lambda module, args, out: -3 * out)
    with pytest.raises(mb.InputError, match=r"decoder\.0\.feedforward has hooks"):
        mb.optimize(model)
    changed = generate(model)
    assert torch.equal(changed, eager(model))
    assert not torch.equal(changed, wanted)
    handle.remove()
    assert torch.equal(generate(model), wanted)


def test_hooks_on_all_modules_fire(kernels):
    model, calls = gpt(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(module))
    try:
        generate(model)
    finally:
        handle.remove()
    assert sum(module is model.decoder.blocks[1].attention.value for module in calls) == NEW


class Louder(nn.Linear):
    def forward(self, x):
        return 20 * super().forward(x)


class SkippedBlock(Block):
    def forward(self, x, *args, **options):
        return x + 0.5 * (super().forward(x, *args, **options) - x)


class Doubled(nn.Module):
    def forward(self, x, tap=None):
        return 2 * x.relu()


def swap_linear(model):
    old = model.decoder.blocks[0].attention.query
    new = Louder(old.in_features, old.out_features)
    new.load_state_dict(old.state_dict())
    model.decoder.blocks[0].attention.query = new


def swap_block(model):
    old = model.decoder.blocks[1]
    new = SkippedBlock(old.config)
    new.load_state_dict(old.state_dict())
    setattr(model.decoder, "1", new)


def swap_feedforward(model):
    model.decoder.blocks[0].feedforward = Doubled()


def normed_weight(model):
    layer = weight_norm(model.decoder.blocks[0].attention.value)
    with torch.no_grad():
        layer.parametrizations.weight.original0.mul_(1.7)


def own_forward(model):
    norm = model.decoder.blocks[0].attention_norm
    plain = norm.forward
    norm.forward = lambda x: 0.5 * plain(x)


@pytest.mark.parametrize("change", [swap_linear, swap_block, swap_feedforward, normed_weight, own_forward])
def test_modules_of_ones_own_are_run_and_not_optimized(change, kernels):
    model = gpt()
    plain = generate(model)
    change(model)
    model.eval()
    with pytest.raises(mb.InputError, match=r"cannot be optimized: \S+ (is a|has)"):
        mb.optimize(model)
    found = generate(model)
    assert torch.equal(found, eager(model))
    assert not torch.equal(found, plain)


@pytest.mark.parametrize("make", [gpt, translator])
def test_a_sharded_model_generates(make, tmp_path):
    from torch.distributed import device_mesh, fsdp

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = make()
        wanted = generate(model)
        mesh = device_mesh.init_device_mesh("cpu", (1,))
        for stack in (model.encoder, model.decoder):
            for block in stack.blocks if stack is not None else ():
                fsdp.fully_shard(block, mesh=mesh)
        fsdp.fully_shard(model, mesh=mesh)
        with pytest.raises(mb.InputError, match="cannot be optimized"):
            mb.optimize(model)
        assert torch.equal(generate(model), wanted)
        model(*[IDS] * (2 if model.encoder is not None else 1)).logsumexp(-1).sum().backward()
    finally:
        torch.distributed.destroy_process_group()


def test_hooks_of_an_encoder_decoder_itself_fire_at_every_step():
    model, calls = translator(), []
    wanted = generate(model)
    model.register_forward_hook(lambda *_: calls.append(1))
    assert torch.equal(generate(model), wanted)
    assert len(calls) == NEW


def test_attributes_and_layouts_that_change_after_a_generate_are_seen(kernels):
    model = gpt()
    generate(model)
    feedforward = model.decoder.blocks[0].feedforward
    for change in (
        lambda: setattr(feedforward, "activation", torch.tanh),
        lambda: setattr(model.head, "scale", -1.0),
        lambda: setattr(model.decoder, "block_order", [1, 0]),
    ):
        change()
        assert torch.equal(generate(model), eager(model))


def test_a_tap_sees_and_changes_every_step(kernels):
    model, seen = gpt(), []

    def tap(name, tensor):
        if name == "decoder.1.feedforward.output":
            seen.append(tensor.shape[1])
            return 0 * tensor
        return tensor

    ablated = copy.deepcopy(model)
    nn.init.zeros_(ablated.decoder.blocks[1].feedforward.down.weight)
    nn.init.zeros_(ablated.decoder.blocks[1].feedforward.down.bias)
    assert torch.equal(generate(model, tap=tap), eager(ablated))
    assert seen == [IDS.shape[1]] + [1] * (NEW - 1)
    both, names = translator(), []
    both.generate(IDS, max_new_tokens=3, tap=lambda name, tensor: names.append(name) or tensor)
    assert {name.split(".")[0] for name in names} >= {"encoder", "decoder"}


# -- a configuration with a field that no backend knows -------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WiderBlockConfig(BlockConfig):
    novelty: float = 0.0


BACKENDS = {
    "fast modules": SUPPORTED,
    "CpuStack": cpu.STEP_SUPPORTED,
    "CpuStack of an encoder": cpu.ENCODER_SUPPORTED,
}


def with_new_field(block):
    return WiderBlockConfig(**{name: getattr(block, name) for name in block.__dataclass_fields__})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_new_field_of_a_block_is_supported_by_no_backend(backend):
    stack = translator().encoder if "encoder" in backend else gpt().decoder
    block = next(stack.config.layers())
    assert unsupported_field(block, BACKENDS[backend]) is None
    assert unsupported_field(with_new_field(block), BACKENDS[backend]) == "novelty=0.0"


def widen(stack):
    run = stack.pattern[0]
    return replace(stack, pattern=(replace(run, blocks=tuple(map(with_new_field, run.blocks))),))


@pytest.mark.parametrize("options", [{}, {"num_beams": 4}])
@pytest.mark.parametrize("make", [gpt, translator])
def test_a_model_with_a_new_field_is_not_optimized_and_says_the_same(make, options, monkeypatch):
    taken = record_operator_steps(monkeypatch)
    plain = make()
    ids = IDS.repeat(3, 1)
    wanted = mb.optimize(plain).generate(ids, max_new_tokens=NEW, **options)
    assert taken
    stacks = {
        name: widen(getattr(plain.config, name))
        for name in ("encoder", "decoder")
        if getattr(plain.config, name) is not None
    }
    model = mb.Transformer(replace(plain.config, **stacks))
    model.load_state_dict(plain.state_dict())
    with pytest.raises(mb.InputError, match=r"has novelty=0\.0, which is not supported"):
        mb.optimize(model.eval())
    taken.clear()
    assert torch.equal(model.eval().generate(ids, max_new_tokens=NEW, **options), wanted)
    assert not taken
