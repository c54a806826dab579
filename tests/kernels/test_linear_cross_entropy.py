"""The output layer fused with its loss, with plain torch in place of the two GPU kernels."""

import warnings

import pytest
import torch
import torch.nn.functional as F

import monoblock as mb
from monoblock.accounting import fused_loss
from monoblock.kernels import linear_cross_entropy as fused
from monoblock.kernels.fp8_linear import quantize_matrix
from monoblock.kernels.gpu import is_available
from monoblock.training.loss import CrossEntropyLoss

IGNORE = -100


def replace_by_gradient(logits, labels, losses, num_classes, ignore_index, label_smoothing):
    """What the Triton kernel computes."""
    rows, is_target = logits[:, :num_classes].double(), (labels != ignore_index)[:, None]
    losses.copy_(
        F.cross_entropy(rows, labels, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing)
    )
    chosen = F.one_hot(labels.clamp(min=0), num_classes)
    gradient = rows.softmax(-1) - (1 - label_smoothing) * chosen - label_smoothing / num_classes
    logits.zero_()
    logits[:, :num_classes] = gradient * is_target


def add_product(total, gradient, x):
    total += gradient.float().T @ x.float()


def loss_of(x, weight, bias, labels, **options):
    """The loss, computed in the parts of `rows_at_a_time`."""
    columns = fused_loss.pad_classes(len(weight))
    sizes = {"rows": fused_loss.rows_at_a_time(len(x), columns), "columns": columns}
    return fused.linear_cross_entropy(x, weight, bias, labels, ignore_index=IGNORE, **sizes, **options)


@pytest.fixture
def on_cpu(monkeypatch):
    monkeypatch.setattr(fused, "_replace_by_gradient", replace_by_gradient)
    monkeypatch.setattr(fused, "_add_product", add_product)


@pytest.mark.parametrize("max_logits", [1 << 29, 128 * 1088])
@pytest.mark.parametrize(("smoothing", "has_bias"), [(0.0, False), (0.1, True)])
def test_loss_and_gradients_are_those_of_the_two_layers(on_cpu, monkeypatch, max_logits, smoothing, has_bias):
    monkeypatch.setattr(fused_loss, "MAX_LOGITS", max_logits)
    torch.manual_seed(0)
    N, D, V = 300, 24, 1030  # V is padded, and 300 rows are computed in parts
    x, weight = torch.randn(N, D).bfloat16().requires_grad_(), (0.3 * torch.randn(V, D)).requires_grad_()
    bias = torch.randn(V).requires_grad_() if has_bias else None
    labels = torch.randint(0, V, (N,))
    labels[::5] = IGNORE
    loss = loss_of(x, weight, bias, labels, label_smoothing=smoothing)
    (0.5 * loss).backward()
    leaves = [t for t in (x, weight, bias) if t is not None]
    exact = [t.detach().bfloat16().double().requires_grad_() for t in leaves]
    logits = F.linear(*exact)
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=smoothing)
    (0.5 * expected).backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)
    for leaf, reference in zip(leaves, exact, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        assert (leaf.grad.double() - reference.grad).norm() / reference.grad.norm() < 5e-3


@pytest.mark.parametrize("max_logits", [1 << 29, 128 * 1088])
def test_in_8_bits_the_logits_are_those_of_rounded_operands(on_cpu, monkeypatch, max_logits):
    """The loss and the gradient of the weight are those of such logits, computed in fp64."""
    monkeypatch.setattr(fused_loss, "MAX_LOGITS", max_logits)
    torch.manual_seed(0)
    x, weight = torch.randn(300, 32).bfloat16().requires_grad_(), (0.2 * torch.randn(1030, 32)).requires_grad_()
    labels = torch.randint(0, 1030, (300,))
    labels[::5] = IGNORE
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(x, weight, None, labels, fp8=True)
    found = torch.autograd.grad(loss, (x, weight))
    rounded = [q.values.double() * q.scales for q in map(quantize_matrix, (x.detach(), weight.detach().bfloat16()))]
    logits = (rounded[0] @ rounded[1].T).requires_grad_()
    expected = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum")
    plain = F.cross_entropy(x.double() @ weight.double().T, labels, ignore_index=IGNORE, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, logits)
    exact = (gradient @ weight.detach().double(), gradient.T @ x.detach().double())
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)
    assert abs(loss.item() - plain.item()) > 5 * abs(loss.item() - expected.item())
    for one, other in zip(found, exact, strict=True):
        assert (one.double() - other).norm() / other.norm() < 6e-3


def test_a_width_that_is_no_multiple_of_16_is_multiplied_in_bfloat16(on_cpu):
    torch.manual_seed(0)
    x, weight, labels = torch.randn(40, 24).requires_grad_(), torch.randn(1030, 24), torch.randint(0, 1030, (40,))
    with torch.autocast("cpu", torch.bfloat16):
        assert loss_of(x, weight, None, labels, fp8=True) == loss_of(x, weight, None, labels)


def test_a_frozen_weight_has_no_gradient(on_cpu):
    x, weight = torch.randn(6, 8).bfloat16().requires_grad_(), torch.randn(1100, 8)
    loss_of(x, weight, None, torch.arange(6)).backward()
    assert x.grad is not None
    assert weight.grad is None


def test_parts_cover_all_rows_and_stay_below_the_limit():
    for N, columns in ((32768, 50304), (1000, 1088), (7, 64)):
        rows = fused_loss.rows_at_a_time(N, columns)
        assert 0 < rows <= N
        assert rows == N or rows % 128 == 0
        assert (rows - 128) * columns < fused_loss.MAX_LOGITS


@pytest.mark.parametrize("name", ["gpt2", "t5-small", "llama-7b", "vaswani-base", "gemma2-2b"])
def test_the_loss_of_the_trainer_hands_the_last_product_over(name):
    """gemma2 caps its logits, so it is left out; the others give input, weight and bias of the product."""
    torch.manual_seed(0)
    model, ids = mb.Transformer(mb.tiny(name)).eval(), torch.randint(0, 30, (2, 7))  # without dropout
    labels = torch.randint(0, 30, (2, 7))
    labels[0, 3] = IGNORE
    inputs = {"source": ids} if model.encoder is None else {"source": ids, "target": ids}
    loss, seen = CrossEntropyLoss(label_smoothing=0.1), []
    object.__setattr__(
        loss,
        "_from_product",
        lambda *product, labels: (
            seen.append(product) or CrossEntropyLoss(label_smoothing=0.1).from_logits(F.linear(*product), labels)
        ),
    )
    value = loss(model, inputs, labels)
    assert bool(seen) == (name != "gemma2-2b")
    torch.testing.assert_close(value, loss.from_logits(model(**inputs), labels))


def test_a_hook_on_the_output_is_called_in_training():
    model, ids, calls = mb.Transformer(mb.vary(mb.tiny("gpt2"), tie="none")), torch.tensor([[1, 2, 3]]), []
    model.head.output.register_forward_hook(lambda *_: calls.append(1))
    CrossEntropyLoss()(model, {"source": ids}, ids)
    assert calls


def test_compiling_the_question_for_a_kernel_does_not_warn():
    def double_if_available(x):
        return x * 2 if is_available() else x

    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x = torch.ones(2)
        out = torch.compile(double_if_available, fullgraph=True, backend="eager")(x)
    assert torch.equal(out, x * 2 if is_available() else x)
