"""Training steps, losses and labels that are passed with a model."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monoblock as mb

VOCAB, WIDTH = 67, 32
TOKENS = torch.randint(5, VOCAB, (4, 14), generator=torch.Generator().manual_seed(0))
BATCH = (TOKENS[:, :-1], TOKENS[:, 1:])


class Model(nn.Module):
    def __init__(self, forgets=False):
        super().__init__()
        self.token, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.gru, self.norm, self.forgets = nn.GRU(WIDTH, WIDTH, batch_first=True), nn.BatchNorm1d(WIDTH), forgets

    def forward(self, ids):
        return self.step(ids)[0]

    def step(self, ids, state=None):
        x, state = self.gru(self.norm(self.token(ids).mT).mT, None if self.forgets else state)
        return self.head(x), state


def training(lr=1e-3, calls=True, every=1, sign=1.0):
    """Return a model, its optimizer and a step that updates the weights in each of `every` calls."""
    torch.manual_seed(0)
    model, count = Model(), iter(range(1, 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step():
        loss = sign * F.cross_entropy(model.train()(BATCH[0]).flatten(0, 1), BATCH[1].flatten())
        loss.backward()
        if calls and next(count) % every == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return model, optimizer, step


def reasons(report):
    return {finding.check: finding.reason for finding in report.findings if finding.check != "batch"}  # of the norm


@pytest.mark.parametrize(
    ("options", "words"),
    [({"lr": 0.0}, "the learning rate is 0"), ({"calls": False}, "optimizer.step() is not called"), ({}, None)],
)
def test_a_step_that_moves_nothing_is_found_with_its_optimizer(options, words):
    model, optimizer, step = training(**options)
    found = reasons(mb.diagnose(model, optimizer=optimizer, step=step))
    assert set(found) == ({"optimizer"} if words else set())
    assert words is None or words in found["optimizer"]


def test_a_step_may_add_gradients_up_and_a_loss_may_be_negative():
    model, optimizer, step = training(every=4)
    assert not reasons(mb.diagnose(model, optimizer=optimizer, step=step))
    model, optimizer, step = training(sign=-1.0)
    assert not reasons(mb.diagnose(model, step=step, checks="learning_rate"))


def test_an_examination_puts_buffers_and_the_state_of_the_optimizer_back():
    model, optimizer, step = training()
    step()
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    mb.diagnose(model, optimizer=optimizer, step=step, batch=BATCH)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    after = list(optimizer.state.values())
    assert [int(state["step"]) for state in after] == [1] * len(moments)
    assert all(torch.equal(state["exp_avg"], moment) for state, moment in zip(after, moments, strict=True))


def sum_of_losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def test_a_sum_of_losses_and_labels_the_wrong_way_are_named():
    torch.manual_seed(0)
    assert "a sum over 52 tokens" in reasons(mb.diagnose(Model(), batch=BATCH, loss=sum_of_losses))["initial_loss"]
    assert "the wrong way" in reasons(mb.diagnose(Model(), batch=BATCH[::-1]))["label_shift"]


def mean_of_losses(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda x, y: -mean_of_losses(x, y), "the loss is negative: its sign is wrong"),
        (lambda x, y: F.nll_loss(x.flatten(0, 1), y.flatten()), "log-probabilities belong"),
        (lambda x, y: F.nll_loss(x.softmax(-1).flatten(0, 1), y.flatten()), "log-probabilities belong"),
        (lambda x, y: F.mse_loss(x.softmax(-1), F.one_hot(y, VOCAB).float()), "the cross-entropy of the same logits"),
        (mean_of_losses, None),
        (lambda x, y: mean_of_losses(x, y) / 8, None),
    ],
)
def test_a_loss_below_that_of_a_guess_is_named(loss, words):
    torch.manual_seed(0)
    found = reasons(mb.diagnose(Embedded(), batch=BATCH, loss=loss, checks="label_shift,initial_loss,overfit"))
    assert set(found) == ({"initial_loss"} if words else set())
    assert words is None or words in found["initial_loss"]


@pytest.mark.parametrize("kind", ["causal", "bidirectional"])
@pytest.mark.parametrize(("sign", "maximize"), [(1.0, False), (-1.0, True), (-1.0, False), (1.0, True)])
def test_a_step_that_raises_the_cross_entropy_is_found(sign, maximize, kind):
    torch.manual_seed(0)
    model = Embedded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, maximize=maximize)

    def step():
        optimizer.zero_grad()
        loss = mean_of_losses(model(BATCH[0]), BATCH[1])
        (sign * loss).backward()
        optimizer.step()
        return loss

    found = reasons(mb.diagnose(model, step=step, kind=kind, checks="label_shift,optimizer,learning_rate"))
    is_wrong = (sign < 0) != maximize
    assert ["rises" in reason for reason in found.values()] == ([True] if is_wrong else [])
    if is_wrong and kind == "causal":
        assert ("maximize=True" if maximize else "the wrong sign") in found["initial_loss"]


def test_a_recurrent_step_without_its_state_is_not_told_of_keys_and_values():
    torch.manual_seed(0)
    for forgets in (False, True):
        model = Model(forgets).eval()
        found = reasons(mb.diagnose(model, cached=model.step))
        assert set(found) == ({"cache"} if forgets else set())
    assert "the state of the step before" in found["cache"]


# -- which label meets which logits ---------------------------------------------------------------------------------


class Embedded(nn.Module):
    """Logits from a table of tokens and one of positions."""

    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(40, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def hidden(self, ids):
        return self.token(ids) + self.position(torch.arange(ids.shape[1]))

    def forward(self, ids):
        return self.head(self.hidden(ids))


PADDED = TOKENS.clone()
PADDED[:2, 9:] = 0
LEFT = PADDED.flip(1)


def ignoring(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=0)


def with_labels(loss):
    """Return the findings on a loss of padded labels."""
    torch.manual_seed(0)
    batch = (PADDED[:, :-1], PADDED[:, 1:])
    checks = "label_shift,pad_in_loss,overfit"
    return [
        (f.check, f.reason) for f in mb.diagnose(Embedded(), batch=batch, loss=loss, pad_id=0, checks=checks).findings
    ]


LOSSES = {
    "logits transposed": (lambda x, y: ignoring(x.transpose(0, 1), y), "rows of the logits"),
    "labels transposed": (lambda x, y: ignoring(x, y.T), "rows of the logits"),
    "view of classes": (lambda x, y: F.cross_entropy(x.view(4, VOCAB, 13), y, ignore_index=0), "tokens and classes"),
    "transposed twice": (
        lambda x, y: ignoring(x.transpose(1, 2).reshape(4, 13, VOCAB), y),
        "tokens and classes",
    ),
    "shifted again": (lambda x, y: ignoring(x[:, :-1], y[:, 1:]), "shifted twice"),
    "shifted by two more": (lambda x, y: ignoring(x[:, :-2], y[:, 2:]), "shifted 3 times"),
}
HEALTHY_LOSSES = {
    "flattened": ignoring,
    "classes second": lambda x, y: F.cross_entropy(x.transpose(1, 2), y, ignore_index=0),
    "both transposed": lambda x, y: ignoring(x.transpose(0, 1), y.T),
    "smoothed": lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=0, label_smoothing=0.1),
    "of log-probabilities": lambda x, y: F.nll_loss(x.log_softmax(-1).flatten(0, 1), y.flatten(), ignore_index=0),
    "weighted and divided": lambda x, y: ignoring(x, y) / 8,
    "by hand": lambda x, y: -(x.log_softmax(-1).gather(-1, y[..., None])[..., 0] * (y != 0)).sum() / (y != 0).sum(),
    "focal": lambda x, y: (
        ((1 - (p := x.softmax(-1).gather(-1, y[..., None])[..., 0])) ** 2 * -p.log() * (y != 0)).sum() / (y != 0).sum()
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_labels_that_meet_other_logits_are_found(name):
    loss, words = LOSSES[name]
    assert [(check, words in reason) for check, reason in with_labels(loss)] == [("label_shift", True)]


@pytest.mark.parametrize("name", HEALTHY_LOSSES)
def test_a_loss_may_be_written_in_many_ways(name):
    assert with_labels(HEALTHY_LOSSES[name]) == []


def test_labels_in_a_training_step_are_read_without_a_batch():
    for rows, labels, words in (
        (PADDED[:, :-1], PADDED[:, 1:], None),
        (LEFT[:, :-1], LEFT[:, 1:], None),
        (PADDED[:, :-2], PADDED[:, 2:], "shifted twice"),
        (PADDED, PADDED, "not shifted"),
        (PADDED[:, :-1], PADDED[:, 1:].T.reshape(4, 13), "rows of the logits"),
    ):
        torch.manual_seed(0)
        model = Embedded()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(model=model, rows=rows, labels=labels, optimizer=optimizer):
            optimizer.zero_grad()
            ignoring(model(rows), labels).backward()
            optimizer.step()

        found = mb.diagnose(model, step=step, checks="label_shift").findings
        assert [words in f.reason and "seen in the training step" in f.reason for f in found] == (
            [True] if words else []
        )


def test_padding_before_a_text_and_a_token_that_is_never_padding_do_not_count():
    torch.manual_seed(0)
    model = Embedded()
    for tokens in (LEFT, torch.cat((TOKENS[:, :5], torch.zeros(4, 1, dtype=torch.long), TOKENS[:, 5:]), 1)):
        batch = (tokens[:, :-1], tokens[:, 1:])
        assert mb.diagnose(model, batch=batch, loss=ignoring, pad_id=0, checks="pad_in_loss").findings == []
    (found,) = mb.diagnose(model, batch=(LEFT[:, :-1], LEFT[:, 1:]), pad_id=0, checks="pad_in_loss").findings
    assert found.evidence["tokens_of_padding"] == int((LEFT[:, 1:] == 0).sum())
    assert "which token is padding" in mb.diagnose(model, batch=batch, checks="pad_in_loss").not_checked[0].reason


class Probabilities(Embedded):
    def forward(self, ids):
        return super().forward(ids).softmax(-1)


def test_a_softmax_that_is_taken_twice_is_named_for_any_number_of_classes():
    twice = lambda x, y: ignoring(x.softmax(-1), y)
    log = lambda x, y: F.nll_loss((x + 1e-9).log().flatten(0, 1), y.flatten(), ignore_index=0)
    batch = (PADDED[:, :-1], PADDED[:, 1:])
    for model, loss, is_twice in (
        (Embedded, twice, True),
        (Probabilities, ignoring, True),
        (Probabilities, log, False),
        (Embedded, ignoring, False),
    ):
        torch.manual_seed(0)
        found = mb.diagnose(model(), batch=batch, loss=loss, pad_id=0, checks="overfit").findings
        assert ["the softmax is taken twice" in f.reason for f in found] == ([True] if is_twice else [])


class OwnLoss(Embedded):
    """Takes the softmax before the loss inside of its forward pass."""

    def forward(self, idx, targets=None):
        probabilities = super().forward(idx).softmax(-1)
        return probabilities, None if targets is None else ignoring(probabilities, targets)


class Quiet(Embedded):
    """Healthy, with logits so small that it learns slowly."""

    def forward(self, ids):
        return super().forward(ids) / 16


def test_a_softmax_inside_of_forward_is_named_and_a_model_that_learns_slowly_is_healthy():
    torch.manual_seed(0)
    batch = (PADDED[:, :-1], PADDED[:, 1:])
    (found,) = mb.diagnose(OwnLoss(), batch=batch, pad_id=0, checks="overfit").findings
    assert "the softmax is taken twice: its outputs are probabilities" in found.reason
    report = mb.diagnose(Quiet(), batch=batch, loss=ignoring, checks="overfit")
    assert report.findings == []
    assert len(report.pictures["loss on one batch"]) > 40


# -- gradients that are added up, and the size of an update ---------------------------------------------------------


def step_of(model, optimizer, *, zero="before", clip=None, set_to_none=True, every=1):
    calls = iter(range(1, 10_000))

    def step():
        number = next(calls)
        if zero == "before" and number % every == 1 % every:
            optimizer.zero_grad(set_to_none=set_to_none)
        F.cross_entropy(model(BATCH[0]).flatten(0, 1), BATCH[1].flatten()).backward()
        if zero == "between":
            optimizer.zero_grad()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if number % every == 0:
            optimizer.step()
            if zero == "after":
                optimizer.zero_grad(set_to_none=set_to_none)

    return step


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
@pytest.mark.parametrize("clip", [None, 1.0])
def test_gradients_that_are_never_set_to_zero_are_found(kind, clip):
    torch.manual_seed(0)
    model = Embedded()
    optimizer = kind(model.parameters(), lr=1e-3)
    (found,) = mb.diagnose(model, step=step_of(model, optimizer, zero=None, clip=clip), checks="optimizer").findings
    assert "optimizer.zero_grad() is not called" in found.reason
    for options in (
        {"zero": "before"},
        {"zero": "after"},
        {"set_to_none": False},
        {"zero": "after", "set_to_none": False},
        {"every": 4},
        {"every": 3, "zero": "after", "set_to_none": False},
    ):
        step = step_of(model, optimizer, clip=clip, **options)
        assert mb.diagnose(model, step=step, checks="optimizer").findings == [], options


def test_a_step_alone_says_which_call_is_missing_and_leaves_its_optimizer_as_it_was():
    torch.manual_seed(0)
    model, other = Embedded(), Embedded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    foreign = torch.optim.AdamW(other.parameters(), lr=1e-3)
    frozen = torch.optim.AdamW(model.parameters(), lr=0.0)

    def backward_only():
        F.cross_entropy(model(BATCH[0]).flatten(0, 1), BATCH[1].flatten()).backward()

    cases = {
        backward_only: "optimizer.step() is not called",
        optimizer.step: "loss.backward() is not called",
        step_of(model, optimizer, zero="between"): "zero_grad() comes between",
        step_of(model, foreign): "holds other tensors",
        step_of(model, frozen): "the learning rate is 0",
        (lambda: None): "neither loss.backward() nor optimizer.step()",
    }
    for step, words in cases.items():
        (found,) = mb.diagnose(model, step=step, checks="optimizer").findings
        assert words in found.reason
    step_of(model, optimizer)()
    before = [state["exp_avg"].clone() for state in optimizer.state.values()]
    mb.diagnose(model, step=step_of(model, optimizer))
    assert all(torch.equal(s["exp_avg"], b) for s, b in zip(optimizer.state.values(), before, strict=True))


@pytest.mark.parametrize(
    ("kind", "lr", "is_too_high"),
    [
        (torch.optim.AdamW, 1.0, True),
        (torch.optim.Adam, 1.0, True),
        (torch.optim.RMSprop, 1.0, True),
        (torch.optim.AdamW, 1e-2, False),
        (torch.optim.SGD, 0.1, False),
        (torch.optim.SGD, 1e4, True),
    ],
)
def test_an_optimizer_alone_shows_a_rate_that_is_too_high(kind, lr, is_too_high):
    torch.manual_seed(0)
    model = Embedded()
    before = [p.clone() for p in model.parameters()]
    optimizer = kind(model.parameters(), lr=lr)
    report = mb.diagnose(model, optimizer=optimizer, checks="learning_rate")
    assert ["one step changes the weights by" in f.reason for f in report.findings] == ([True] if is_too_high else [])
    assert ["step=f" in row.how for row in report.not_checked] == ([] if is_too_high else [True])
    assert all(torch.equal(p, b) and p.grad is None for p, b in zip(model.parameters(), before, strict=True))
    assert not optimizer.state
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1e-4, 1e-5 * (step + 1)))  # the usual warm-up
    assert mb.diagnose(model, optimizer=optimizer, checks="learning_rate").findings == []


@pytest.mark.parametrize(("lr", "is_too_high"), [(1e-3, False), (6e-3, False), (1.0, True)])
def test_a_large_rate_at_which_the_loss_falls_is_no_fault(lr, is_too_high):
    torch.manual_seed(0)
    model = Embedded()
    for p in model.parameters():
        nn.init.normal_(p, std=0.02)  # as GPT-2: an update of Adam is large beside such weights
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)

    def step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(BATCH[0]).flatten(0, 1), BATCH[1].flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    found = mb.diagnose(model, step=step, checks="learning_rate").findings
    assert ["too high" in f.reason for f in found] == ([True] if is_too_high else [])


# -- generation -----------------------------------------------------------------------------------------------------


class Dropping(Embedded):
    def __init__(self, functional=False):
        super().__init__()
        self.drop, self.functional = nn.Dropout(0.0 if functional else 0.2), functional

    def hidden(self, ids):
        x = self.drop(super().hidden(ids))
        return F.dropout(x, 0.1, self.training) if self.functional else x


@pytest.mark.parametrize("functional", [False, True])
def test_generation_in_training_mode_is_found(functional):
    torch.manual_seed(0)
    model = Dropping(functional).train()

    def sample(ids):
        for _ in range(3):
            ids = torch.cat((ids, torch.multinomial(model(ids)[:, -1].softmax(-1), 1)), 1)
        return ids

    (found,) = mb.diagnose(model, generate=sample, checks="dropout").findings
    assert "model.eval() is not called" in found.reason
    assert mb.diagnose(model, generate=lambda ids: sample(ids) if model.eval() else None, checks="dropout").ok
    assert model.training
