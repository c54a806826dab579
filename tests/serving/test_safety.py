"""Keys, names, sizes and clients that go: what a request may not do."""

import asyncio
import contextlib
import json
import socket
import time
import urllib.error
import urllib.request
from types import SimpleNamespace

import pytest
from serving_support import KEY, ask, running_server, tiny_app, tiny_pipeline

from monoblock.errors import InputError
from monoblock.serving import engine_loop, process
from monoblock.serving.app import create_app
from monoblock.serving.process import check_address
from monoblock.serving.security import MAX_BODY, is_open
from monoblock.serving.served_model import ServedModel

COMPLETION = {"model": "tiny", "prompt": "In the", "max_tokens": 3}


@pytest.fixture(scope="module")
def server():
    with running_server(tiny_app()) as (server, address):
        yield server, address


def fetch(address, path, body=None, **headers):
    """Return the status and the body of an answer."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}", **headers}
    data = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(address + path, data, {name: value for name, value in headers.items() if value})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as problem:
        return problem.code, problem.read()


def test_every_route_needs_the_key_but_those_that_are_listed(server):
    gate, address = server[0].gate, server[1]
    paths = [*gate.app.openapi()["paths"], "/", "/openapi.json", "/metrics", "/nope"]
    assert {path for path in paths if is_open(path)} == {"/", "/health", "/ready"}
    for path in paths:
        for key in (None, "Bearer wrong", f"Basic {KEY}", f"bearer {KEY}x"):
            status, body = fetch(address, path.replace("{name}", "tiny"), Authorization=key)
            assert (status == 200) == is_open(path), (path, key)
            if not is_open(path):
                assert status == 401
                assert json.loads(body)["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "", "[", "localhost@evil.example:80", "evil.example@localhost"]
)
def test_other_names_of_the_server_are_refused(server, host):
    status, body = fetch(server[1], "/v1/models", Host=host or "evil")
    assert status == 403
    assert b"--allow-host" in body


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://localhost.evil.example", "file://"])
def test_pages_of_other_origins_are_refused(server, origin):
    assert fetch(server[1], "/v1/models", Origin=origin)[0] == 403
    assert fetch(server[1], "/v1/models", Origin=server[1])[0] == 200


def test_another_address_needs_keys_of_the_user():
    check_address("127.0.0.1", 0, has_key_file=False)
    check_address("0.0.0.0", 0, has_key_file=True)
    with pytest.raises(InputError, match="--api-key-file"):
        check_address("0.0.0.0", 0, has_key_file=False)


def test_an_address_in_use_is_one_line():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.raises(InputError, match="give another --port"):
        check_address("127.0.0.1", other.getsockname()[1], has_key_file=False)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "the body is missing"),
        (b"{", "not JSON"),
        (b"[" * 100_000, "JSON"),
        (b"[]", "object"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', "temperature"),
        (b'{"model": "tiny", "prompt": "x", "temperature": 1e999}', "temperature"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', "prompt"),
        ({**COMPLETION, "temprature": 1}, "did you mean 'temperature'"),
        ({**COMPLETION, "suffix": "x"}, "suffix is not supported"),
        ({**COMPLETION, "model": "tony"}, "did you mean 'tiny'"),
        ({**COMPLETION, "model": "../../etc/passwd"}, "there is no model"),
        ({**COMPLETION, "max_tokens": 0}, "max_tokens"),
        ({**COMPLETION, "max_tokens": "5"}, "max_tokens"),
        ({**COMPLETION, "max_tokens": True}, "max_tokens"),
        ({**COMPLETION, "n": 10**9}, "n:"),
        ({**COMPLETION, "prompt": []}, "prompt"),
        ({**COMPLETION, "prompt": [-1]}, "id -1"),
        ({**COMPLETION, "prompt": [10**30]}, "id 1000"),
        ({**COMPLETION, "prompt": [[]]}, "prompt"),
        ({**COMPLETION, "prompt": [True] * 500_000}, "write a text, token ids"),
        ({**COMPLETION, "prompt": [[1], *[["a"]] * 1000]}, "prompt.1.0"),
        ({**COMPLETION, "logit_bias": dict.fromkeys(map(str, range(9000)), "x")}, "at most 1024 entries"),
        ({**COMPLETION, **dict.fromkeys(map(str, range(9000)), "x")}, "at most 1024 entries"),
        ({**COMPLETION, "structured_outputs": {"choice": [1] * 500_000}}, "choice"),
        ({**COMPLETION, "prompt": ["a"] * 300}, "at most 256"),
        ({**COMPLETION, "prompt": "the " * 300}, "shorten it"),
        ({**COMPLETION, "stop": [""]}, "stop"),
        ({**COMPLETION, "stop": ["a"] * 17}, "stop"),
        ({**COMPLETION, "logit_bias": {"x": 1}}, "token id"),
        ({**COMPLETION, "logit_bias": {"9999": 1}}, "vocabulary"),
        ({**COMPLETION, "temperature": 0.5, "num_beams": 2}, "num_beams"),
        ({**COMPLETION, "seed": -1}, "seed"),
        ({**COMPLETION, "structured_outputs": {"regex": "("}}, "regex"),
        ({**COMPLETION, "structured_outputs": {"regex": "a", "choice": ["b"]}}, "one of them"),
        ({**COMPLETION, "structured_outputs": {"grammar": "no grammar"}}, "grammar"),
        ({**COMPLETION, "structured_outputs": {"json": {"type": "nonsense"}}}, "json"),
        ({**COMPLETION, "inspect": {"attention": [[9, 0]]}}, "layers are"),
        ({**COMPLETION, "inspect": {"lens": 99}}, "lens"),
        ({**COMPLETION, "n": 2, "inspect": {"lens": 1}}, "one text"),
        ({**COMPLETION, "num_beams": 3, "inspect": {"lens": 1}}, "without beams"),
        ({**COMPLETION, "prompt": ["a", "b"], "inspect": {"lens": 1}}, "one text"),
        ({**COMPLETION, "inspect": {"attention": [[0, 0], [0, 0]]}}, "twice"),
        ({**COMPLETION, "max_completion_tokens": 3}, "max_completion_tokens"),
        ({**COMPLETION, "structured_outputs": {"regex": ""}}, "empty text"),
        ({**COMPLETION, "structured_outputs": {}}, "structured_outputs has no constraint"),
        ({**COMPLETION, "length_penalty": 2.0}, "length_penalty=2.0 ranks the hypotheses of a beam search"),
        ({**COMPLETION, "early_stopping": True, "temperature": 0}, "early_stopping=True ranks"),
        ({**COMPLETION, "structured_outputs": {"regex": "\\"}}, "regex"),
        ({**COMPLETION, "receipt": True, "structured_outputs": {"choice": ["a"]}}, "receipt"),
    ],
)
def test_a_wrong_request_is_one_line_that_names_the_field(server, body, message):
    start = time.monotonic()
    status, answer = fetch(server[1], "/v1/completions", body)
    assert time.monotonic() - start < 5
    assert status in (400, 404)
    error = json.loads(answer)["error"]
    assert message in error["message"]
    assert "\n" not in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert fetch(server[1], "/v1/completions", COMPLETION)[0] == 200


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("responses", b'{"model": "tiny", "input": "x", "metadata": {"a": NaN}}'),
        ("responses", b'{"model": "tiny", "input": "x", "metadata": {"a": "\\ud800"}}'),
        (
            "chat/completions",
            b'{"model": "tiny", "messages": [{"role": "user", "content": [{"type": [1], "text": "x"}]}]}',
        ),
        ("chat/completions", b'{"model": "tiny", "messages": [{"role": "user", "content": [3]}]}'),
        ("responses", b'{"model": "tiny", "input": [{"role": "user", "content": 5}]}'),
    ],
)
def test_odd_values_are_refused_and_never_an_error_of_the_server(server, route, body):
    status, answer = fetch(server[1], f"/v1/{route}", body)
    assert status == 400
    assert "\n" not in json.loads(answer)["error"]["message"]


def test_an_odd_origin_is_refused_without_a_key(server):
    assert fetch(server[1], "/v1/models", Origin="http://[", Authorization=None)[0] == 403


def test_a_body_in_chunks_is_limited_too(server):
    host, port = server[1].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        with contextlib.suppress(OSError):
            for _ in range(MAX_BODY // (1 << 16) + 2):
                connection.sendall(b"10000\r\n" + b" " * (1 << 16) + b"\r\n")
        assert connection.recv(1 << 16).split(b" ")[1] == b"413"


def test_headers_are_limited_in_size(server):
    host, port = server[1].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        received = b"?"
        with contextlib.suppress(OSError):
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            for number in range(100):
                connection.sendall(b"X-%d: %s\r\n" % (number, b"a" * 4096))
            received = connection.recv(1)
        assert received in (b"", b"?")


def test_a_full_server_refuses_a_request_before_it_has_its_body(server, monkeypatch):
    monkeypatch.setattr(server[0].gate, "most", 0)
    host, port = server[1].removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        connection.sendall(f"{head}Content-Length: 1000\r\n\r\n".encode())
        answer = connection.recv(1 << 16)
    assert answer.split(b" ")[1] == b"429"
    assert b"retry-after: 1" in answer
    assert fetch(server[1], "/v1/models")[0] == 200
    assert fetch(server[1], "/v1/completions", COMPLETION, Authorization=None)[0] == 401


def test_steps_with_prompts_become_short_when_they_take_long(monkeypatch):
    body = {"prompt": [*range(5, 85)], "max_tokens": 4, "temperature": 0}
    ((_, whole),) = ask(tiny_app(exact=True), ("/v1/completions", body))
    monkeypatch.setattr(engine_loop, "STEP_SECONDS", 0.0)
    gate = tiny_app(exact=True)
    scheduler = gate.app.state.server.models["tiny"].loop.engine.scheduler
    scheduler.step_tokens = 40
    counts = []
    select = scheduler._select_passes
    monkeypatch.setattr(
        scheduler, "_select_passes", lambda: [passes := select(), counts.append(len(passes[0].tokens))][0]
    )
    ((_, cut),) = ask(gate, ("/v1/completions", body))
    assert cut["choices"] == whole["choices"]
    assert counts[:2] == [40, engine_loop.LEAST_STEP_TOKENS]


@pytest.mark.parametrize(("seconds", "expected"), [(0.1, 1), (1e-9, engine_loop.MAX_BURST)])
def test_bursts_get_the_length_that_takes_a_moment(monkeypatch, seconds, expected):
    """Of steps without prompts, which end no later than `seconds` after they begin by the clock of this test."""
    gate, clock = tiny_app(), iter(range(10**6))
    engine = gate.app.state.server.models["tiny"].loop.engine
    engine.max_burst = 8
    monkeypatch.setattr(engine_loop, "time", SimpleNamespace(perf_counter=lambda: next(clock) * seconds))
    ask(gate, ("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 12, "temperature": 0}))
    assert engine.max_burst == expected


def test_headers_that_come_slowly_end_the_connection_also_of_a_second_request(monkeypatch):
    monkeypatch.setattr(process, "HEADER_SECONDS", 0.5)
    with running_server(tiny_app()) as (_, address):
        host, port = address.removeprefix("http://").split(":")
        for before in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with socket.create_connection((host, int(port)), timeout=20) as connection:
                connection.sendall(before + b"GET /health HTTP/1.1\r\nHos")
                start, received = time.monotonic(), b""
                with contextlib.suppress(ConnectionResetError):
                    while part := connection.recv(1 << 16):
                        received += part
                assert time.monotonic() - start < 15
                assert received.startswith(b"HTTP/1.1 200") == bool(before)


def test_a_client_that_reads_nothing_is_closed(monkeypatch):
    monkeypatch.setattr(process, "WRITE_SECONDS", 0.5)
    gate = tiny_app()
    with running_server(gate) as (server, address):
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({"model": "tiny", "text": "a " * 400_000}).encode()
        head = f"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        with connection:
            connection.sendall(head.encode() + body)
            until(lambda: server.server_state.connections)
            until(lambda: not server.server_state.connections)
            assert not gate.num_requests


def test_a_body_is_limited_in_size(server):
    host, port = server[1].removeprefix("http://").split(":")
    for length in (MAX_BODY + 1, 10**30):
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode())
            assert connection.recv(1 << 16).split(b" ")[1] in (b"413", b"400")


def test_a_full_queue_is_refused_at_once_and_the_others_are_answered():
    gate = create_app([ServedModel("tiny", tiny_pipeline(), max_rows=2, max_queue=3)], [KEY])
    answers = ask(gate, *[("/v1/completions", {"prompt": f"{n}", "max_tokens": 30}) for n in range(12)])
    statuses = sorted(status for status, _ in answers)
    assert statuses == [200] * 5 + [429] * 7
    refused = next(body for status, body in answers if status == 429)
    assert refused["error"]["code"] == "queue_full"


def test_more_prompts_than_a_server_takes_are_wrong_and_those_it_has_no_room_for_now_come_later():
    gate = create_app([ServedModel("tiny", tiny_pipeline(), max_rows=2, max_queue=3)], [KEY])
    bodies = [{"prompt": ["a"] * count, "max_tokens": 30} for count in (6, 3, 3)]
    (wrong, error), *fitting = ask(gate, *(("/v1/completions", body) for body in bodies))
    assert wrong == 400
    assert "send at most 5" in error["error"]["message"]
    assert sorted(status for status, _ in fitting) == [200, 429]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_pages(server, stream):
    gate, address = server[0].gate, server[1]
    engine = gate.app.state.server.models["tiny"].loop.engine
    host, port = address.removeprefix("http://").split(":")
    body = json.dumps({**COMPLETION, "max_tokens": 90, "n": 20, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(head.encode() + body)
        until(lambda: engine.busy)
    until(lambda: not engine.busy and not engine.pages.num_in_use)
    assert fetch(address, "/v1/completions", COMPLETION)[0] == 200


def until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_has_begun_is_answered_while_the_server_shuts_down():
    with running_server(tiny_app()) as (server, address):
        host, port = address.removeprefix("http://").split(":")
        body = json.dumps({**COMPLETION, "max_tokens": 60, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            received = connection.recv(1 << 16)
            server.handle_exit(15, None)
            assert fetch(address, "/v1/completions", COMPLETION)[0] in (503, 200)
            while part := connection.recv(1 << 16):
                received += part
                if b"[DONE]" in received:
                    break
        assert b"[DONE]" in received
        until(lambda: server.should_exit)


def test_two_keys_share_no_prefixes():
    gate = create_app([ServedModel("tiny", tiny_pipeline())], [KEY, "another-key"])
    body = {"model": "tiny", "prompt": "In the beginning God created the heaven " * 3, "max_tokens": 2}

    async def main():
        from monoblock.serving.replica import post

        found = []
        async with gate.lifespan():
            scheduler = gate.app.state.server.models["tiny"].loop.engine.scheduler
            for key in (KEY, "another-key", KEY):
                before = scheduler.num_prefix_tokens
                assert (await post(gate, key, "/v1/completions", body))[0] == 200
                found.append(scheduler.num_prefix_tokens - before)
        return found

    first, other, again = asyncio.run(main())
    assert first == other == 0
    assert again > 0
