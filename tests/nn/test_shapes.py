"""Shapes: the annotations of nn/ are checked while the laws call its functions; every pure function has them."""

import importlib
import inspect
import pkgutil
import sys

import pytest
import test_random_configurations as laws
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from support import (
    ActivationTap,
    build_model,
    example_inputs,
    is_text,
    law_names,
    pad_rows,
    random_tokens,
    run_model,
    tiny_config,
)

import monoblock.nn
from monoblock.config.model import NormConfig
from monoblock.nn import attention, heads, norm, positions

MODULES = [
    importlib.import_module(f"monoblock.nn.{module.name}") for module in pkgutil.iter_modules(monoblock.nn.__path__)
]
PURE = ("attention", "embedding", "experts", "feedforward", "heads", "linear_attention", "norm", "positions")


def functions():
    """Every function and method that nn/ defines, with the class or module that has it."""
    for module in MODULES:
        own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
        for owner in [module, *filter(inspect.isclass, own)]:
            for function in vars(owner).values():
                if inspect.isfunction(function) and function.__module__ == module.__name__:
                    yield owner, function


def states_shapes(function):
    return any("[Tensor, " in str(hint) for hint in function.__annotations__.values())


@pytest.fixture(scope="module", autouse=True)
def _checked():
    """Check the shapes of arguments and results in every call of an annotated function."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, function in list(functions()):
            if not states_shapes(function):
                continue
            checked = jaxtyped(function, typechecker=beartype)
            if inspect.isclass(owner):
                patch.setattr(owner, function.__name__, checked)
                continue
            for name, module in list(sys.modules.items()):
                if name.startswith("monoblock.") and vars(module).get(function.__name__) is function:
                    patch.setattr(module, function.__name__, checked)
        yield


@torch.no_grad()
@pytest.mark.parametrize("name", law_names())
def test_models_keep_to_the_shapes_that_are_stated(name):
    model = build_model(tiny_config(name))
    for tap in (None, ActivationTap("weights", "outputs")):
        model(*example_inputs(model, rows=3), tap=tap)
    if is_text(model.config):
        run_model(model, *pad_rows(random_tokens(3), 2, torch.tensor([1, 3, 0])))


@torch.no_grad()
def test_random_models_with_a_cache_keep_to_the_shapes_that_are_stated():
    laws.test_a_truncated_draft_and_reordered_rows_leave_no_trace()


Q, K, V = torch.zeros(2, 6, 5, 7), torch.zeros(2, 3, 11, 7), torch.zeros(2, 3, 11, 13)
SWAPPED = {
    "heads and queries": lambda: attention.attend(Q.transpose(1, 2), K, V, sinks=torch.zeros(6)),
    "keys and values": lambda: attention.attend(Q, V, K),
    "queries and keys of a mask": lambda: attention.attend(Q, K, V, torch.ones(2, 1, 11, 5, dtype=torch.bool)),
    "batch and length": lambda: heads.pool(torch.zeros(2, 5, 7), torch.ones(5, 2, dtype=torch.bool), "last"),
    "heads and size of a weight": lambda: norm.rms_norm(torch.zeros(2, 5, 7), torch.ones(5)),
    "a rank": lambda: norm.Norm(7, NormConfig(kind="rms", affine="scale")).forward(torch.ones(7, dtype=torch.long)),
    "the number type": lambda: positions.sinusoid(torch.zeros(2, 5), 8),
}


@pytest.mark.parametrize("call", SWAPPED.values(), ids=list(SWAPPED))
def test_swapped_axes_are_noticed(call):
    with pytest.raises(TypeCheckError):
        call()


@pytest.mark.parametrize("name", PURE)
def test_a_public_function_of_tensors_states_their_shapes(name):
    module = importlib.import_module(f"monoblock.nn.{name}")
    plain = {
        function.__qualname__
        for owner, function in functions()
        if owner is module and not function.__name__.startswith("_")
        for hint in function.__annotations__.values()
        if str(hint) in ("Tensor", "Tensor | None")
    }
    assert plain == set()
