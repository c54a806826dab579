"""Texts that tokenizers disagree about, and random ones from a seed."""

import random

EDGE_CASES = [
    "Hello world",
    " leading space",
    "trailing  ",
    "  two   spaces ",
    "tabs\tand\nnew\r\nlines\n\n\n",
    "",
    " ",
    "\n",
    "a",
    "naïve café Ünïcödé ﬁ ① Å",
    "日本語のテキスト、中文。",
    "हिन्दी में लिखा",
    "العربية",
    "עברית",
    "한국어 문장",
    "emoji 😀👩‍👩‍👧‍👦🏳️‍🌈",
    "1234567890 3.14159 1,000,000",
    "it's we'll I'D THEY'RE don't",
    "def f(x):\n    return x**2  # no",
    "https://example.com/a?b=c&d=%20e",
    "<s>[INST] hi [/INST]</s>",
    "<|endoftext|> and <mask> [CLS]",
    "\u200b zero \ufeff bom",
    "e\u0301 combining",
    "ǅ ß İ ı ſ",
    "a" * 200,
    "▁ literal ▁▁ marker",
    "\x00\x01\x7f control",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𠜎",
    "...!!!???",
    "CamelCaseWordsHTTPServer",
    "ñ",
    "¿Qué?",
    "ﷺ",
    "½ ² ™",
    "“quotes” ‘single’ — dash… · ·",
    "x" * 99 + " " * 30 + "y",
]
COMMON_WORDS = """the of and to in that is was he for it with as his on be at by this had not are but from or have an
    they which one you were all her she there would their we him been has when who will no more if out so said what up
    its about into than them can only other new some could time these two may then do first any my now such like
    our over"""
WORDS = COMMON_WORDS.split()
CHARACTERS = (
    "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,;:!?'\"()-_/\\\n\t$%&@#*+=<>{}[]|~`^äöüéèçñßøå"
)
CHARACTERS += "Łžšđαβγδεжшяюबकतम中文字日本語한국어😀🎉٠١٢№€£¥"
CODE_POINT_RANGES = [
    (32, 126),
    (160, 0x24F),
    (0x370, 0x52F),
    (0x900, 0x97F),
    (0x3040, 0x30FF),
    (0x4E00, 0x9FFF),
    (0x1F300, 0x1F64F),
]


def sample_strings(count=500, seed=7):
    rng = random.Random(seed)

    def random_text():
        match rng.randrange(5):
            case 0 | 1:
                return " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 30)))
            case 2:
                return "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 60)))
            case 3:
                return rng.choice(["", " ", "  ", "\n"]).join(rng.choice(EDGE_CASES)[:40] for _ in range(3))
            case _:
                return "".join(chr(rng.randint(*rng.choice(CODE_POINT_RANGES))) for _ in range(rng.randint(1, 30)))

    return (EDGE_CASES + [random_text() for _ in range(count)])[:count]
