"""The classes and functions of the five source documents, under their own names, built on monoblock's modules.

There is one module for each document (docs/classic.md), because their signatures differ:

lecture       the lecture "The Transformer — Built Live"
blocks        the tutorial on encoder and decoder blocks
module13      the course module that ends in a GPT
translation   the slides on machine translation
chapter       the textbook chapter with exercises

    from monoblock.classic.blocks import Transformer
    model = Transformer(src_vocab=37000, tgt_vocab=37000)

Attention, norms, feed-forward networks and blocks are those of `monoblock.nn`.  `load_state_dict` takes weights under
the names of the document's listing as well as under those of monoblock.
"""
