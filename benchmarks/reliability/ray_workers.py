"""What a Ray cluster must survive: processes that are killed while they answer requests, work off a batch, encode text.

    pip install 'monoblock[serve,ray]'
    python benchmarks/reliability/ray_workers.py --write

The cluster is this machine, with two workers.  Each goal is a row: what was done, what must hold, what was seen.
Answers and files are compared with those of one machine without Ray.  --smoke does a tenth; --write saves the table.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
from serving import KEYS, PROMPT, Server, gather, random_body, serving, write_toy

sys.path.insert(0, str(Path(__file__).parents[1]))
from _report import source, write_section

RESULTS = Path(__file__).parents[1] / "results" / "ray.md"
MARK = f"MONOBLOCK_RAY={uuid.uuid4().hex}"  # in the environment of every process that is started here
SERVE = """
import pathlib, signal, sys
from ray import serve
from monoblock.serving.ray import Arguments, app
arguments, port, file = sys.argv[1:]
serve.start(http_options={"port": int(port)})
serve.run(app(Arguments(**eval(arguments))))
pathlib.Path(file).touch()  # both replicas run
signal.pause()
"""


def start(*words: str) -> subprocess.Popen[bytes]:
    name, _, value = MARK.partition("=")
    variables = os.environ | {name: value, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *words], env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def processes(title: str = "") -> list[int]:
    """Return the ids of the processes that were started here, directly or by Ray, whose title has these words."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
            if title in line and MARK.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def workers(name: str) -> list[int]:
    """Return the ids of Ray's workers with a class of this name, which is part of their title."""
    return [process for title in (f"ray::{name}", f"ray::ServeReplica:default:{name}") for process in processes(title)]


def wait_for(title: str, count: int, process: subprocess.Popen[bytes]) -> list[int]:
    """Return the ids of the processes with a title as soon as there are so many, [] if the command has ended."""
    while process.poll() is None:
        found = workers(title)
        if len(found) >= count:
            return found
        time.sleep(0.05)
    return []


def kill_one(title: str, process: subprocess.Popen[bytes], chance: random.Random) -> bool:
    """Kill a worker at a random moment, once both run; return False if the command has ended."""
    if not wait_for(title, 2, process):
        return False
    time.sleep(chance.uniform(0.1, 2.0))
    found = workers(title)
    if process.poll() is not None or not found:
        return False
    os.kill(chance.choice(found), signal.SIGKILL)
    return True


@contextlib.contextmanager
def ray_serving(folder: str, **arguments: Any) -> Iterator[Server]:
    with socket.socket() as free, tempfile.TemporaryDirectory() as temporary:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        keys = Path(temporary) / "keys"
        keys.write_text("\n".join(KEYS))
        arguments |= {"model": f"{folder}=toy", "api_key_file": str(keys), "replicas": 2}
        file = Path(temporary) / "ready"
        process = start("-c", SERVE, repr(arguments), str(port), str(file))
        server = Server(process, port, folder)
        try:
            while process.poll() is None and not file.exists():
                time.sleep(0.2)
            for _ in range(20):  # the front knows of both a moment later
                assert httpx.get(f"{server.address}/ready", timeout=60).status_code == 200
                time.sleep(0.1)
            yield server
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(120)
            for left in processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(left, signal.SIGKILL)


# -- the goals --------------------------------------------------------------------------------------------------------


def text_of(body: dict[str, Any], answer: str) -> str | None:
    """Return the text of an answer; None if it is a stream that has ended with an error."""
    if not body.get("stream"):
        return "\n".join(choice["text"] for choice in json.loads(answer)["choices"])
    found = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith("data: {")]
    if not answer.endswith("data: [DONE]\n\n"):
        assert found[-1]["error"]["code"] == "replica_lost", found[-1]
        return None
    texts: dict[int, str] = {}
    for event in found:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return "\n".join(text for _, text in sorted(texts.items()))


def some_body(number: int) -> dict[str, Any]:
    return {"temperature": 0.8} | random_body(number)


