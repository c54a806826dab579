"""The numbers of the five source documents, computed from configurations; where a document is wrong, the correct one.

A is the lecture "Built Live", B the tutorial on encoder and decoder blocks, C the course module on GPT, D the slides on
translation, E the textbook chapter with exercises (docs/errata.md).
"""

from dataclasses import replace

import pytest

from monoblock.accounting.flops import block_flops, gpu_hours
from monoblock.accounting.memory import attention_matrix_bytes
from monoblock.accounting.parameters import block_parameters
from monoblock.accounting.report import account
from monoblock.config.families import gpt, llama, vaswani
from monoblock.config.knobs import rebuild, vary
from monoblock.config.model import AttentionConfig, BlockConfig, FeedForwardConfig, HeadConfig
from monoblock.config.presets import preset

GB, GIB, MIB = 10**9, 2**30, 2**20


def without_attention_biases(config):
    """Return the configuration of the documents' listings: biases in the feed-forward layers only."""

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


def test_a_the_parameters_of_the_example_block():
    assert block_parameters(block()) == {
        "attention": 1_048_576,
        "feedforward": 2_097_152,
        "norm": 2_048,
        "attention.positions": 0,
        "attention.qk_norm": 0,
        "attention.sinks": 0,
        "layer_scale": 0,
    }


def test_a_two_thirds_of_a_block_is_feed_forward_but_not_of_a_model():
    counts = block_parameters(block())
    assert counts["feedforward"] / sum(counts.values()) == pytest.approx(2 / 3, abs=0.001)
    gpt2 = account("gpt2")
    assert gpt2.components["decoder.feedforward"] / gpt2.parameters == pytest.approx(0.455, abs=0.001)


def test_a_the_parameters_of_attention_do_not_depend_on_the_length():
    short, long = (gpt(vocab=65, width=192, depth=6, heads=6, context=n, positions="rotary") for n in (10, 10_000))
    assert account(short).parameters == account(long).parameters


@pytest.mark.parametrize(("name", "share"), [("gpt2", 23.7), ("gpt-tiny", 0.45)])
def test_a_what_tying_saves_depends_on_the_vocabulary(name, share):
    """The lecture says about 25 %, and builds a GPT over 65 characters."""
    untied = account(vary(preset(name), tie="none")).parameters
    assert 100 * (1 - account(name).parameters / untied) == pytest.approx(share, abs=0.05)


# -- B -----------------------------------------------------------------------------------------------------------------


def listing_b():
    config = vaswani(vocab=37_000, target_vocab=37_000, tie="none")
    head = HeadConfig(kind="language_model", bias="learned")
    return without_attention_biases(replace(config, head=head))


def test_b_the_listing_has_101_million_parameters():
    """The document prints 65,052,672: neither the count of its listing nor that with three-way tying."""
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


@pytest.mark.parametrize(
    ("tokens", "entries"),
    [(512, 262_144), (1_000, 10**6), (2048, 4_194_304), (8192, 67_108_864), (10_000, 10**8), (128_000, 16_384_000_000)],
)
def test_b_an_attention_matrix_has_the_square_of_the_length_as_entries(tokens, entries):
    assert attention_matrix_bytes(queries=tokens, dtype="fp32") == 4 * entries


def test_b_128_000_tokens_take_65_5_gb():
    """The document says about 64 GB."""
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
    """The overview says 60 M, and that the MLPs exceed attention and embeddings together."""
    model = account(gpt_c())
    assert model.parameters == 64_453_632
    assert model.components["input.token"] == 25_600_000
    assert model.components["input.position"] == 1_048_576
    mlp = model.components["decoder.feedforward"]
    rest = model.components["decoder.attention"] + model.components["input.token"] + model.components["input.position"]
    assert (round(mlp / 1e6, 1), round(rest / 1e6, 1)) == (25.2, 39.2)


def test_c_twelve_blocks_have_37_8_million():
    assert 12 * sum(block_parameters(block(bias=True)).values()) == pytest.approx(37.8e6, abs=0.05e6)


