"""The numbers of the five source documents, computed from configurations; where a document is wrong, what is true.

A the lecture "built live", B encoder and decoder blocks, C module 13 (GPT), D the Transformer for translation,
E chapter 8 with its exercises.
"""

from dataclasses import replace

import pytest

from monoblock.accounting.flops import block_flops
from monoblock.accounting.memory import attention_matrix_bytes
from monoblock.accounting.parameters import block_parameters
from monoblock.accounting.report import account
from monoblock.config import AttentionConfig, BlockConfig, FeedForwardConfig, HeadConfig
from monoblock.families import gpt, llama, vaswani
from monoblock.knobs import rebuild, vary
from monoblock.presets import preset

GB, GIB, MIB = 10**9, 2**30, 2**20


def without_attention_biases(config):
    """As in the documents' listings: matrices alone in attention, biases in the feed-forward."""

    def edit(part, values):
        if isinstance(part, AttentionConfig):
            values["bias"] = ""

    return rebuild(config, edit)


def block(width=512, heads=8, hidden=2048, *, bias=False):
    return BlockConfig(
        width=width,
        attention=AttentionConfig(heads=heads, bias=""),
        feedforward=FeedForwardConfig(hidden=hidden, bias=bias),
    )


# -- A -----------------------------------------------------------------------------------------------------------------


def test_a_the_worked_block():
    assert block_parameters(block()) == {
        "attention": 1_048_576,
        "feedforward": 2_097_152,
        "norm": 2_048,
        "attention.qk_norm": 0,
        "attention.sinks": 0,
        "layer_scale": 0,
    }


def test_a_two_thirds_of_a_block_is_feed_forward_but_not_of_a_model():
    counts = block_parameters(block())
    assert counts["feedforward"] / sum(counts.values()) == pytest.approx(2 / 3, abs=0.001)
    gpt2 = account("gpt2")
    assert gpt2.components["decoder.feedforward"] / gpt2.parameters == pytest.approx(0.455, abs=0.001)


def test_a_attention_has_as_many_weights_at_any_length():
    short, long = (gpt(vocab=65, width=192, depth=6, heads=6, context=n, positions="rotary") for n in (10, 10_000))
    assert account(short).parameters == account(long).parameters


@pytest.mark.parametrize(("name", "share"), [("gpt2", 23.7), ("gpt-tiny", 0.45)])
def test_a_what_tying_saves_depends_on_the_vocabulary(name, share):
    """The lecture says about 25 %, and builds a GPT over 65 characters."""
    untied = account(vary(preset(name), tie="none")).parameters
    assert 100 * (1 - account(name).parameters / untied) == pytest.approx(share, abs=0.05)


# -- B -----------------------------------------------------------------------------------------------------------------


def listing_b():
    own = vaswani(vocab=37_000, target_vocab=37_000, tie="none")
    head = HeadConfig(kind="language_model", bias="learned")
    return without_attention_biases(replace(own, head=head))


def test_b_the_listing_has_101_million_parameters():
    """It prints 65,052,672; that is neither its own count nor the one with all three tables tied."""
    assert account(listing_b()).parameters == 100_970_632
    assert account(without_attention_biases(vaswani(vocab=37_000))).parameters == 63_045_632


def test_b_the_table_of_trainable_parameters():
    counts = account(listing_b()).components
    assert counts["input.token"] == counts["target.token"] == counts["head.output"] == 37_000 * 512
    assert counts["encoder.attention"] == counts["decoder.cross"] == 6 * 4 * 512 * 512
    assert counts["encoder.feedforward"] == 6 * (2 * 512 * 2048 + 2048 + 512)
    assert counts["encoder.block_norms"] == 6 * 2 * 2 * 512
    assert not any("position" in name for name in counts)  # sinusoids are not learned


@pytest.mark.parametrize(("tokens", "mib"), [(512, 1), (2048, 16), (8192, 256)])
def test_b_an_attention_matrix_in_fp32(tokens, mib):
    assert attention_matrix_bytes(queries=tokens, dtype="fp32") == mib * MIB


