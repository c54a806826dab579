"""The keyword arguments of `vary` and of the family constructors: type, meaning and paper of each knob.

KNOBS of config/knobs.py says which fields of a configuration each of them sets.
"""

from __future__ import annotations

from typing import Literal, TypedDict

from monoblock.config.parts import Activation
from monoblock.config.positions import Scaling

EncoderHead = Literal["pooled", "masked_lm", "classifier", "regression", "tagger", "spans", "none"]


class StyleKnobs(TypedDict, total=False):
    """The knobs that are not a named parameter of any family constructor."""

    segments: int  # number of token types that are embedded; 0: none
    embedding_scale: float | Literal["sqrt_width"]  # factor on the token embedding; sqrt_width with sinusoid positions
    embedding_norm: bool  # normalize the embedding
    class_token: bool  # put a learned token before the image patches
    attention: Literal["softmax", "linear"]  # weights by a softmax of scores, or by products of features (linear time)
    kv_heads: int | None  # number of key/value heads, which query heads share; None: one per query head
    value_dim: int | None  # size of a value head; None: head_dim
    scale: float | None  # factor on the attention scores; None: 1 / sqrt(head_dim); 1: not scaled
    softcap: float | None  # attention scores become cap * tanh(score / cap); None: no cap
    mask: Literal["causal", "prefix", "full"]  # a token sees earlier tokens, also the whole prefix, or all tokens
    window: int | None  # a token sees only keys closer than this; None: all that the mask allows
    global_tokens: bool  # tokens that flags mark, by default the first, see and are seen beyond the window
    random_blocks: int  # number of random earlier blocks that each block of positions sees beyond the window
    block_size: int  # number of positions in a random block
    qk_norm: bool  # normalize queries and keys
    positions: Literal["none", "sinusoid", "learned", "rotary", "alibi", "buckets"]  # how positions are encoded
    rotary_base: float  # base of the rotary wavelengths
    rotary_dim: int | None  # number of features of a head that are rotated; None: all
    scaling: Scaling | None  # scaling of rotary frequencies for longer contexts; None: not scaled
    activation: Activation  # nonlinearity of the feed-forward network
    gated: bool  # multiply the activation by a second projection (GLU, SwiGLU, GeGLU)
    experts: int  # number of experts in each feed-forward network; without this knob there are none
    top_k: int  # number of experts for each token
    norm: Literal["layer", "rms", "batch", "none"]  # LayerNorm, RMSNorm, BatchNorm over rows and positions, or no norm
    eps: float  # added to the variance or mean square in a norm
    norm_place: Literal["pre", "post", "output", "sandwich"]  # where a sublayer is normalized
    residual: Literal["sequential", "parallel", "parallel_shared", "none"]  # how sublayers are added; none: not
    bias: bool  # biases in attention and feed-forward projections
    dropout: float  # dropout probability everywhere except in the head
    attention_dropout: float  # dropout probability of the attention weights; overrides dropout
    embedding_dropout: float  # dropout probability of the embedding; overrides dropout
    word_dropout: float  # probability that the whole embedding of a token is set to zero
    head_dropout: float  # dropout probability in the head
    pooling: Literal["first", "last", "mean"]  # which hidden state represents the sequence
    pooler: Literal["none", "tanh", "relu", "gelu"]  # activation of a linear layer after pooling
    tie: Literal["none", "output", "source_target", "three_way"]  # which embeddings and output share a matrix
    init: Literal["normal", "xavier", "t5", "small"]  # how the weights are initialized
    std: float  # standard deviation of the initialization


class HeadSizeKnobs(StyleKnobs, total=False):
    """The knobs of a family whose constructor has `hidden`, but not `head_dim`."""

    head_dim: int | None  # size of a query and key head; None: width / heads


class SizeKnobs(HeadSizeKnobs, total=False):
    """The knobs of a family whose constructor has neither `hidden` nor `head_dim`."""

    hidden: int  # hidden size of the feed-forward network; 0: no feed-forward network