def replicas_that_are_killed_cost_no_answer(folder: Path, scale: float) -> str:
    """Two replicas, 16 clients, one replica killed again and again: every request is answered once, with its text."""
    toy, kills, seen = str(folder / "toy"), max(2, round(20 * scale)), dict[str, int]()
    bodies = [some_body(number) for number in range(60)]
    bodies = [body | {"stream": "num_beams" not in body and number % 2 == 0} for number, body in enumerate(bodies)]
    with serving(toy, "--exact") as server:
        plain = [httpx.post(f"{server.address}/v1/completions", json=body, headers=HEADERS).text for body in bodies]
    expected = [text_of(body, answer) for body, answer in zip(bodies, plain, strict=True)]

    def count(what: str) -> None:
        seen[what] = seen.get(what, 0) + 1

    async def load(server: Server) -> None:
        is_over = False

        async def client(number: int) -> None:
            chance = random.Random(number)
            while not is_over:
                index = chance.randrange(len(bodies))
                body, text = bodies[index], None
                while text is None:
                    answer = await connection.post("/v1/completions", json=body)
                    text = text_of(body, answer.text) if answer.status_code == 200 else None
                    if text is None:
                        count("streams sent again" if answer.status_code == 200 else f"status {answer.status_code}")
                count("right" if text == expected[index] else "wrong")

        async with server.client() as connection:
            tasks = [asyncio.create_task(client(number)) for number in range(16)]
            chance = random.Random(0)
            for _ in range(kills):
                assert await asyncio.to_thread(kill_one, "ModelReplica", server.process, chance)
            await asyncio.to_thread(wait_for, "ModelReplica", 2, server.process)
            is_over = True
            await asyncio.gather(*tasks)

    with ray_serving(toy, exact=True) as server:
        asyncio.run(load(server))
    assert set(seen) <= {"right", "streams sent again"}, seen
    again = seen.get("streams sent again", 0)
    return (
        f"{kills} kills: {seen['right']:,} requests answered, 0 wrong, 0 failed; {again} streams had begun, sent again"
    )


def one_replica_has_the_beginning(folder: Path, scale: float) -> str:
    """Requests with common beginnings to two replicas: nearly as many tokens are found in pages as by one server."""
    # If each request went to any of the two, 8 of 10 would find their beginning, and not 9.
    groups, repeats = max(4, round(40 * scale)), 10
    text = [f"{number} {PROMPT}" for number in range(groups)]
    order = [number % groups for number in range(groups * repeats)]
    random.Random(0).shuffle(order)

    async def share(server: Server) -> float:
        async with server.client() as client:

            async def ask(n: int) -> Any:
                body = {"model": "toy", "prompt": f"{text[order[n]]} {n}", "max_tokens": 1}
                return (await client.post("/v1/completions", json=body)).json()["usage"]

            usages = await gather(ask, len(order), at_once=1)
        cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        return cached / sum(usage["prompt_tokens"] for usage in usages)

    with serving(str(folder / "toy")) as server:
        one = asyncio.run(share(server))
    with ray_serving(str(folder / "toy")) as server:
        two = asyncio.run(share(server))
    assert two > 0.95 * one, (two, one)
    return (
        f"{groups} beginnings, {len(order)} requests: {two:.1%} of the tokens found in pages, by one server {one:.1%}"
    )


def clients_that_go_free_their_pages(folder: Path, scale: float) -> str:
    """Clients that leave streams and plain requests early: no page of either replica is in use soon after."""
    count, chance = max(20, round(200 * scale)), random.Random(3)

    async def leave(number: int) -> None:
        body = some_body(number) | {"max_tokens": 250, "stream": bool(number % 2)}
        with contextlib.suppress(TimeoutError):
            async with server.client() as client:
                await asyncio.wait_for(client.post("/v1/completions", json=body), chance.choice([0.05, 0.1, 0.2]))

    async def work() -> float:
        await gather(leave, count, at_once=8)
        start, quiet = time.monotonic(), 0
        while quiet < 20:  # each answer is that of one of the two
            quiet = 0 if await server.metric("pages_in_use") else quiet + 1
            assert time.monotonic() - start < 60
        return time.monotonic() - start

    with ray_serving(str(folder / "toy")) as server:
        seconds = asyncio.run(work())
    return f"{count} disconnects, no page in use within {seconds:.1f} s"


def what_does_not_fit_is_refused(folder: Path, scale: float) -> str:
    """Two replicas that take 4 requests each, and a queue of 8: a flood gets status 200 or 429, each request one."""
    count = max(60, round(600 * scale))

    async def work() -> list[int]:
        async with server.client() as client:
            body = {"model": "toy", "prompt": PROMPT, "max_tokens": 150}
            answers = await gather(lambda n: client.post("/v1/completions", json=body), count, at_once=60)
        assert all("retry-after" in answer.headers for answer in answers if answer.status_code == 429)
        return [answer.status_code for answer in answers]

    with ray_serving(str(folder / "toy"), at_once=4, max_queue=8) as server:
        statuses = asyncio.run(work())
    assert set(statuses) == {200, 429}
    return f"{count} requests: {statuses.count(200)} answered, {statuses.count(429)} refused"


