"""Chat templates render as in transformers, and templates that break the limits are rejected."""

import json
import os
import signal
import subprocess
import sys
from types import MappingProxyType

import pytest
from strings import WORDS

import monoblock as mb
from monoblock.tokenizers.chat_template import PROGRAM, render_chat

transformers = pytest.importorskip("transformers")
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

TEMPLATES = {
    "chatml": """{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}
        {%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "llama 2": """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = messages[0]['content'] %}{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for m in rest %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{% if loop.index0 == 0 and system != false %}{% set content = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' + m['content'] %}
{% else %}{% set content = m['content'] %}{% endif %}{% if m['role'] == 'user' %}
{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{% elif m['role'] == 'assistant' %}
{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n' + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "llama 3": """{{- bos_token }}{%- set ns = namespace(n=0) %}{%- for m in messages if m.role != 'tool' %}
{%- set ns.n = ns.n + 1 %}{{- '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ (m.content | trim) ~ ns.n }}
{%- generation %}{{ ns.n }}{%- endgeneration %}{%- endfor %}{%- if tools is not none %}{{ tools | tojson(indent=4) }}
{%- endif %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{%- endif %}""",
    "words": """{% macro show(x, k=2) %}[{{ x|upper|replace('A', 'b') }}:{{ k }}]{% endmacro %}
{%- for k, v in messages[0].items() %}{{ show(v) }}{{ k.split('o')|join('+') }}{% endfor %}
{{ messages|map(attribute='role')|join(',') }}{{ messages|selectattr('role', 'equalto', 'user')|list|length }}
{% for i in range(5) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}{{ 'x' * 3 }}
{{ messages[-1].content[:3] }} {{ nothing is defined }} {{ none }} {{ 1.5 }} {{ {'a': [1, 'é']}|tojson }}""",
}
MESSAGES = [
    {"role": "system", "content": "Be kind é."},
    {"role": "user", "content": " Hi <there> "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
]
# Two lists that are equal and have 2^60 items, in memory 60.
DOUBLED = """{% set ns = namespace(a=(1,), b=(1,)) %}{% for i in range(60) %}{% set ns.a = (ns.a, ns.a) %}
{%- set ns.b = (ns.b, ns.b) %}{% endfor %}"""
SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_renders_as_in_transformers(name, prompt):
    for tools in (None, [{"type": "function", "function": {"name": "f", "é": 1}}]):
        options = {"add_generation_prompt": prompt, "tools": tools}
        (theirs,), _ = render_jinja_template([MESSAGES], chat_template=TEMPLATES[name], **options, **SPECIALS)
        assert render_chat(TEMPLATES[name], MESSAGES, SPECIALS, **options) == theirs


def test_a_template_may_refuse_a_conversation():
    with pytest.raises(mb.InputError, match=r"refuses this conversation: Roles must alternate"):
        render_chat(TEMPLATES["llama 2"], [MESSAGES[1], MESSAGES[1]], SPECIALS)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ ''.__class__.__mro__ }}", "accesses '__class__'"),
        ("{{ messages.append(1) }}", "accesses 'append'"),
        ("{{ 'a' * 10**10 }}", "needs more than 192 MB of memory"),
        ("{{ ('a' * 10**5).replace('a', 'b' * 10**5) }}", "needs more than 192 MB of memory"),
        ("{{ '%1000000000d' % 1 }}", "needs more than 192 MB of memory"),
        ("{{ '%.*f' % (2000000000, 1.0) }}", "needs more than 192 MB of memory"),
        (DOUBLED + "{{ ns.a == ns.b }}", "takes longer than 1 s"),
        (DOUBLED + "{{ {ns.a: 1} }}", "takes longer than 1 s"),
        (DOUBLED + "{{ '%s' % (ns.a,) }}", "takes longer than 1 s|more than 192 MB"),
        ("{{ 'x' * 5000000 }}", "writes more than 4 MB"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deep"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nested too deep"),
        ("{{ dict.update(messages[0], role='x') }}", "has no attribute 'update'"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "takes longer than 1 s"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ messages|nothing }}", "No filter named"),
        ("{{ nothing.at.all }}", "is undefined"),
        ("x" * 200_000, "not a string of at most"),
    ],
)
def test_a_template_that_breaks_a_limit_raises_one_line(template, message):
    with pytest.raises(mb.FileError, match=message) as caught:
        render_chat(template, MESSAGES)
    assert "\n" not in str(caught.value)


def test_the_next_conversation_is_rendered_after_one_that_broke_a_limit():
    with pytest.raises(mb.FileError, match="longer than 1 s"):
        render_chat("{{ 99999 ** 99999999 }}", MESSAGES)  # inside one operation in C
    assert render_chat("{{ messages[1].content }}", MESSAGES) == " Hi <there> "


def test_an_interrupt_ends_a_template():
    def interrupt(number, frame):
        raise KeyboardInterrupt

    render_chat("", MESSAGES)  # starts the process
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            render_chat(DOUBLED + "{{ ns.a == ns.b }}", MESSAGES)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert render_chat("{{ messages[0].role }}", MESSAGES) == "system"


def test_a_template_gets_a_copy_of_the_messages():
    messages = [{"role": "user", "content": "a", "parts": [1]}]
    for template in ("{{ dict.update(messages[0], role='x') }}", "{{ messages[0].update(role='x') }}"):
        with pytest.raises(mb.FileError):
            render_chat(template, messages)
    assert messages == [{"role": "user", "content": "a", "parts": [1]}]


def test_messages_consist_of_what_json_has():
    with pytest.raises(mb.InputError, match="cannot be rendered: <object"):
        render_chat("", [{"role": "user", "content": object()}])
    circle = {"role": "user"}
    circle["content"] = circle
    with pytest.raises(mb.InputError, match="Circular"):
        render_chat("", [circle])
    assert (
        render_chat("{{ messages[0].content }}", [MappingProxyType({"role": "user", "content": "\ud800"})]) == "\ud800"
    )


def test_the_program_imports_neither_torch_nor_the_package():
    code = f"import runpy, sys; runpy.run_path({str(PROGRAM)!r}); print(*sorted(sys.modules))"
    modules = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True).stdout
    assert "jinja2" in modules.split()
    assert not {"torch", "numpy", "monoblock"} & set(modules.split())


def test_a_forked_process_starts_its_own_program():
    render_chat("", MESSAGES)
    child = os.fork()
    if child == 0:
        os._exit(0 if render_chat("{{ messages[0].role }}", MESSAGES) == "system" else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert render_chat("{{ messages[0].role }}", MESSAGES) == "system"


def test_a_message_needs_a_role():
    with pytest.raises(mb.InputError, match="message 1 has no role"):
        render_chat("", [MESSAGES[0], {"content": "x"}])
    for message in ({"role": "user"}, {"role": "user", "content": None}):
        with pytest.raises(mb.InputError, match="message 1 has no content"):
            render_chat("", [MESSAGES[0], message])
    for messages in ([], "hello", MESSAGES[0]):
        with pytest.raises(mb.InputError, match="a conversation is a list of at least one message"):
            render_chat("", messages)


@pytest.mark.parametrize("where", ["tokenizer_config.json", "a list of them", "chat_template.jinja"])
def test_a_tokenizer_loads_and_saves_its_template(where, tmp_path):
    tokenizer = mb.Tokenizer.train("bpe", [" ".join(WORDS)], vocab_size=300)
    tokenizer.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    rows = [{"name": "tools", "template": "no"}, {"name": "default", "template": TEMPLATES["chatml"]}]
    value = {"tokenizer_config.json": TEMPLATES["chatml"], "a list of them": rows}.get(where)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | ({"chat_template": value} if value else {})))
    if where == "chat_template.jinja":
        (tmp_path / where).write_text(TEMPLATES["chatml"])
    with pytest.raises(mb.InputError, match="no chat template"):
        tokenizer.apply_chat_template(MESSAGES)
    tokenizer = mb.Tokenizer.from_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path / "again")
    for loaded in (tokenizer, mb.Tokenizer.from_pretrained(tmp_path / "again")):
        assert (
            loaded.apply_chat_template(MESSAGES[1:2])
            == "<|im_start|>user\n Hi <there> <|im_end|>\n<|im_start|>assistant\n"
        )
