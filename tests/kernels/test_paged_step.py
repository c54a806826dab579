"""A pass of a stack over pages gives what the plain modules compute in fp64 for whole sequences."""

import copy
import random

import pytest
import torch
from support import has_decoder, tiny_config, tiny_model, tiny_names

import monoblock as mb
from monoblock.config.model import Alibi, AttentionConfig, Buckets, NormConfig, Rotary
from monoblock.config.stack import BlockConfig, FeedForwardConfig, Repeat, StackConfig
from monoblock.inference.runners.cpu import PAGE_SIZE, fuse_encoder, fuse_stack
from monoblock.kernels.cpu import library
from monoblock.nn.stack import Stack
from monoblock.nn.token_positions import TokenPositions
from monoblock.quantization.cpu_linear import use_cpu_kernels

WIDTH = 44
RMS = NormConfig(kind="rms", affine="scale")


@pytest.fixture(scope="module", autouse=True)
def compiler():
    status = library.load_kernels()
    assert status.is_ready, status.reason


@pytest.fixture(autouse=True)
def without_gradients():
    with torch.no_grad():
        yield


def randomize(stack, seed=0):
    """A copy with weights of which none is zero or one."""
    stack, generator = copy.deepcopy(stack).eval(), torch.Generator().manual_seed(seed)
    for weight in stack.parameters():
        noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
        weight.data = weight + noise * (0.3 if weight.dim() == 1 else 0.5 * weight.shape[-1] ** -0.5)
    return stack


def tokens_of(length, rows=1):
    return TokenPositions(torch.arange(length).expand(rows, length))


def on_whole_sequences(stack, inputs, sources):
    """The outputs of a stack in fp64 for each sequence (T, D) by itself."""
    outputs = []
    for x, source in zip(inputs, sources, strict=True):
        options = {}
        if source is not None:
            options = {"memory": source.double()[None], "memory_positions": tokens_of(len(source))}
        outputs.append(stack(x.double()[None], tokens_of(len(x)), **options)[0])
    return outputs