def test_b_128_000_tokens_take_65_5_gb():
    """It says about 64 GB."""
    size = attention_matrix_bytes(queries=128_000, dtype="fp32")
    assert (round(size / GB, 1), round(size / GIB, 1)) == (65.5, 61.0)


# -- C -----------------------------------------------------------------------------------------------------------------


def gpt_c(width=512, heads=8):
    return without_attention_biases(gpt(vocab=50_000, width=width, depth=12, heads=heads, context=2048))


def test_c_table_6():
    counts = block_parameters(block(bias=True))
    assert counts["attention"] == 4 * 512 * 512
    assert counts["norm"] == 2 * 2 * 512
    assert counts["feedforward"] == 1_050_624 + 1_049_088
    assert sum(counts.values()) == pytest.approx(3.2e6, rel=0.02)


def test_c_the_gpt_of_64_million():
    """Its overview says 60 M, and that the MLPs exceed attention and embeddings together."""
    found = account(gpt_c())
    assert found.parameters == 64_453_632
    assert found.components["input.token"] == 25_600_000
    assert found.components["input.position"] == 1_048_576
    mlp = found.components["decoder.feedforward"]
    rest = found.components["decoder.attention"] + found.components["input.token"] + found.components["input.position"]
    assert (round(mlp / 1e6, 1), round(rest / 1e6, 1)) == (25.2, 39.2)


def test_c_gpt_2_small_has_124_million():
    """It says 117 M, the count of the first report."""
    assert account("gpt2").parameters == 124_439_808


@pytest.mark.parametrize(("length", "mib"), [(512, 32), (1024, 128), (2048, 512), (4096, 2048)])
def test_c_table_7(length, mib):
    assert attention_matrix_bytes(batch=4, heads=8, queries=length, dtype="fp32") == mib * MIB


def test_c_twelve_layers_at_4096_tokens_burn_24_gib_on_attention_matrices():
    config = without_attention_biases(gpt(vocab=50_000, width=512, depth=12, heads=8, context=4096))
    found = account(config).training_bytes(4, 4096, "fp32", fused=False)
    assert found.attention_matrices == 24 * GIB


@pytest.mark.parametrize(("length", "gib"), [(2048, 2), (4096, 8)])
def test_c_question_1(length, gib):
    assert attention_matrix_bytes(batch=8, heads=16, queries=length, dtype="fp32") == gib * GIB


def test_c_question_2():
    found = account(gpt_c(width=768, heads=12))
    blocks = sum(count for name, count in found.components.items() if name.startswith("decoder."))
    assert found.components["input.token"] == 38_400_000
    assert found.components["input.position"] == pytest.approx(1.6e6, rel=0.02)
    assert blocks == pytest.approx(85e6, rel=0.01)
    assert found.parameters == pytest.approx(125e6, rel=0.01)


def test_c_question_4_a_cache_processes_149_positions_instead_of_9950():
    """It counts 150: the hundredth token is written, and never read."""
    found = account(gpt_c())
    cached = found.decoding(prompt=50, new=100)
    again = found.decoding(prompt=50, new=100, cached=False)
    assert (cached.positions, again.positions) == (149, 9_950)
    assert again.positions / cached.positions == pytest.approx(66.8, abs=0.05)


@pytest.mark.parametrize(("kv_heads", "gb"), [(64, 85.9), (8, 10.7)])
def test_c_the_cache_of_a_70b_at_32k(kv_heads, gb):
    """It says roughly 20 GB, often more than the weights."""
    config = vary(preset("llama2-70b"), kv_heads=kv_heads)
    assert account(config).kv_cache_bytes(1, 32_768, "fp16") / GB == pytest.approx(gb, abs=0.05)
    assert account("llama2-70b").weight_bytes("fp16") / GB == pytest.approx(138, abs=0.1)


def test_c_scores_overtake_the_mlp_at_four_widths_and_attention_at_two():
    """It says at one width, and always."""
    width = 512

    def work(length):
        found = block_flops(block(width), 1, length, 0)
        return found["attention.scores"], found["attention.projections"], found["feedforward"]

    scores, _, mlp = work(4 * width)
    assert scores == mlp
    scores, projections, mlp = work(2 * width)
    assert scores + projections == mlp
    scores, projections, mlp = work(width)
    assert scores + projections < mlp


