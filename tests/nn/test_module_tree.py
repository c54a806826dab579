"""The modules of a model, without the recursion of torch."""

from torch import nn

from monoblock.nn.modules.tree import list_modules


def test_modules_are_listed_once_in_the_order_of_torch():
    shared = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(shared, nn.ReLU()), shared, nn.ModuleList([nn.Linear(1, 1), shared]))
    model.register_module("none", None)
    assert list_modules(model) == list(model.modules())