class PagedRows:
    """Rows of a stack with keys and values in pages, in any order; what is not written is NaN."""

    def __init__(self, stack, sources, pages=90, seed=0):
        self.stack, self.rows = fuse_stack(stack), len(sources)
        assert self.stack is not None
        self.random = random.Random(seed)
        self.free = self.random.sample(range(1, pages), pages - 1)
        self.tables = torch.zeros(self.rows, 80, dtype=torch.int32)
        self.lengths = torch.zeros(self.rows, dtype=torch.long)
        self.pools = [self._pools(block.attention, pages) for block in stack.blocks]
        self.sources = [self._pools(block.cross, pages) for block in stack.blocks if block.cross is not None]
        self.source_tables, self.source_lengths = torch.zeros(self.rows, 48, dtype=torch.int32), None
        if self.sources:
            self.source_lengths = torch.tensor([len(source) for source in sources])
            for row, source in enumerate(sources):
                self._write_source(stack, row, source)

    @staticmethod
    def _pools(attention, pages):
        groups = attention.config.num_kv_heads
        sizes = [layer.weight.shape[0] // groups for layer in (attention.key, attention.value)]
        return [torch.full((pages, groups, PAGE_SIZE, size), torch.nan) for size in sizes]

    def _write_source(self, stack, row, source):
        crosses = [block.cross for block in stack.blocks if block.cross is not None]
        count = -(-len(source) // PAGE_SIZE)
        self.source_tables[row, :count] = torch.tensor([self.free.pop() for _ in range(count)], dtype=torch.int32)
        for cross, pools in zip(crosses, self.sources, strict=True):
            groups = cross.config.num_kv_heads
            for pool, flat in zip(pools, (cross.key(source), cross.value(source)), strict=True):
                heads = flat.unflatten(-1, (groups, -1)).transpose(0, 1)
                for start in range(0, len(source), PAGE_SIZE):
                    part = heads[:, start : start + PAGE_SIZE]
                    pool[self.source_tables[row, start // PAGE_SIZE], :, : part.shape[1]] = part

    def fork(self, source, row):
        """Make an empty row begin with the tokens of another; whole pages are shared, the last one is copied."""
        self.lengths[row], length = self.lengths[source], int(self.lengths[source])
        self.tables[row] = self.tables[source]
        if used := length % PAGE_SIZE:
            last, page = length // PAGE_SIZE, self.free.pop()
            sources, pools = self.tables[row, last : last + 1].long(), [pool for pair in self.pools for pool in pair]
            torch.ops.monoblock.copy_pages(pools, sources, torch.tensor([page]), torch.tensor([used]))
            self.tables[row, last] = page

    def step(self, parts, **options):
        """The outputs for the next tokens of each row, a list of (count, D)."""
        counts = torch.tensor([len(part) for part in parts])
        x = torch.full((self.rows, int(counts.max()) + 1, parts[0].shape[1]), torch.nan)
        for row, part in enumerate(parts):
            x[row, : len(part)] = part
            first, end = (-(-int(length) // PAGE_SIZE) for length in (self.lengths[row], self.lengths[row] + len(part)))
            for number in range(first, end):
                self.tables[row, number] = self.free.pop()
        assert self.stack.supports(x, counts)
        keys, values = zip(*self.pools, strict=True)
        source_keys, source_values = zip(*self.sources, strict=True) if self.sources else ((), ())
        tables = self.source_tables if self.sources else None
        out = self.stack.step(
            x,
            self.lengths,
            counts,
            self.tables,
            keys,
            values,
            source_keys,
            source_values,
            tables,
            self.source_lengths,
            **options,
        )
        assert all((out[row, count:] == 0).all() for row, count in enumerate(counts))
        self.lengths += counts
        return [out[row, :count] for row, count in enumerate(counts)]

    def run(self, inputs, sizes, **options):
        """The outputs for whole inputs, some tokens of each row at a time; a size may be 0."""
        outputs, done = [[] for _ in inputs], [0] * len(inputs)
        while any(count < len(x) for count, x in zip(done, inputs, strict=True)):
            chunks = [x[count : count + self.random.choice(sizes)] for count, x in zip(done, inputs, strict=True)]
            if not any(len(chunk) for chunk in chunks):
                continue
            for row, out in enumerate(self.step(chunks, **options)):
                outputs[row].append(out)
                done[row] += len(out)
        return [torch.cat(parts) for parts in outputs]


def assert_close(actual, expected, tolerance=2e-5):
    for row, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        error = (mine.double() - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert float(error.max()) < tolerance, (row, error)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def draw_rows(lengths, width):
    return [draw(length, width, seed=row) for row, length in enumerate(lengths)]


def no_sources(inputs):
    return [None] * len(inputs)


def stack_of(attention, blocks=2, cross=None, norm=RMS, feedforward=None, **options):
    block = BlockConfig(
        **{"width": WIDTH, "attention": attention, "cross": cross, "norm": norm},
        feedforward=feedforward or FeedForwardConfig(hidden=52, activation="silu", gated=True),
        **options,
    )
    return randomize(Stack(StackConfig(pattern=(Repeat(blocks=(block,), times=blocks),), norm=norm)))


GROUPED = {"heads": 6, "kv_heads": 2, "head_dim": 10}
CASES = {
    "multi-head": stack_of(AttentionConfig(heads=4)),
    "grouped": stack_of(AttentionConfig(**GROUPED)),
    "many heads a group, values of another size": stack_of(
        AttentionConfig(heads=7, kv_heads=1, head_dim=6, value_dim=37, scale=0.7)
    ),
    "large heads": stack_of(AttentionConfig(heads=3, kv_heads=1, head_dim=96, positions=Rotary())),
    "rotary": stack_of(AttentionConfig(**GROUPED, positions=Rotary(dim=6, layout="interleaved"))),
    "alibi": stack_of(AttentionConfig(heads=4, positions=Alibi())),
    "buckets": stack_of(AttentionConfig(heads=4, positions=Buckets(count=8, max_distance=30))),
    "window": stack_of(AttentionConfig(**GROUPED, positions=Rotary(), window=19)),
    "window and alibi": stack_of(AttentionConfig(heads=4, positions=Alibi(), window=5)),
    "softcap": stack_of(AttentionConfig(**GROUPED, softcap=1.5, clip=0.8)),
    "sinks": stack_of(AttentionConfig(**GROUPED, sinks=True, window=4)),
    **{
        f"norm over {over}": stack_of(AttentionConfig(**GROUPED, qk_norm=RMS, qk_norm_over=over, positions=Rotary()))
        for over in ("head", "each_head", "width")
    },
    "cross-attention": stack_of(
        AttentionConfig(heads=4, kv_heads=2), cross=AttentionConfig(heads=6, kv_heads=3, head_dim=8, mask="full")
    ),
    **{place: stack_of(AttentionConfig(heads=4), norm_place=place) for place in ("post", "output", "sandwich")},
    **{residual: stack_of(AttentionConfig(heads=4), residual=residual) for residual in ("parallel", "parallel_shared")},
    "gains": stack_of(
        AttentionConfig(heads=4),
        norm=NormConfig(),
        layer_scale=0.8,
        residual_scale=0.6,
        feedforward=FeedForwardConfig(hidden=52, gated=True, clamp=0.5),
    ),
}


@pytest.mark.parametrize("sizes", [(0, 1, 1), (0, 1, 2, 5), (17, 40, 3)], ids=["one token", "a few", "many"])
@pytest.mark.parametrize("name", CASES)
def test_rows_in_pages_give_the_outputs_of_whole_sequences(name, sizes):
    stack = CASES[name]
    inputs = draw_rows((45, 17, 70, 1, 32), WIDTH)
    has_cross = stack.blocks[0].cross is not None
    sources = draw_rows((19, 3, 32, 16, 40), WIDTH) if has_cross else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, sources)
    assert_close(PagedRows(stack, sources).run(inputs, sizes), expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("name", ["rotary", "window", "sinks", "cross-attention", "alibi"])
def test_long_rows_beside_short_ones_give_the_outputs_of_whole_sequences(name, threads):
    """The keys of one row are then shared out among threads."""
    stack = CASES[name]
    inputs = draw_rows((1100, 4, 600), WIDTH)
    sources = draw_rows((700, 3, 40), WIDTH) if stack.blocks[0].cross is not None else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, sources)
    paged, before = PagedRows(stack, sources, pages=260), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        first = paged.run([x[:-3] for x in inputs], (150, 200))
        last = paged.run([x[-3:] for x in inputs], (1, 1, 2))
    finally:
        torch.set_num_threads(before)
    assert_close([torch.cat(parts) for parts in zip(first, last, strict=True)], expected)


@pytest.mark.parametrize("size", [8, 29, 32])
def test_rows_that_share_pages_give_the_outputs_of_whole_sequences(size):
    """Three rows continue one prompt."""
    stack, prompt = CASES["rotary"], draw(size, WIDTH)
    inputs = [torch.cat([prompt, x]) for x in draw_rows((20, 9, 33), WIDTH)]
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, no_sources(inputs))
    paged = PagedRows(stack, no_sources(inputs))
    paged.step([prompt, prompt[:0], prompt[:0]])
    paged.fork(0, 1)
    paged.fork(1, 2)
    actual = paged.run([x[size:] for x in inputs], (0, 1, 3))
    assert_close(actual, [out[size:] for out in expected])
    assert len({tuple(row[: size // PAGE_SIZE].tolist()) for row in paged.tables}) == 1


def test_pages_of_rows_without_new_tokens_do_not_change():
    stack, inputs = CASES["grouped"], draw_rows((21, 18, 5), WIDTH)
    paged = PagedRows(stack, no_sources(inputs))
    paged.step(inputs)
    pages = paged.tables[1][paged.tables[1] > 0].long()
    before = [pool[pages].nan_to_num() for pair in paged.pools for pool in pair]
    paged.step([inputs[0][:1], inputs[1][:0], inputs[2][:3]])
    after = [pool[pages].nan_to_num() for pair in paged.pools for pool in pair]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


@pytest.mark.parametrize("exact", [False, True])
def test_a_pass_without_tokens_gives_zeros(exact):
    paged = PagedRows(CASES["grouped"], [None, None])
    assert [len(out) for out in paged.step([draw(0, WIDTH)] * 2, exact=exact)] == [0, 0]


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("name", tiny_names(has_decoder))
def test_presets_give_the_outputs_of_whole_sequences(name, bits):
    if any(block.feedforward.experts for block in tiny_config(name).decoder.layers()):
        pytest.skip("experts run in the modules")
    plain = copy.deepcopy(tiny_model(name))
    plain.decoder = randomize(plain.decoder)
    fast = plain
    if bits is not None:
        plain = mb.quantize(plain, bits=bits).eval()
        fast = use_cpu_kernels(plain)
    width = plain.decoder.config.width
    inputs = draw_rows((29, 3, 40), width)
    sources = draw_rows((19, 3, 32), width) if plain.encoder is not None else no_sources(inputs)
    expected = on_whole_sequences(copy.deepcopy(plain.decoder).double(), inputs, sources)
    for sizes in ((0, 1, 3), (16, 31)):
        actual = PagedRows(fast.decoder, sources).run(inputs, sizes)
        assert_close(actual, expected, 2e-5 if bits is None else 3e-3)


def quantized_stack(bits):
    return use_cpu_kernels(mb.quantize(tiny_model("llama3-8b"), bits=bits).eval()).decoder


@pytest.mark.parametrize("name", ["grouped", "alibi", "window", "cross-attention", "norm over width", 8, 4])
def test_exact_steps_give_the_same_bits_alone_and_in_company(name):
    stack = CASES[name] if isinstance(name, str) else quantized_stack(name)
    inputs = draw_rows((45, 17, 70, 600, 32), stack.config.width)
    sources = draw_rows((19, 3, 32, 16, 40), WIDTH) if stack.blocks[0].cross is not None else no_sources(inputs)
    outputs = [
        PagedRows(stack, sources, seed=seed).run(inputs, sizes, exact=True)
        for seed, sizes in enumerate([(1,), (0, 2, 40), (11, 100)])
    ]
    alone = [
        PagedRows(stack, [source], seed=5).run([x], (33, 1), exact=True)[0]
        for x, source in zip(inputs, sources, strict=True)
    ]
    assert all(torch.equal(*pair) for other in outputs for pair in zip(other, alone, strict=True))


def test_positions_of_rotary_angles_may_begin_anywhere():
    """Only distances matter, up to rounding."""
    stack, inputs = CASES["rotary"], draw_rows((9, 4), WIDTH)
    shifted, plain = PagedRows(stack, [None, None]), PagedRows(stack, [None, None])
    positions = (torch.tensor([[70], [0]]) + torch.arange(10)).contiguous()
    assert_close(shifted.step(inputs, positions=positions), [out.double() for out in plain.step(inputs)], 1e-4)
    assert not torch.equal(shifted.pools[0][0][shifted.tables[0, 0]], plain.pools[0][0][plain.tables[0, 0]])


def test_what_is_not_supported_is_left_to_the_modules():
    stack = CASES["grouped"]
    operator = fuse_stack(stack)
    x, counts = draw(2, 300, WIDTH), torch.tensor([300, 212])
    assert operator.supports(x, counts)
    assert not operator.supports(x, counts + 1)
    assert not operator.supports(x.double(), counts)
    with torch.enable_grad():
        assert not operator.supports(x, counts)
    assert fuse_stack(copy.deepcopy(stack).double()) is None
    assert fuse_stack(copy.deepcopy(stack).bfloat16()) is None


def test_an_encoder_gives_the_outputs_of_each_text_alone():
    config = AttentionConfig(heads=4, mask="full")
    stack = stack_of(config, norm=NormConfig(), feedforward=FeedForwardConfig(hidden=52))
    inputs = draw_rows((5, 1, 140, 30), WIDTH)
    expected = on_whole_sequences(copy.deepcopy(stack).double(), inputs, no_sources(inputs))
    encoder = fuse_encoder(stack)
    lengths = [len(x) for x in inputs]
    assert_close(encoder(torch.cat(inputs), lengths).split(lengths), expected)
    assert fuse_encoder(None) is None
    assert fuse_encoder(CASES["rotary"]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pages_are_copied_up_to_what_is_used(dtype):
    pools = [draw(50, heads, PAGE_SIZE, size).to(dtype) for heads, size in ((3, 8), (1, 5), (3, 6))]
    expected = [pool.clone() for pool in pools]
    sources, targets, used = [3, 17, 3, 40], [5, 49, 0, 41], [16, 1, 0, 9]
    torch.ops.monoblock.copy_pages(pools, *map(torch.tensor, (sources, targets, used)))
    for pool in expected:
        for source, target, count in zip(sources, targets, used, strict=True):
            pool[target, :, :count] = pool[source, :, :count]
    assert all(torch.equal(*pair) for pair in zip(pools, expected, strict=True))


@pytest.mark.parametrize(
    ("sources", "targets", "used"),
    [([4], [0], [1]), ([-1], [0], [1]), ([0], [4], [1]), ([0], [1], [17]), ([0], [1], [-1]), ([0, 1], [1], [1])],
)
def test_pages_outside_of_a_pool_are_not_copied(sources, targets, used):
    with pytest.raises(RuntimeError):
        torch.ops.monoblock.copy_pages([draw(4, 2, PAGE_SIZE, 3)], *map(torch.tensor, (sources, targets, used)))


def test_pages_outside_of_a_pool_are_not_read():
    paged = PagedRows(CASES["grouped"], [None, None])
    paged.step([draw(1, WIDTH)] * 2)
    paged.tables[1] = 90
    with pytest.raises(RuntimeError, match="tables is 90"):
        paged.step([draw(1, WIDTH), draw(1, WIDTH)])
