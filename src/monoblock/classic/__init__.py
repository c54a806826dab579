"""The classes and functions of the five source documents, with their names inside as well as outside.

There is one module for each document (docs/classic.md), because their signatures differ:

lecture       the lecture "The Transformer — Built Live"
blocks        the tutorial on encoder and decoder blocks
module13      the course module that ends in a GPT
translation   the slides on machine translation
chapter       the textbook chapter with exercises

    from monoblock.classic.blocks import Transformer
    model = Transformer(src_vocab=37000, tgt_vocab=37000)

Submodules, weights and methods have the names of the listing, so that its code works in and on these classes.
`to_monoblock()` returns the module of `monoblock.nn` that computes the same and shares the weights.
"""