def test_c_gpt_3_lies_far_below_that_crossover():
    found = account("gpt3-175b").flops(1, 2048).components
    attention = found["decoder.attention.scores"] + found["decoder.attention.projections"]
    assert found["decoder.attention.scores"] < 0.05 * found["decoder.feedforward"]
    assert attention < found["decoder.feedforward"]


def test_c_gpt_3_takes_2_8_tb_to_train():
    """It says 700 GB. Weights in fp16 are 350 GB, as it says."""
    found = account("gpt3-175b")
    assert found.weight_bytes("fp16") / GB == pytest.approx(350, abs=1)
    assert found.training_bytes(1, 1, "fp16").state / 10**12 == pytest.approx(2.8, abs=0.01)


def test_c_from_2k_to_32k_attention_matrices_grow_256_fold_and_doubling_quadruples():
    at = {n: attention_matrix_bytes(heads=96, queries=n, dtype="fp16") for n in (2048, 4096, 32_768)}
    assert at[32_768] == 256 * at[2048]
    assert at[4096] == 4 * at[2048]


# -- D -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [2, 5])
def test_d_a_beam_costs_as_many_times_greedy(beams):
    """Greedy decoding is O(N V), beam search O(k N V): from the second word on every step is done k times."""
    found = account("vaswani-base")
    first, greedy = (found.decoding(new=new, source=40).flops for new in (1, 30))
    beam = found.decoding(new=30, source=40, beams=beams).flops
    assert beam - first == beams * (greedy - first)


def test_d_the_feed_forward_is_the_largest_part_of_every_block():
    counts = account("vaswani-base").components
    assert counts["encoder.feedforward"] > counts["encoder.attention"]
    assert counts["decoder.feedforward"] == pytest.approx(
        counts["decoder.attention"] + counts["decoder.cross"], rel=0.01
    )


# -- E -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16, 32, 64])
def test_e_8_3_5_heads_do_not_change_the_count(heads):
    assert block_parameters(block(512, heads))["attention"] == 4 * 512**2 == 1_048_576
    assert block_parameters(block(1024, heads))["attention"] == 4 * 1024**2


def test_e_8_5_4_the_feed_forward_has_twice_the_weights_of_attention():
    counts = block_parameters(block())
    assert counts["feedforward"] == 2 * counts["attention"] == 2_097_152


def test_e_exercise_8_2():
    config = gpt(
        vocab=32_000, width=512, depth=6, heads=8, context=512, bias=False, positions="sinusoid", norm_place="post"
    )
    found = account(config)
    assert found.components == {
        "input.token": 32_000 * 512,
        "decoder.attention": 6 * 4 * 512**2,
        "decoder.feedforward": 6 * 2 * 512 * 2048,
        "decoder.block_norms": 6 * 2 * 2 * 512,
    }
    assert found.parameters == 35_270_656


def test_e_exercise_8_4_the_matrices_take_a_gibibyte():
    size = attention_matrix_bytes(heads=32, queries=4096, dtype="fp16")
    assert size == GIB
    assert size / GB == pytest.approx(1.07, abs=0.01)


def test_e_exercise_8_4_scores_dominate_projections_beyond_twice_the_width():
    """It says beyond the width, or the width of a head."""
    one = block(4096, 32, 4 * 4096)
    at = {length: block_flops(one, 1, length, 0) for length in (128, 4096, 8192, 8193)}
    assert at[8192]["attention.scores"] == at[8192]["attention.projections"]
    assert at[8193]["attention.scores"] > at[8193]["attention.projections"]
    for length in (128, 4096):
        assert at[length]["attention.scores"] < at[length]["attention.projections"]


def test_a_gated_layer_of_two_thirds_the_width_has_the_weights_of_a_plain_one():
    """Shazeer 2020, as the lecture's table of variations tells: SwiGLU at 8/3 of the width."""
    plain = block_parameters(block(768, 12, 3072))
    gated = account(llama(vocab=1, width=768, depth=1, heads=12, context=1)).components
    assert gated["decoder.feedforward"] == plain["feedforward"]
