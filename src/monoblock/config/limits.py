"""Upper bounds of the sizes in a configuration, far above those of every published model.

They catch slips and damaged or hostile files before anything of such a size is allocated.
"""

MAX_CONTEXT = 2**26  # tokens; Llama 4 has 10,485,760
MAX_POSITION_WEIGHTS = 2**20  # positions with a learned vector each
MAX_VOCAB = 2**24
MAX_WIDTH = 2**20  # also of embeddings and heads
MAX_HIDDEN = 2**23  # of a feed-forward network
MAX_HEADS = 2**16
MAX_EXPERTS = 2**16
MAX_CLASSES = 2**24
MAX_IMAGE = 2**16  # pixels in a row, and channels
MAX_BUCKETS = 2**20
MAX_LAYERS = 100_000