def test_c_gpt_2_small_has_124_million():
    """The document says 117 M, the count of the original report."""
    assert account("gpt2").parameters == 124_439_808


@pytest.mark.parametrize(("length", "mib"), [(512, 32), (1024, 128), (2048, 512), (4096, 2048)])
def test_c_table_7(length, mib):
    assert attention_matrix_bytes(batch=4, heads=8, queries=length, dtype="fp32") == mib * MIB


def test_c_twelve_layers_at_4096_tokens_need_24_gib_for_attention_matrices():
    config = without_attention_biases(gpt(vocab=50_000, width=512, depth=12, heads=8, context=4096))
    memory = account(config).training_bytes(4, 4096, "fp32", fused=False)
    assert memory.attention_matrices == 24 * GIB


@pytest.mark.parametrize(("length", "gib"), [(2048, 2), (4096, 8)])
def test_c_question_1(length, gib):
    assert attention_matrix_bytes(batch=8, heads=16, queries=length, dtype="fp32") == gib * GIB


def test_c_question_2():
    model = account(gpt_c(width=768, heads=12))
    blocks = sum(count for name, count in model.components.items() if name.startswith("decoder."))
    assert model.components["input.token"] == 38_400_000
    assert model.components["input.position"] == pytest.approx(1.6e6, rel=0.02)
    assert blocks == pytest.approx(85e6, rel=0.01)
    assert model.parameters == pytest.approx(125e6, rel=0.01)


def test_c_question_4_a_cache_processes_149_positions_instead_of_9950():
    """The document counts 150, but the last token is generated and never read."""
    model = account(gpt_c())
    cached = model.decoding(prompt=50, new=100)
    uncached = model.decoding(prompt=50, new=100, cached=False)
    assert (cached.positions, uncached.positions) == (149, 9_950)
    assert uncached.positions / cached.positions == pytest.approx(66.8, abs=0.05)


@pytest.mark.parametrize(("kv_heads", "gb"), [(64, 85.9), (8, 10.7)])
def test_c_the_cache_of_a_70b_at_32k(kv_heads, gb):
    """The document says roughly 20 GB, often more than the weights."""
    config = vary(preset("llama2-70b"), kv_heads=kv_heads)
    assert account(config).kv_cache_bytes(1, 32_768, "fp16") / GB == pytest.approx(gb, abs=0.05)
    assert account("llama2-70b").weight_bytes("fp16") / GB == pytest.approx(138, abs=0.1)


def test_c_scores_overtake_the_mlp_at_four_widths_and_attention_at_two():
    """The document says at one width, and always."""
    width = 512

    def work(length):
        flops = block_flops(block(width), 1, length, 0)
        return flops["attention.scores"], flops["attention.projections"], flops["feedforward"]

    scores, _, mlp = work(4 * width)
    assert scores == mlp
    scores, projections, mlp = work(2 * width)
    assert scores + projections == mlp
    scores, projections, mlp = work(width)
    assert scores + projections < mlp


def test_c_gpt_3_lies_far_below_that_crossover():
    flops = account("gpt3-175b").flops(1, 2048).components
    attention = flops["decoder.attention.scores"] + flops["decoder.attention.projections"]
    assert flops["decoder.attention.scores"] < 0.05 * flops["decoder.feedforward"]
    assert attention < flops["decoder.feedforward"]


def test_c_gpt_3_takes_2_8_tb_to_train():
    """The document says 700 GB; its 350 GB for the weights in fp16 are correct."""
    model = account("gpt3-175b")
    assert model.weight_bytes("fp16") / GB == pytest.approx(350, abs=1)
    assert model.training_bytes(1, 1, "fp16").state / 10**12 == pytest.approx(2.8, abs=0.01)


def test_c_training_gpt_3_costs_4_6_million_dollars():
    """The usual estimate: 300 billion tokens at 28 TFLOP/s and 1.50 dollars an hour; 10,000 GPUs take two weeks."""
    model = account("gpt3-175b")
    assert model.parameters == pytest.approx(175e9, rel=0.01)
    hours = gpu_hours(6 * 175e9 * 300e9, peak=28e12, mfu=1.0)
    assert 1.50 * hours == pytest.approx(4.6e6, rel=0.03)
    assert hours / 10_000 / 24 == pytest.approx(13, abs=0.1)