class Knobs(SizeKnobs, total=False):
    """All knobs."""

    vocab: int  # size of the vocabulary
    context: int | None  # length of the longest sequence; a limit for learned positions
    image: int  # height and width of an image in pixels
    patch: int  # height and width of a patch in pixels
    channels: int  # number of colour channels of an image
    width: int  # size of the hidden states; hidden is scaled with it, unless it is given too
    depth: int  # number of blocks, in the encoder and in the decoder
    heads: int  # number of query heads
    head: EncoderHead  # the head of an encoder; a decoder can have classifier, regression and none
    classes: int  # number of outputs of a classifier, tagger or regression head


NO_PAPER = "—"

# The paper that each knob comes from. If papers differ by value, each begins with the value.
KNOB_PAPERS: dict[str, str] = {
    "vocab": NO_PAPER,
    "context": NO_PAPER,
    "segments": "Devlin et al. 2019",
    "embedding_scale": "Vaswani et al. 2017",
    "embedding_norm": "Le Scao et al. 2022",
    "image": "Dosovitskiy et al. 2021",
    "patch": "Dosovitskiy et al. 2021",
    "channels": "Dosovitskiy et al. 2021",
    "class_token": "Dosovitskiy et al. 2021",
    "width": "Vaswani et al. 2017",
    "depth": "Vaswani et al. 2017",
    "heads": "Vaswani et al. 2017",
    "attention": "softmax: Vaswani et al. 2017; linear: Katharopoulos et al. 2020",
    "kv_heads": "1: Shazeer 2019; more: Ainslie et al. 2023",
    "head_dim": "Vaswani et al. 2017",
    "value_dim": "Vaswani et al. 2017",
    "scale": "Vaswani et al. 2017",
    "softcap": "Gemma Team 2024",
    "mask": "causal, full: Vaswani et al. 2017; prefix: Raffel et al. 2020",
    "window": "Beltagy et al. 2020",
    "global_tokens": "Beltagy et al. 2020",
    "random_blocks": "Zaheer et al. 2020",
    "block_size": "Zaheer et al. 2020",
    "qk_norm": "Dehghani et al. 2023",
    "positions": "sinusoid: Vaswani et al. 2017; learned: Gehring et al. 2017; rotary: Su et al. 2021; "
    "alibi: Press et al. 2022; buckets: Raffel et al. 2020",
    "rotary_base": "Su et al. 2021",
    "rotary_dim": "Wang and Komatsuzaki 2021",
    "scaling": "linear: Chen et al. 2023; yarn: Peng et al. 2023; longrope: Ding et al. 2024; "
    "llama3: Grattafiori et al. 2024",
    "hidden": "Vaswani et al. 2017",
    "activation": "relu: Vaswani et al. 2017; gelu: Hendrycks and Gimpel 2016; silu: Ramachandran et al. 2017; "
    "relu2: So et al. 2021",
    "gated": "Shazeer 2020",
    "experts": "Shazeer et al. 2017",
    "top_k": "Shazeer et al. 2017",
    "norm": "layer: Ba et al. 2016; rms: Zhang and Sennrich 2019; batch: Ioffe and Szegedy 2015",
    "eps": NO_PAPER,
    "norm_place": "post: Vaswani et al. 2017; pre: Xiong et al. 2020; output: OLMo Team 2024; "
    "sandwich: Ding et al. 2021",
    "residual": "sequential: He et al. 2016; parallel: Wang and Komatsuzaki 2021",
    "bias": NO_PAPER,
    "dropout": "Srivastava et al. 2014",
    "attention_dropout": NO_PAPER,
    "embedding_dropout": "Vaswani et al. 2017",
    "word_dropout": "Gal and Ghahramani 2016",
    "head_dropout": NO_PAPER,
    "head": "Devlin et al. 2019",
    "classes": NO_PAPER,
    "pooling": "first: Devlin et al. 2019; mean: Reimers and Gurevych 2019",
    "pooler": "Devlin et al. 2019",
    "tie": "output: Press and Wolf 2017; three_way: Vaswani et al. 2017",
    "init": "normal: Radford et al. 2019; xavier: Glorot and Bengio 2010; t5: Raffel et al. 2020; "
    "small: Nguyen and Salazar 2019",
    "std": "Radford et al. 2018",
}
