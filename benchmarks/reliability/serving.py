"""What a server must survive: clients that go, stall, flood it or send nonsense; and every text right meanwhile.

    python benchmarks/reliability/serving.py --write

A small model with random weights is served by a process of its own.  Each goal is a row: what was done, what must hold,
what was seen.  Texts under load are compared with those of each request alone; pages, answers and memory are counted.
--smoke does a hundredth of everything; --write saves the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))
from _report import source, write_section
from _serving_fuzz import changed_json, raw_request, run_schemathesis
from _serving_texts import hard_texts

RESULTS = Path(__file__).parents[1] / "results" / "serving.md"
KEYS = ("the-first-of-two-keys", "the-second-of-two-keys")
PROMPT = "In the beginning God created the heaven and the earth. And the earth was without form, and void."


@dataclass
class Server:
    """A process that serves, and how it is asked."""

    process: subprocess.Popen[bytes]
    port: int
    folder: str

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def client(self, key: str = KEYS[0], **options: Any) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        headers = {"Authorization": f"Bearer {key}"}
        return httpx.AsyncClient(base_url=self.address, headers=headers, timeout=120, limits=limits, **options)

    def memory(self) -> float:
        """Return the resident memory of the process in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024  # type: ignore[index]

    async def send(self, method: str, path: str, body: Any = None) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Send a request on a connection of its own, at little cost for this process."""
        data = (
            body if isinstance(body, bytes) else b"" if body is None else json.dumps(body, ensure_ascii=False).encode()
        )
        head = (
            f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEYS[0]}\r\nConnection: close\r\n"
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
        return reader, writer

    async def ask(self, method: str, path: str, body: Any = None) -> tuple[int, str, float]:
        """Return the status, the text with its headers, and the seconds of an answer."""
        start = time.perf_counter()
        reader, writer = await self.send(method, path, body)
        text = (await reader.read()).decode()
        writer.close()
        return int(text.split(" ", 2)[1]), text, time.perf_counter() - start

    async def metrics(self, *names: str) -> list[float]:
        text = (await self.ask("GET", "/metrics"))[1]
        found = dict(re.findall(r"^monoblock_(\w+?)(?:_total)?{\S* (\S+)$", text, re.MULTILINE))
        return [float(found[name]) for name in names]

    async def statuses(self) -> dict[int, int]:
        """Return how many answers of each status there have been, without those that this asks for."""
        text, found = (await self.ask("GET", "/metrics"))[1], dict[int, int]()
        for route, status, times in re.findall(r'requests_total{route="(.*)",status="(\d+)"} (\S+)', text):
            if route != "/metrics":
                found[int(status)] = found.get(int(status), 0) + round(float(times))
        return found

    async def rest(self, seconds: float = 30.0) -> float:
        """Wait until nothing runs; return the pages in use then."""
        end = time.monotonic() + seconds
        while True:
            counts = await self.metrics("batch", "queue", "pages_in_use")
            if not any(counts) or time.monotonic() > end:
                return counts[-1]
            await asyncio.sleep(0.01)


@contextlib.contextmanager
def serving(folder: str, *options: str) -> Iterator[Server]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as temporary:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        keys = Path(temporary) / "keys"
        keys.write_text("\n".join(KEYS))
        words = ["serve", f"{folder}=toy", "--port", str(port), "--api-key-file", str(keys), *options]
        process = subprocess.Popen([sys.executable, "-m", "monoblock", *words], stderr=subprocess.DEVNULL)
        server = Server(process, port, folder)
        try:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if httpx.get(f"{server.address}/ready").status_code == 200:
                        break
                assert process.poll() is None, "the server has ended"
                time.sleep(0.05)
            yield server
        finally:
            process.kill()
            process.wait()


def random_body(number: int) -> dict[str, Any]:
    """Return a request of any shape; the same number gives the same one."""
    chance = random.Random(number)
    words = PROMPT.split()
    body: dict[str, Any] = {
        "model": "toy",
        "max_tokens": chance.randint(1, 24),
        "logprobs": chance.choice([None, 0, 2]),
    }
    body["prompt"] = (PROMPT + " " if number % 2 else "") + " ".join(chance.choices(words, k=chance.randint(1, 9)))
    match chance.randrange(4):
        case 0:
            body["temperature"] = 0
        case 1:
            body |= {"seed": chance.randrange(99), "n": chance.randint(1, 3), "top_p": 0.9}
        case 2:
            body |= {"num_beams": chance.randint(2, 4), "temperature": 0, "logprobs": None}
        case 3:
            body |= {"seed": chance.randrange(99), "top_k": 20, "frequency_penalty": 0.3, "stop": [" the"]}
    return {name: value for name, value in body.items() if value is not None}


def bits(answer: httpx.Response) -> Any:
    return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in answer.json()["choices"]]


async def gather(work: Callable[[int], Awaitable[Any]], count: int, at_once: int) -> list[Any]:
    """Return work(0) … work(count - 1), done by so many clients at a time."""
    results: list[Any] = [None] * count
    numbers = iter(range(count))

    async def client() -> None:
        for number in numbers:
            results[number] = await work(number)

    await asyncio.gather(*(client() for _ in range(at_once)))
    return results


def p99(seconds: list[float]) -> int:
    """Return the 99th percentile in milliseconds."""
    return round(1e3 * sorted(seconds)[round(0.99 * (len(seconds) - 1))])


# -- the goals --------------------------------------------------------------------------------------------------------


async def every_text_is_that_of_its_request_alone(server: Server, scale: float) -> str:
    """S1: 64 clients, mixed shapes, half with a common beginning: texts and log-probabilities as alone."""
    count, distinct = round(10_000 * scale), max(4, round(1000 * scale))
    async with server.client() as client:
        alone = [bits(await client.post("/v1/completions", json=random_body(n))) for n in range(distinct)]
        answers = await gather(
            lambda n: client.post("/v1/completions", json=random_body(n % distinct)), count, at_once=64
        )
    statuses = sum(answer.status_code != 200 for answer in answers)
    wrong = sum(answer.status_code == 200 and bits(answer) != alone[n % distinct] for n, answer in enumerate(answers))
    pages = await server.rest()
    assert not statuses
    assert not wrong
    assert not pages
    return f"{count:,} requests ({distinct:,} different), {wrong} differ, {statuses} failed, {pages:.0f} pages in use"


async def clients_that_go_free_their_pages(server: Server, scale: float) -> str:
    """S2: disconnects at random moments, streams and plain answers: pages free within 500 ms (p99), memory flat."""
    count, chance, waits = round(2000 * scale), random.Random(0), []
    before = server.memory()

    async def leave(number: int) -> None:
        body = {**random_body(number), "max_tokens": 200, "stream": bool(number % 2)}
        _, writer = await server.send("POST", "/v1/completions", body)
        await writer.drain()
        await asyncio.sleep(chance.choice([0, 0.005, 0.02, 0.1]))
        writer.close()

    for first in range(-80, count, 20):
        if first == 0:  # what the first requests have made room for stays
            before = server.memory()
        await asyncio.gather(*(leave(number) for number in range(first, first + 20)))
        start = time.monotonic()
        pages = await server.rest()
        waits.append(time.monotonic() - start)
        assert not pages, f"{pages} pages in use"
    growth = server.memory() - before
    assert growth < 16 + count / 1000
    return f"{count:,} disconnects, pages free after {p99(waits)} ms (p99), memory {growth:+.1f} MB"


async def a_flood_is_refused_at_once(server: Server, scale: float) -> str:
    """S3: requests arrive four times as fast as they are answered: each gets one; refusals within 100 ms (p99)."""
    count, at_once, chance = round(4096 * scale), 64, random.Random(0)

    async def one(number: int) -> tuple[int, float]:
        status, text, seconds = await server.ask("POST", "/v1/completions", random_body(number))
        assert status == 200 or (status == 429 and "retry-after: " in text), text
        return status, seconds

    start = time.monotonic()
    await gather(one, 2 * at_once, at_once)
    rate = 2 * at_once / (time.monotonic() - start)
    tasks = []
    for number in range(count):
        tasks.append(asyncio.create_task(one(number)))
        await asyncio.sleep(chance.expovariate(4 * rate))
    answers = await asyncio.gather(*tasks)
    refusals = [seconds for status, seconds in answers if status == 429]
    pages = await server.rest()
    assert refusals
    assert not pages
    return (
        f"{count:,} requests at {4 * rate:.0f}/s: {count - len(refusals)} answered, {len(refusals)} refused, "
        f"within {p99(refusals)} ms (p99)"
    )


async def stalled_clients_are_closed(server: Server, scale: float) -> str:
    """S4: clients that send their headers slowly, or never read: closed within 30 s, others are answered meanwhile."""
    count = max(2, round(100 * scale))
    slow = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(count)]
    for _, writer in slow:
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: local")
    start, gaps = time.monotonic(), []
    async with server.client() as client:
        for number in range(20):
            begin = time.perf_counter()
            assert (
                await client.post("/v1/completions", json={**random_body(number), "max_tokens": 4})
            ).status_code == 200
            gaps.append(time.perf_counter() - begin)
    for reader, writer in slow:
        assert await asyncio.wait_for(reader.read(), 35) is not None
        writer.close()
    seconds = time.monotonic() - start
    assert seconds < 32
    return f"{count} slow clients closed after {seconds:.0f} s; others answered within {1e3 * max(gaps):.0f} ms"


async def nonsense_is_refused(server: Server, scale: float) -> str:
    """S6: requests by schemathesis, changed JSON, raw bytes: no status 500, nothing hangs, the same process after."""
    _, schema, _ = await server.ask("GET", "/openapi.json")
    count = round(100_000 * scale)
    description = json.loads(schema[schema.index("{") :])
    operations = sum(len(methods) for methods in description["paths"].values())
    await asyncio.to_thread(run_schemathesis, server.address, description, KEYS[0], max(2, count // 2 // operations))
    by_schema = await server.statuses()

    async def change(number: int) -> None:
        path, data = changed_json(number)
        await asyncio.wait_for(server.ask("POST", path, data), 30)

    async def raw(number: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(raw_request(number, KEYS[0]))
        with contextlib.suppress(TimeoutError, ConnectionError):  # what is not complete is waited for
            await asyncio.wait_for(reader.read(), 0.1)
        writer.close()

    await gather(change, count * 3 // 10, at_once=16)
    by_json = await server.statuses()
    await gather(raw, count * 2 // 10, at_once=16)
    statuses = await server.statuses()
    assert await server.rest() == 0
    assert server.process.poll() is None
    assert not [status for status in statuses if status >= 500]
    numbers = sum(by_schema.values()), sum(by_json.values()) - sum(by_schema.values()), count * 2 // 10
    shown = ", ".join(f"{times:,} × {status}" for status, times in sorted(statuses.items()))
    return "{:,} by schemathesis, {:,} of changed JSON, {:,} of raw bytes: ".format(*numbers) + shown


async def keys_share_nothing(server: Server, scale: float) -> str:
    """S8: a prompt that another key has sent: none of its tokens are found in pages."""
    count, hits = max(2, round(200 * scale)), 0.0
    async with server.client(KEYS[0]) as first, server.client(KEYS[1]) as second:
        for number in range(count):
            body = {"model": "toy", "prompt": f"{number} {PROMPT * 2}", "max_tokens": 1}
            await first.post("/v1/completions", json=body)
            (before,) = await server.metrics("prefix_tokens")
            await second.post("/v1/completions", json=body)
            hits += (await server.metrics("prefix_tokens"))[0] - before
    assert not hits
    return f"{count} prompts, {hits:.0f} tokens found"


async def only_those_who_may_ask_are_answered(server: Server, scale: float) -> str:
    """S7: every route needs a key but /, /health and /ready; other hosts and origins are refused, and 0.0.0.0 too."""
    _, schema, _ = await server.ask("GET", "/openapi.json")
    routes = {("get", "/"), ("get", "/openapi.json"), ("get", "/nothing"), ("post", "/v1/nothing")}
    routes |= {
        (method, path) for path, row in json.loads(schema[schema.index("{") :])["paths"].items() for method in row
    }
    own, wrong = f"Bearer {KEYS[0]}", ["", "Bearer", "Bearer wrong", f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]}x"]
    hosts = {name: name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST") for name in HOSTS}
    origins = {name: name is None or any(name == f"http://{host}" for host in hosts if hosts[host]) for name in ORIGINS}
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
        for method, path in sorted(routes):
            for key in wrong:
                answer = await client.request(method, path, headers={"Authorization": key} if key else None)
                assert (answer.status_code == 200) == (path in OPEN), (path, key, answer.status_code)
                assert path in OPEN or answer.status_code == 401, (path, key, answer.status_code)
        for host, origin in itertools.product(hosts, origins):
            headers = {"Host": f"{host}:{server.port}", "Authorization": own} | ({"Origin": origin} if origin else {})
            status = (await client.get("/v1/models", headers=headers)).status_code
            assert status == (200 if hosts[host] and origins[origin] else 403), (host, origin, status)
    words = [sys.executable, "-m", "monoblock", "serve", server.folder, "--host", "0.0.0.0"]
    refusal = await asyncio.to_thread(lambda: subprocess.run(words, capture_output=True, text=True, check=False))
    assert refusal.returncode != 0
    assert "--api-key-file" in refusal.stderr
    return f"{len(routes)} routes with {len(wrong)} wrong keys, {len(hosts) * len(origins)} hosts and origins, as said"


async def long_texts_are_cut_in_linear_time(server: Server, scale: float) -> str:
    """S9: texts of a megabyte: each within 2 s and 2.5 times half of it; /health within 100 ms (p99)."""
    size, waits, slowest, steepest = round(1_000_000 * min(1, scale)), list[float](), 0.0, 0.0
    half, whole = hard_texts(size // 2), hard_texts(size)
    is_done = asyncio.Event()

    async def watch() -> None:
        while not is_done.is_set():
            waits.append((await server.ask("GET", "/health"))[2])
            await asyncio.sleep(0.02)

    async def cut(kind: str, text: str) -> float:
        status, answer, seconds = await server.ask("POST", "/tokenize", {"model": kind, "text": text})
        assert status == 200, answer[:400]
        return seconds

    watching = asyncio.create_task(watch())
    for kind, name in itertools.product(["toy", *KINDS], whole):
        before = seconds = math.inf
        for _ in range(8):  # other processes may disturb some
            before, seconds = min(before, await cut(kind, half[name])), min(seconds, await cut(kind, whole[name]))
            if seconds <= min(2, 2.5 * before):
                break
        assert seconds <= min(2, max(0.1, 2.5 * before)), f"{kind}, {name}: {before:.2f} s, then {seconds:.2f} s"
        slowest, steepest = max(slowest, seconds), max(steepest, seconds / before if seconds >= 0.1 else 0)
        if kind == "toy":
            status, answer, _ = await server.ask("POST", "/v1/completions", {"model": kind, "prompt": whole[name]})
            assert status == 400 or len(whole[name]) < 400, answer
    is_done.set()
    await watching
    return (
        f"{len(whole)} texts, {1 + len(KINDS)} tokenizers: at most {slowest:.2f} s, {steepest:.1f} times those of half "
        f"as much; /health within {p99(waits)} ms (p99)"
    )


KINDS = ("unigram", "wordpiece", "byte")  # of further tokenizers
OPEN = ("/", "/health", "/ready")
HOSTS = (
    "localhost", "127.0.0.1", "[::1]", "LOCALHOST", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example",
    "evil.example@localhost", "localhost@evil.example", "0.0.0.0", "127.1", "2130706433", "localhost.", "xn--localhost",
    "[::ffff:127.0.0.1]", "10.0.0.1", "example.com", "a" * 300, "local host", "%6cocalhost",
)  # fmt: skip
ORIGINS = (
    None, "http://localhost", "http://127.0.0.1", "http://[::1]", "null", "http://evil.example", "file://", "localhost",
    "http://localhost.evil.example", "http://evil.example/localhost", "http://localhost@evil.example", "http://[",
    "http://evil.example#localhost", "chrome-extension://abc", "http://127.0.0.1.evil.example",
)  # fmt: skip
GOALS: dict[Callable[[Server, float], Awaitable[str]], list[str]] = {  # with the options of the server
    every_text_is_that_of_its_request_alone: ["--exact"],
    clients_that_go_free_their_pages: [],
    a_flood_is_refused_at_once: ["--max-rows", "32", "--max-queue", "96"],
    stalled_clients_are_closed: [],
    nonsense_is_refused: ["--max-rows", "128"],
    only_those_who_may_ask_are_answered: [],
    keys_share_nothing: [],
    long_texts_are_cut_in_linear_time: [],
}


def shutdowns(folder: str, scale: float) -> str:
    """S5: SIGTERM under load: what has begun is answered, what comes later gets 503, exit code 0."""
    count, answered, refused = max(1, round(50 * scale)), 0, 0
    for _ in range(count):
        with serving(folder) as server:

            async def load(server: Server = server) -> list[int]:
                async with server.client() as client:
                    bodies = [{**random_body(number), "max_tokens": 40} for number in range(8)]
                    tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for body in bodies]
                    await asyncio.sleep(0.2)
                    server.process.send_signal(signal.SIGTERM)
                    return [(await task).status_code for task in tasks]

            statuses = asyncio.run(load())
            answered += statuses.count(200)
            refused += statuses.count(503)
            code = server.process.wait(40)
            assert code == 0, code
    assert answered + refused == 8 * count
    return f"{count} shutdowns, {answered} requests answered, {refused} refused, every exit code 0"


def write_toy(folder: Path, kind: str = "bpe", context: int = 320) -> str:
    import torch

    import monoblock as mb

    tokenizer = mb.Tokenizer.train(kind, [PROMPT * 9] if kind != "byte" else [], vocab_size=320)
    tokenizer.chat_template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    torch.manual_seed(0)
    config = mb.gpt(vocab=tokenizer.vocab_size, width=64, depth=3, heads=4, context=context)
    mb.Transformer(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", nargs="*", help="parts of the names of goals; by default all")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of everything")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    scale = 0.01 if args.smoke else args.scale
    lines = ["Faults and load", "", source(), "", "| goal | seen | seconds |", "|---|---|---|"]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as temporary:
        folder = write_toy(Path(temporary) / "toy")
        for goal in [*GOALS, shutdowns]:
            if args.goal and not any(word in goal.__name__ for word in args.goal):
                continue
            start, about = time.monotonic(), (goal.__doc__ or "").strip()
            if goal is shutdowns:
                seen = shutdowns(folder, scale)
            else:
                small = write_toy(Path(temporary) / "small", context=48) if goal is nonsense_is_refused else folder
                more = KINDS if goal is long_texts_are_cut_in_linear_time else ()
                others = [write_toy(Path(temporary) / kind, kind) for kind in more]
                with serving(small, *others, *GOALS[goal]) as server:
                    seen = asyncio.run(goal(server, scale))
            row = f"| {about} | {seen} | {time.monotonic() - start:.0f} |"
            print(row, flush=True)
            lines.append(row)
    if args.write:
        write_section(RESULTS, "A server under faults", "\n".join(lines))


if __name__ == "__main__":
    main()