def a_batch_survives_its_workers(folder: Path, scale: float) -> str:
    """`monoblock batch --ray`, two workers, one killed again and again: every request is answered once, as without."""
    count, kills, chance = round(20_000 * scale), max(2, round(10 * scale)), random.Random(1)
    names, texts = [folder / name for name in ("requests.jsonl", "plain.jsonl", "ray.jsonl")], []
    with names[0].open("w") as file:
        for number in range(count):
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": some_body(number)}
            file.write(json.dumps(line) + "\n")
    words = ["-m", "monoblock", "batch", str(names[0]), "--model", str(folder / "toy"), "--exact", "--out"]
    assert start(*words, str(names[1])).wait() == 0
    process, done = start(*words, str(names[2]), "--ray", "local", "--workers", "2"), 0
    while done < kills and kill_one("Replica", process, chance):
        done += 1
    assert process.wait() == 0
    for path in names[1:]:
        results = [json.loads(line) for line in path.read_text().splitlines()]
        choices = {one["custom_id"]: one["response"]["body"]["choices"] for one in results}
        assert len(results) == len(choices) == count, f"{len(results)} answers, {len(choices)} requests"
        texts.append(choices)
    wrong = sum(texts[0][name] != texts[1][name] for name in texts[0])
    assert done
    assert not wrong
    return f"{done} kills: {count:,} requests answered once each, {wrong} differ"


def token_files_do_not_depend_on_the_workers(folder: Path, scale: float) -> str:
    """`monoblock data prepare --ray`, two workers, one killed again and again: the bytes of one machine."""
    kills, chance, size = max(2, round(10 * scale)), random.Random(2), round(400e6 * scale)
    words = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(1, 9))) for _ in range(50_000)]
    lines = [" ".join(chance.choices(words, k=12)) for _ in range(20_000)]
    with (folder / "text.txt").open("w") as file:
        while file.tell() < size:
            file.write("\n".join(chance.choices(lines, k=20_000)) + "\n")
    call = ["-m", "monoblock", "data", "prepare", str(folder / "text.txt"), "--tokenizer", str(folder / "toy")]
    call += ["--documents", "line", "--shard-tokens", str(2**24), "--jobs", "2", "--out"]
    assert start(*call, str(folder / "plain")).wait() == 0
    process, done = start(*call, str(folder / "ray"), "--ray", "local"), 0
    while done < kills and kill_one("_Encoder", process, chance):
        done += 1
    assert process.wait() == 0
    plain, ray = ({path.name: path.read_bytes() for path in (folder / n).iterdir()} for n in ("plain", "ray"))
    assert done
    assert plain == ray
    return f"{done} kills: {len(plain)} files of {sum(map(len, plain.values())) / 1e6:.0f} MB, all equal"


HEADERS = {"Authorization": f"Bearer {KEYS[0]}"}
GOALS = [
    replicas_that_are_killed_cost_no_answer,
    one_replica_has_the_beginning,
    clients_that_go_free_their_pages,
    what_does_not_fit_is_refused,
    a_batch_survives_its_workers,
    token_files_do_not_depend_on_the_workers,
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("goal", nargs="*", help="parts of the names of goals; by default all")
    parser.add_argument("--scale", type=float, default=1.0, help="how much of everything")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--write", action="store_true", help=f"write the table to results/{RESULTS.name}")
    args = parser.parse_args()
    title = "Workers that are killed"
    lines = [title, "", f"{source()}, ray {version('ray')}", "", "| goal | seen | seconds |", "|---|---|---|"]
    for goal in GOALS:
        if args.goal and not any(word in goal.__name__ for word in args.goal):
            continue
        begin, about = time.monotonic(), (goal.__doc__ or "").strip()
        with tempfile.TemporaryDirectory() as temporary:
            write_toy(Path(temporary) / "toy")
            seen = goal(Path(temporary), 0.1 if args.smoke else args.scale)
        row = f"| {about} | {seen} | {time.monotonic() - begin:.0f} |"
        print(row, flush=True)
        lines.append(row)
    if args.write:
        write_section(RESULTS, "A Ray cluster under faults", "\n".join(lines))


if __name__ == "__main__":
    main()
