"""The recurrent baselines: LSTM language model, and LSTM encoder-decoder with additive attention.

Sizes are distinct primes, so that no swapped axis passes: B 2, depth 3, S 5, T 7, width 11, V 13 and 17.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.testing import assert_close

import monoblock as mb
from monoblock.accounting.lstm import matching_config, parameter_count
from monoblock.baselines.lstm import Recurrent, RecurrentConfig, additive_attention

B, L, S, T, D, V, W = 2, 3, 5, 7, 11, 13, 17  # W: the target's vocabulary


def build(kind, dtype=torch.float64, **fields):
    torch.manual_seed(1)
    sizes = {"vocab": V, "width": D, "depth": L, "target_vocab": W if kind == "encoder_decoder" else None}
    return Recurrent(RecurrentConfig(kind=kind, **{**sizes, **fields})).to(dtype).eval()


def random_ids(rows, length, vocab=V, seed=2):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(seed))


def mask_from_lengths(*lengths, total):
    return torch.arange(total) < torch.tensor(lengths).unsqueeze(1)


@pytest.fixture
def language_model():
    return build("language_model")


@pytest.fixture
def translator():
    return build("encoder_decoder")


# -- shapes and sizes


def test_the_language_model_gives_logits_for_every_place(language_model):
    assert language_model(random_ids(B, T)).shape == (B, T, V)


def test_the_encoder_decoder_gives_logits_for_every_target_place(translator):
    source, target = random_ids(B, S), random_ids(B, T, W)
    assert translator(source, target).shape == (B, T, W)
    memory = translator.encode(source)
    assert (memory.values.shape, memory.keys.shape) == ((B, S, 2 * D), (B, S, D))
    logits, state = translator.step(target[:, 0], translator.initial_state(memory), memory)
    assert logits.shape == (B, W)
    assert state.hidden.shape == state.cell.shape == (L, B, D)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    ("kind", "target_vocab"), [("language_model", None), ("encoder_decoder", None), ("encoder_decoder", W)]
)
def test_the_closed_form_counts_what_is_built(kind, target_vocab, depth, tie):
    config = RecurrentConfig(kind=kind, vocab=V, target_vocab=target_vocab, width=D, depth=depth, tie=tie)
    with torch.device("meta"):
        model = Recurrent(config)
    assert parameter_count(config) == sum(weight.numel() for weight in model.parameters())


def test_the_count_is_the_formula_of_the_docstring():
    lstm = lambda inputs: 4 * D * (inputs + D + 2)
    language_model = RecurrentConfig(vocab=V, width=D, depth=L)
    assert parameter_count(language_model) == V * D + L * lstm(D) + V
    pair = RecurrentConfig(kind="encoder_decoder", vocab=V, target_vocab=W, width=D, depth=L, tie=False)
    layers = 2 * lstm(D) + 2 * (L - 1) * lstm(2 * D) + lstm(3 * D) + (L - 1) * lstm(D)
    rest = 3 * D**2 + D + L * D * (D + 1) + 2 * D * (4 * D + 1)
    assert parameter_count(pair) == V * D + W * D + W + W * D + layers + rest


@pytest.mark.parametrize(
    "config",
    [
        mb.gpt(vocab=65, width=192, depth=6, heads=6, context=256),
        mb.gpt(vocab=50257, width=768, depth=12, heads=12, context=1024),
        mb.vaswani(vocab=37000),
        mb.vaswani(vocab=1009, target_vocab=2003, width=64, depth=2, heads=4),
    ],
)
def test_matching_comes_within_two_per_cent_and_no_neighbour_is_nearer(config):
    matched = matching_config(config)
    assert matched.kind == ("language_model" if config.family == "decoder-only" else "encoder_decoder")
    target_count = mb.account(config).parameters
    miss = [abs(parameter_count(replace(matched, width=matched.width + step)) - target_count) for step in (-1, 0, 1)]
    assert miss[1] == min(miss)
    assert miss[1] <= 0.02 * target_count


def test_matching_keeps_vocabularies_tying_and_dropout():
    matched = matching_config(mb.vaswani(vocab=V, target_vocab=W, width=8, depth=1, heads=2, dropout=0.25))
    assert (matched.vocab, matched.target_vocab, matched.tie, matched.dropout) == (V, W, True, 0.25)
    assert matching_config(mb.vaswani(vocab=V, width=8, depth=1, heads=2)).target_vocab is None
    assert not matching_config(mb.llama(vocab=V, width=8, depth=1, heads=2, context=5)).tie
    single = matching_config(mb.vaswani(vocab=V, target_vocab=W, width=8, depth=1, heads=2), "language_model", depth=1)
    assert (single.kind, single.vocab, single.target_vocab, single.depth) == ("language_model", W, None, 1)


def test_matching_refuses_what_has_no_counterpart():
    with pytest.raises(mb.ConfigError, match="a model of images or audio"):
        matching_config(mb.vit(image=8, patch=4, width=8, depth=1, heads=2, classes=3))
    bert = mb.bert(vocab=V, width=8, depth=1, heads=2, context=5)
    with pytest.raises(mb.ConfigError, match="write kind='language_model'"):
        matching_config(bert)
    assert matching_config(bert, "language_model").vocab == V


# -- padding


def test_right_padding_changes_nothing_for_the_language_model(language_model):
    ids, mask = random_ids(B, T), mask_from_lengths(T, 4, total=T)
    padded = language_model(ids, mask)
    assert_close(padded[0], language_model(ids[:1])[0], rtol=0, atol=1e-10)
    assert_close(padded[1, :4], language_model(ids[1:, :4])[0], rtol=0, atol=1e-10)
    _, state = language_model.forward_with_state(ids, mask)
    _, alone = language_model.forward_with_state(ids[1:, :4])
    assert_close(state.select(torch.tensor([1])), alone, rtol=0, atol=1e-10)


def test_right_padding_changes_nothing_for_the_encoder_decoder(translator):
    source, target = random_ids(B, S), random_ids(B, T, W)
    padded = translator(source, target, mask_from_lengths(3, S, total=S), mask_from_lengths(T, 4, total=T))
    assert_close(padded[0], translator(source[:1, :3], target[:1])[0], rtol=0, atol=1e-10)
    assert_close(padded[1, :4], translator(source[1:], target[1:, :4])[0], rtol=0, atol=1e-10)


def test_the_ids_of_padding_are_never_read(translator):
    source, target, mask = random_ids(B, S), random_ids(B, T, W), mask_from_lengths(3, S, total=S)
    changed = source.clone()
    changed[0, 3:] = (changed[0, 3:] + 1) % V
    assert_close(translator(source, target, mask), translator(changed, target, mask), rtol=0, atol=0)


def test_a_mask_without_padding_is_no_mask(translator, language_model):
    source, target, ones = random_ids(B, S), random_ids(B, T, W), torch.ones(B, S, dtype=torch.long)
    assert_close(translator(source, target, ones), translator(source, target), rtol=0, atol=1e-10)
    assert_close(translator(source, target, attention_mask=ones), translator(source, target), rtol=0, atol=1e-10)
    assert_close(language_model(source, attention_mask=ones), language_model(source), rtol=0, atol=1e-10)


# -- order


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_future_token_never_moves_a_past_logit(dtype):
    ids = random_ids(B, T)
    changed = ids.index_fill(1, torch.tensor([4]), 0)
    model = build("language_model", dtype)
    assert_close(model(ids)[:, :4], model(changed)[:, :4], rtol=0, atol=0)
    assert not torch.equal(model(ids)[:, 4:], model(changed)[:, 4:])
    model, source = build("encoder_decoder", dtype), random_ids(B, S)
    assert_close(model(source, ids)[:, :4], model(source, changed)[:, :4], rtol=0, atol=0)
    assert not torch.equal(model(source, ids)[:, 4:], model(source, changed)[:, 4:])


def test_the_encoder_reads_in_both_directions(translator):
    source = random_ids(B, S)
    for index in (0, S - 1):
        changed = source.clone()
        changed[:, index] = (changed[:, index] + 1) % V
        moved = (translator.encode(source).values - translator.encode(changed).values).abs().amax((0, 2))
        assert (moved > 0).all()


def test_steps_equal_a_full_pass(language_model, translator):
    ids, source, target, mask = (
        random_ids(B, T),
        random_ids(B, S),
        random_ids(B, T, W),
        mask_from_lengths(3, S, total=S),
    )
    state, outputs = None, []
    for token in ids.unbind(1):
        logits, state = language_model.step(token, state)
        outputs.append(logits)
    assert_close(torch.stack(outputs, 1), language_model(ids), rtol=0, atol=1e-10)

    memory, state, outputs = translator.encode(source, mask), None, []
    for token in target.unbind(1):
        logits, state = translator.step(token, state, memory)
        outputs.append(logits)
    assert_close(torch.stack(outputs, 1), translator(source, target, mask), rtol=0, atol=1e-10)


def test_a_state_continues_a_text(language_model):
    ids = random_ids(B, T)
    first, state = language_model.forward_with_state(ids[:, :3])
    assert_close(
        torch.cat([first, language_model(ids[:, 3:], state=state)], 1), language_model(ids), rtol=0, atol=1e-10
    )


def test_selected_rows_step_as_they_would_have(translator):
    source, target, rows = random_ids(B, S), random_ids(B, T, W), torch.tensor([1, 1, 0])
    memory = translator.encode(source, mask_from_lengths(3, S, total=S))
    _, state = translator.step(target[:, 0], None, memory)
    plain, _ = translator.step(target[:, 1], state, memory)
    chosen, _ = translator.step(target[rows, 1], state.select(rows), memory.select(rows))
    assert_close(chosen, plain[rows], rtol=0, atol=1e-10)


# -- attention


def test_attention_is_a_distribution_over_the_real_source(translator):
    outputs = {}
    tap = lambda name, tensor: outputs.setdefault(name, tensor)
    translator(random_ids(B, S), random_ids(B, T, W), mask_from_lengths(3, S, total=S), tap=tap)
    weights = outputs["attention.weights"]
    assert weights.shape == (B, T, S)
    assert_close(weights.sum(-1), torch.ones(B, T, dtype=weights.dtype), rtol=0, atol=1e-10)
    assert (weights[0, :, 3:] == 0).all()
    assert (weights[0, :, :3] > 0).all()
    assert (weights[1] > 0).all()


def test_additive_attention_is_the_formula(translator):
    memory = translator.encode(random_ids(B, S), mask_from_lengths(3, S, total=S))
    state = translator.initial_state(memory)
    outputs = {}
    tap = lambda name, tensor: outputs.setdefault(name, tensor)
    translator.step(random_ids(1, B, W)[0], state, memory, tap=tap)
    names = ("query", "key", "score")
    query_weight, key_weight, v = (translator.attention.get_parameter(f"{name}.weight") for name in names)
    for row, length in enumerate((3, S)):
        s = state.hidden[-1, row]
        e = [v[0].dot(torch.tanh(query_weight @ s + key_weight @ memory.values[row, j])) for j in range(length)]
        powers = torch.stack(e).exp()
        assert_close(outputs["attention.weights"][row, :length], powers / powers.sum(), rtol=0, atol=1e-10)


def test_a_step_is_the_formula():
    """One layer written out: the context enters the cell; maxout combines state, context and token."""
    model, source, token = build("encoder_decoder", depth=1), random_ids(B, S), random_ids(1, B, W)[0]
    memory = model.encode(source)
    state = model.initial_state(memory)
    s, c = torch.tanh(memory.values[:, 0, D:] @ model.start.weight.T + model.start.bias), torch.zeros(B, D).double()
    assert_close(state.hidden[0], s, rtol=0, atol=1e-10)

    weights = additive_attention(model.attention["query"](s), memory.keys, model.attention["score"], None)
    context, token_embedding = (weights.unsqueeze(-1) * memory.values).sum(1), model.target.weight[token]
    cell = model.decoder[0]
    gates = (
        torch.cat([token_embedding, context], 1) @ cell.weight_ih.T + cell.bias_ih + s @ cell.weight_hh.T + cell.bias_hh
    )
    i, f, g, o = gates.chunk(4, 1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    s = o.sigmoid() * c.tanh()
    readout = torch.cat([s, context, token_embedding], 1) @ model.readout.weight.T + model.readout.bias
    logits = torch.maximum(readout[:, ::2], readout[:, 1::2]) @ model.target.weight.T + model.bias

    matched, after = model.step(token, state, memory)
    assert_close(matched, logits, rtol=0, atol=1e-10)
    assert_close((after.hidden[0], after.cell[0]), (s, c), rtol=0, atol=1e-10)


def test_a_tap_changes_attention_in_a_step_and_is_refused_in_a_full_pass(translator):
    source, target = random_ids(B, S), random_ids(B, T, W)
    memory = translator.encode(source)

    def first(name, tensor):
        is_weights = name == "attention.weights"
        return torch.zeros_like(tensor).index_fill(1, torch.tensor([0]), 1.0) if is_weights else tensor

    plain, patched = translator.step(target[:, 0], None, memory), translator.step(target[:, 0], None, memory, tap=first)
    assert not torch.equal(plain[0], patched[0])
    with pytest.raises(mb.InputError, match=r"use model\.step"):
        translator(source, target, tap=first)


# -- training


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("kind", ["language_model", "encoder_decoder"])
def test_gradients_reach_every_parameter(kind, tie):
    model = build(kind, tie=tie, dropout=0.1).train()
    inputs = (random_ids(B, T), mask_from_lengths(T, 4, total=T))
    if kind == "encoder_decoder":
        inputs = (random_ids(B, S), random_ids(B, T, W), mask_from_lengths(3, S, total=S))
    model(*inputs).square().sum().backward()
    without_gradient = [
        name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()
    ]
    assert not without_gradient


def test_training_on_ragged_rows_is_the_same_every_time():
    def gradients():
        model = build("encoder_decoder", torch.float32, dropout=0.1).train()
        model(random_ids(B, S), random_ids(B, T, W), mask_from_lengths(3, S, total=S)).square().sum().backward()
        return [weight.grad for weight in model.parameters()]

    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # refuses an operation that has no deterministic form
    try:
        assert_close(gradients(), gradients(), rtol=0, atol=0)
    finally:
        torch.use_deterministic_algorithms(before)


def test_forget_gates_start_open_and_recurrent_matrices_orthogonal(language_model):
    assert (language_model.decoder.bias_ih_l1[D : 2 * D] == 1).all()
    assert (language_model.decoder.bias_ih_l1[:D].abs() + language_model.decoder.bias_hh_l1[:D].abs() == 0).all()
    for gate in language_model.decoder.weight_hh_l0.chunk(4):
        assert_close(gate @ gate.T, torch.eye(D).double(), rtol=0, atol=1e-5)  # drawn in fp32


def test_the_encoder_decoder_learns_to_reverse_eight_strings():
    torch.manual_seed(3)
    config = RecurrentConfig(kind="encoder_decoder", vocab=V, width=32, depth=1)
    model, strings = Recurrent(config), random_ids(8, S, V - 1) + 1  # 0 begins every target
    answer = strings.flip(1)
    target = torch.cat([torch.zeros(8, 1, dtype=torch.long), answer[:, :-1]], 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(120):
        loss = cross_entropy(model(strings, target).flatten(0, 1), answer.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05

    memory, state, token, written = model.encode(strings), None, target[:, 0], []
    for _ in range(S):
        logits, state = model.step(token, state, memory)
        token = logits.argmax(-1)
        written.append(token)
    assert torch.equal(torch.stack(written, 1), answer)


# -- refusals


def test_padding_on_the_left_is_refused(language_model, translator):
    left = mask_from_lengths(2, T, total=T).flip(1)
    with pytest.raises(mb.InputError, match=r"attention_mask has padding before .* pad on the right"):
        language_model(random_ids(B, T), attention_mask=left)
    with pytest.raises(mb.InputError, match="source_mask has padding before"):
        translator(random_ids(B, T), random_ids(B, T, W), left)
    with pytest.raises(mb.InputError, match="target_mask has padding before"):
        translator(random_ids(B, S), random_ids(B, T, W), None, left)


def test_masks_must_fit_and_leave_a_token(language_model):
    with pytest.raises(mb.InputError, match="give a 1 or 0 for each"):
        language_model(random_ids(B, T), mask_from_lengths(2, 3, total=S))
    with pytest.raises(mb.InputError, match="a row without a real token"):
        language_model(random_ids(B, T), mask_from_lengths(0, 3, total=T))
    with pytest.raises(mb.InputError, match="values other than 0 and 1"):
        language_model(random_ids(B, T), random_ids(B, T) + 2)


@pytest.mark.parametrize("wrong", [-1, V])
def test_ids_outside_the_vocabulary_are_named(language_model, wrong):
    ids = random_ids(B, T)
    ids[1, 3] = wrong
    with pytest.raises(mb.InputError, match=f"the id {wrong}, which is not in the vocabulary; .* 0 to {V - 1}"):
        language_model(ids)


def test_each_side_has_its_own_vocabulary(translator):
    with pytest.raises(mb.InputError, match=f"source holds the id {V}"):
        translator(torch.full((B, S), V), random_ids(B, T, W))
    with pytest.raises(mb.InputError, match=f"target holds the id {W}"):
        translator(random_ids(B, S), torch.full((B, T), W))
    translator(random_ids(B, S), torch.full((B, T), W - 1))


@pytest.mark.parametrize("ids", [torch.zeros(B, T), torch.zeros(T, dtype=torch.long), torch.zeros(B, 0).long()])
def test_ids_are_whole_numbers_in_rows(language_model, ids):
    with pytest.raises(mb.InputError, match=r"give whole numbers of shape \(B, T\)"):
        language_model(ids)


def test_a_call_of_the_other_kind_is_refused(language_model, translator):
    ids, target = random_ids(B, T), random_ids(B, T, W)
    calls = {
        "takes one text": lambda: language_model(
            ids, mask_from_lengths(2, 3, total=T), source_mask=mask_from_lengths(2, 3, total=T)
        ),
        "takes two texts": lambda: translator(ids),
        "encode is for kind='encoder_decoder'": lambda: language_model.encode(ids),
        "forward_with_state is for kind='language_model'": lambda: translator.forward_with_state(ids),
        "a language model takes none": lambda: language_model.step(ids[:, 0], None, translator.encode(ids)),
        "needs memory=model.encode": lambda: translator.step(target[:, 0]),
        "give one source for each target": lambda: translator(ids[:1], target),
        "state has shape": lambda: language_model(ids, state=translator.initial_state(translator.encode(ids[:1]))),
    }
    for message, call in calls.items():
        with pytest.raises(mb.InputError, match=message) as raised:
            call()
        assert "\n" not in str(raised.value)


def test_a_language_model_has_one_vocabulary():
    with pytest.raises(mb.ConfigError, match="target_vocab=17 has no meaning"):
        Recurrent(RecurrentConfig(vocab=V, target_vocab=W, width=D))
