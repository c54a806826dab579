"""The claims of the five source documents that can be measured, with the experiment whose rules judge each of them.

The documents are those of docs/errata.md: A a lecture, B a tutorial, C a course module, D slides, E a textbook chapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from monoblock.experiments.rules import Verdict


class Claim(NamedTuple):
    place: str  # in the documents
    text: str  # what they say
    experiment: str  # the experiment that tests it; "": none
    rules: tuple[int, ...] = ()  # the rules of the experiment that judge it, by number
    table: str = ""  # another table of benchmarks/results that shows it
    against: tuple[int, ...] = ()  # of `rules`: those that say the opposite of the claim
    caveat: str = ""  # what weakens the evidence
    can_contradict: bool = True  # whether the experiment is strong enough to contradict the claim

    def judge(self, verdicts: Sequence[Verdict]) -> str:
        """Return what the verdicts on the rules of the experiment say about the claim.

        It is confirmed if all its rules are, contradicted if all are contradicted, and partly confirmed if some are
        confirmed and some contradicted. A rule against the claim contradicts it if it is confirmed. If it is
        contradicted, the claim may still be wrong, since rules have a margin; so that verdict does not count. Where
        the experiment cannot contradict the claim, it is inconclusive instead.
        """
        found = {verdicts[rule] for rule in self.rules if rule not in self.against}
        found |= {AGAINST[verdicts[rule]] for rule in self.against if verdicts[rule] != "contradicted"}
        if {"confirmed", "contradicted"} <= found:
            return "partly confirmed"
        if found == {"contradicted"} and not self.can_contradict:
            return "inconclusive"
        if len(found) == 1:
            return str(*found)
        return "inconclusive" if found & {"confirmed", "contradicted", "inconclusive"} else "not measured"


AGAINST: dict[Verdict, Verdict] = {  # what a rule against a claim says about it
    "confirmed": "contradicted",
    "inconclusive": "inconclusive",
    "not measured": "not measured",
}


def _weak(place: str, text: str, experiment: str, rules: tuple[int, ...], caveat: str) -> Claim:
    """Return a claim that its experiment is too weak to contradict."""
    return Claim(place, text, experiment, rules, caveat=caveat, can_contradict=False)


FEW_PASSES = "the budget is five passes over the corpus, too few to overfit"
ONE_STACK = "one initialization of one stack"
SMALL_MODEL = "one small pre-norm model with warm-up, whose gradients have no spikes"
OTHER_CALLS = "the models were trained in different calls, each with other trials on the GPU"
NEIGHBOURS = "here RoPE follows learned positions and SwiGLU follows GELU; parallel attention was not measured"
SHARED = "its times were measured while other trials used the GPU"
STILL_LEARNING = "the LSTM without attention was still learning when its training ended"
NAMED_SWAPS = (0, 2, 4, 6, 7)  # those that the lecture names, of the nine in `swaps`
AT_MOST = tuple(10 + rule for rule in NAMED_SWAPS)  # the rules of the other bound
CLAIMS = (
    Claim("A, pre-norm; C, pre-norm", "pre-norm trains without warm-up", "norm-placement", (1, 5, 6)),
    Claim("A, debugging; B §10 and §14", "post-norm needs warm-up", "norm-placement", (0, 4)),
    Claim("A, pre-norm", "post-norm breaks past about 24 layers", "norm-placement", (3,)),
    Claim("A, pre-norm; E §8.5.3", "in post-norm the gradients of layers differ by depth", "norm-placement", (2,)),
    Claim("C, question 3", "without residuals, a layer passes on 0.9 of the gradient (an example)", "residuals", (3,)),
    Claim("C, question 3; B §06", "without residuals, gradients can vanish", "residuals", (1, 5)),
    _weak("C, question 3", "without residuals, gradients can explode", "residuals", (6,), ONE_STACK),
    Claim("A, pre-norm; C, question 3; E §8.5.2", "residuals deliver gradients at full strength", "residuals", (2,)),
    Claim("B §06; D, residual connections", "deep networks without residuals do not train", "residuals", (4,)),
    Claim("A, five ingredients; E §8.1.3", "attention needs its other components", "components", tuple(range(8))),
    _weak("B §10", "dropout is the most important regularization", "components", (9,), FEW_PASSES),
    _weak("B §14", "gradient clipping is not optional", "components", (10,), SMALL_MODEL),
    Claim("A, debugging", "position blind means garbage", "components", (8,)),
    Claim("A, positions; B §03", "sinusoids generalise to longer sequences", "positions", (6,)),
    Claim("E §8.4.5", "ALiBi extrapolates to longer sequences", "positions", (0,)),
    Claim("B §11; E §8.4.6", "rotary positions generalise better than sinusoids", "positions", (7,)),
    Claim("A, why heads; B §05; E §8.3.1", "several heads are better than one (at least 1 %)", "heads", (0, 1)),
    Claim("A, why heads", "heads can become too small to be useful (beyond 16 of them)", "heads", (2,)),
    Claim("A, why heads; B §05; E §8.3.4", "heads specialise in relations", "", (), "inspection"),
    Claim("E §8.3.4", "most heads can be pruned", "", (), "pruning"),
    Claim("E §8.5.6", "depth builds better representations", "depth-width", (0, 1), against=(1,)),
    Claim("A, feed-forward", "GELU is the standard choice, SwiGLU slightly better", "swaps", (3, 6)),
    Claim("C, the MLP", "most activations train to similar losses", "feedforward", (2,)),
    Claim("C, the MLP; D, feed-forward", "a hidden size of four times the width works well", "feedforward", (3, 4)),
    Claim("C, layer normalization and question 5", "BatchNorm fails on different lengths", "norms", (0, 1, 2)),
    Claim("A, variations; B §11", "RMSNorm replaces LayerNorm without loss", "norms", (3,)),
    Claim("A, variations", "each modern swap gains at least 0.1 %", "swaps", NAMED_SWAPS, caveat=NEIGHBOURS),
    Claim("A, variations", "each modern swap gains at most 1 %", "swaps", AT_MOST, caveat=NEIGHBOURS),
    Claim("A, debugging; B §10", "tying embedding and output usually helps", "tying", (0,)),
    Claim("A, parameters and debugging", "tying saves about a quarter of the parameters", "", (), "tying"),
    Claim("Vaswani et al. 2017, §5.4", "label smoothing hurts perplexity", "smoothing", (0,)),
    Claim("B §10", "label smoothing improves BLEU", "smoothing", (1,)),
    Claim("E §8.2.3 and exercise 8.1", "without the scale, a model trains worse", "components", (5,)),
    Claim("B §04; D, scaling; E §8.2.3", "without the scale, scores have a variance of d", "scale", (0,)),
    Claim("B §04; E §8.2.3", "without the scale, the softmax saturates and gradients are tiny", "scale", (2, 3, 4)),
    Claim("B §12; C, attention memory", "memory quadruples when the length doubles", "attention-memory", (0, 1)),
    Claim(
        "B §12; C, further reading",
        "fused kernels avoid the quadratic memory: a tenth of it",
        "attention-memory",
        (2, 4),
    ),
    Claim("C, question 4", "a cache is 66 times faster for 100 tokens after 50", "kv-cache", (0, 1), against=(1,)),
    Claim("B §12; C, KV cache", "a cache makes decoding efficient; its bytes follow a formula", "kv-cache", (2, 3)),
    Claim("B §12", "windows are linear in the length", "sparse", (2,)),
    Claim("B §12", "windows with global tokens are linear in the length", "sparse", (4,)),
    Claim("B §12; C, question 1", "linear attention avoids the quadratic cost", "sparse", (0, 3)),
    Claim("B §01; E §8.1.1", "recurrence cannot be parallelised over the sequence", "recurrence", (6,), caveat=SHARED),
    Claim(
        "A, recap; E §8.1",
        "one vector is a bottleneck for long texts",
        "recurrence",
        (2, 3, 4, 5),
        caveat=STILL_LEARNING,
    ),
    Claim("C, what is next", "recurrence cannot reverse a sequence", "recurrence", tuple(range(6)), against=(5,)),
    Claim("E, exercise 8.9", "a Transformer has a lower perplexity than an LSTM", "language-models", (3, 1, 2)),
    Claim("E, exercise 8.9", "an epoch is faster than with an LSTM", "language-models", (5,), caveat=OTHER_CALLS),
    Claim("A, why the Transformer won; C", "performance improves predictably with size", "scaling-law", (0, 2)),
    Claim("A, why the Transformer won; B §14", "pretraining transfers to tasks with few samples", "pretraining", (0,)),
    Claim("D, back-translation", "synthetic pairs help", "backtranslation", (0,)),
    Claim("D, back-translation", "noise and tags make them more useful", "backtranslation", (4, 6, 7)),
    Claim("D, back-translation", "the balance of true and synthetic pairs matters", "backtranslation", (5,)),
    Claim("not in the documents", "a draft makes decoding faster without changing the text", "speculative", (0, 1)),
)