def test_c_from_2k_to_32k_attention_matrices_grow_256_fold_and_doubling_quadruples():
    size = {n: attention_matrix_bytes(heads=96, queries=n, dtype="fp16") for n in (2048, 4096, 32_768)}
    assert size[32_768] == 256 * size[2048]
    assert size[4096] == 4 * size[2048]


# -- D -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("beams", [2, 5])
def test_d_beam_search_costs_as_many_times_greedy_as_it_has_beams(beams):
    """Greedy decoding is O(N V), beam search O(k N V): from the second token on, every step is done k times."""
    model = account("vaswani-base")
    first, greedy = (model.decoding(new=new, source=40).flops for new in (1, 30))
    beam = model.decoding(new=30, source=40, beams=beams).flops
    assert beam - first == beams * (greedy - first)


def test_d_the_feed_forward_is_the_largest_part_of_every_block():
    counts = account("vaswani-base").components
    assert counts["encoder.feedforward"] > counts["encoder.attention"]
    assert counts["decoder.feedforward"] == pytest.approx(
        counts["decoder.attention"] + counts["decoder.cross"], rel=0.01
    )


# -- E -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "millions"), [("vaswani-base", 65), ("vaswani-big", 213)])
def test_e_the_sizes_of_the_two_models_of_the_paper(name, millions):
    """The paper does not say how many rows its matrix has: 37,000 give 63.1 and 214.2 million."""
    assert account(name).parameters / 1e6 == pytest.approx(millions, rel=0.03)


@pytest.mark.parametrize(
    ("name", "depth", "width", "heads", "context"),
    [
        ("bert-base", 12, 768, 12, 512),
        ("gpt2", 12, 768, 12, 1024),
        ("gpt2-xl", 48, 1600, 25, 1024),
        ("gpt3-175b", 96, 12_288, 96, 2048),
        ("llama-7b", 32, 4096, 32, 2048),
        ("vaswani-base", 6, 512, 8, None),
    ],
)
def test_e_8_6_the_sizes_of_published_models(name, depth, width, heads, context):
    config = preset(name)
    stack = config.decoder or config.encoder
    sizes = (stack.depth, config.width, next(stack.layers()).attention.heads, config.context)
    assert sizes == (depth, width, heads, context)


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
    model = account(config)
    assert model.components == {
        "input.token": 32_000 * 512,
        "decoder.attention": 6 * 4 * 512**2,
        "decoder.feedforward": 6 * 2 * 512 * 2048,
        "decoder.block_norms": 6 * 2 * 2 * 512,
    }
    assert model.parameters == 35_270_656


def test_e_exercise_8_4_the_matrices_take_a_gibibyte():
    size = attention_matrix_bytes(heads=32, queries=4096, dtype="fp16")
    assert size == GIB
    assert size / GB == pytest.approx(1.07, abs=0.01)


def test_e_exercise_8_4_scores_dominate_projections_beyond_twice_the_width():
    """The document says beyond the width, or the width of a head."""
    config = block(4096, 32, 4 * 4096)
    flops = {length: block_flops(config, 1, length, 0) for length in (128, 4096, 8192, 8193)}
    assert flops[8192]["attention.scores"] == flops[8192]["attention.projections"]
    assert flops[8193]["attention.scores"] > flops[8193]["attention.projections"]
    for length in (128, 4096):
        assert flops[length]["attention.scores"] < flops[length]["attention.projections"]


def test_a_gated_layer_of_two_thirds_the_hidden_size_has_the_parameters_of_a_plain_one():
    """Shazeer 2020, and the lecture's table of variants: SwiGLU with a hidden size of 8/3 of the width."""
    plain = block_parameters(block(768, 12, 3072))
    gated = account(llama(vocab=1, width=768, depth=1, heads=12, context=1)).components
    assert gated["decoder.feedforward"] == plain["feedforward"]
