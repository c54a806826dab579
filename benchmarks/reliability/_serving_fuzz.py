"""Requests that are wrong in every way: JSON changed at random, raw bytes, and what schemathesis makes."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TEXT = "In the beginning God created the heaven and the earth"
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["yes", "no"]}}, "required": ["a"]}
DECODING: dict[str, Any] = {
    "max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "n": 2, "stream": True,
    "stop": ["x"], "logit_bias": {"9": 1.0}, "presence_penalty": 0.5, "stream_options": {"include_usage": True},
    "structured_outputs": {"json": SCHEMA}, "response_format": {"type": "json_object"}, "receipt": True, "timeout": 9.0,
    "inspect": {"lens": 1, "attention": [[0, 0]], "edits": [{"names": "decoder.*.output", "positions": [0]}]},
    "user": "x", "metadata": {"a": "b"}, "priority": 1, "repetition_penalty": 1.1, "num_beams": 2, "draft": "8-bit",
}  # fmt: skip
MESSAGES = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}, {"role": "assistant", "content": "Hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": [TEXT, TEXT], "echo": True, "logprobs": 2, **DECODING},
    "/v1/chat/completions": {"messages": MESSAGES, "tools": [{"type": "function"}], "logprobs": True, **DECODING},
    "/v1/responses": {"input": MESSAGES, "instructions": "Be brief", "text": {"format": {"type": "text"}}, **DECODING},
    "/v1/embeddings": {"input": [TEXT, "x"], "encoding_format": "base64", "dimensions": 64, "pooling": "mean"},
    "/v1/translate": {"input": TEXT, "num_beams": 2, "alignments": True},
    "/v1/classify": {"input": [TEXT], "top": 2},
    "/v1/fill": {"input": TEXT, "top": 2},
    "/tokenize": {"text": TEXT, "add_special_tokens": True},
    "/detokenize": {"tokens": [5, 6, 7]},
}
ODD: list[Any] = [
    None, True, 0, -1, 1, 2**31, 2**63, 10**30, -0.0, 0.5, 1e308, "", "a", "\ud800", "\0", "\u202e", "0" * 999, "toy",
    [], [[]], [None], [[[[[]]]]], [5], ["a", 5], [[5], "a"], {}, {"a": {}}, {"type": "object"}, {"$ref": "#"},
    {"type": "array", "items": {"$ref": "#"}}, "../../etc/passwd", "{{ 7 * 7 }}", "(a+)+$", "[", "start: start",
]  # fmt: skip
WORDS = ["NaN", "Infinity", "1e999", "-", '"\\ud800"', '"\\u0000"', "[" * 50_000, '{"a":' * 20_000, "//", "'a'", "\xa0"]
HEADERS = [
    b"Content-Length: 3", b"Content-Length: -1", b"Content-Length: 1e3", b"Expect: 100-continue", b" folded", b": x",
    b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Connection: Upgrade\r\nUpgrade: h2c",
    b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Key: x", b"Host: evil", b"\0: \0", b"X\xff: \xff",
    b"A" * 70_000 + b": x", b"X: " + b"a" * 70_000,
]  # fmt: skip
PATHS = [b"*", b"//", b"/%", b"/%ff%00", b"/v1/models/" + b"a" * 9000, b"http://evil/", b"/\xff", b"/v1/../", b""]
METHODS = [b"GET", b"PUT", b"PRI * HTTP/2.0\r\n\r\nSM", b"CONNECT", b"\x16\x03\x01", b"POST" * 99, b""]


def changed_json(number: int) -> tuple[str, bytes]:
    """Return a route and a body for it, changed in a few places; the same number gives the same ones."""
    chance = random.Random(number)
    route, whole = chance.choice(list(BODIES.items()))
    names = chance.sample(list(whole), min(len(whole), chance.randint(1, 6)))
    body: Any = json.loads(json.dumps({"model": "toy", **{name: whole[name] for name in names}}))
    for _ in range(chance.randint(0, 3)):
        _change(body, chance)
    data = json.dumps(body, ensure_ascii=chance.random() < 0.5).encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((0, 0, 0, 1, 2))):
        place = chance.randrange(len(data) + 1)
        cut = chance.choice((0, 1, 9))
        more = chance.choice((b"", bytes([chance.randrange(256)]), chance.choice(WORDS).encode()))
        data = data[:place] + more + data[place + cut :]
    return route, data


def _change(value: Any, chance: random.Random) -> None:
    """Change one place of an object: replace it, remove it, or add another."""
    while True:
        keys = list(value) if isinstance(value, dict) else range(len(value))
        if not keys:
            return
        key = chance.choice(list(keys))
        inner = value[key]
        if isinstance(inner, dict | list) and inner and chance.random() < 0.6:
            value = inner
            continue
        match chance.randrange(4):
            case 0 if isinstance(value, dict):
                value[chance.choice(["x", "", "type", "n", "suffix", "\ud800"])] = copy.deepcopy(chance.choice(ODD))
            case 1:
                del value[key]
            case _:
                value[key] = copy.deepcopy(chance.choice(ODD))
        return


def raw_request(number: int, key: str) -> bytes:
    """Return bytes that are hardly a request."""
    chance = random.Random(number)
    body = json.dumps({"model": "toy", "prompt": "x", "max_tokens": 1}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    ).encode()
    extra = chance.choice(HEADERS) + b"\r\n"
    data = head + (extra if chance.random() < 0.7 else b"") + b"\r\n" + body
    match chance.randrange(5):
        case 0:
            return bytes(chance.randrange(256) for _ in range(chance.randrange(1, 400)))
        case 1:
            return data.replace(b"POST", chance.choice(METHODS), 1)
        case 2:
            return data.replace(b"/v1/completions", chance.choice(PATHS), 1)
        case 3:
            return data[: chance.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(chance.randint(1, 9)):
        changed[chance.randrange(len(changed))] = chance.randrange(256)
    return bytes(changed)


def run_schemathesis(address: str, schema: dict[str, Any], key: str, examples: int) -> None:
    """Let schemathesis make requests, valid and invalid, from the description that a server gives of itself."""
    for part in schema["components"]["schemas"].values():
        if "model" in part.get("properties", {}):
            part["properties"]["model"] = {"enum": ["toy"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "openapi.json"
        path.write_text(json.dumps(schema))
        words = [sys.executable, "-m", "schemathesis.cli", "run", str(path), "--url", address, "--mode", "all"]
        words += ["--header", f"Authorization: Bearer {key}", "--max-examples", str(examples), "--workers", "4"]
        words += ["--phases", "fuzzing", "--checks", "not_a_server_error", "--request-timeout", "30"]
        words += ["--continue-on-failure", "--warnings", "off", "--suppress-health-check", "all", "--no-color"]
        done = subprocess.run(words, cwd=folder, env=os.environ, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"error: schemathesis has found something, or does not run:\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
        )
