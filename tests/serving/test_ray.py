"""What runs on a Ray cluster, without one; benchmarks/reliability/ray_workers.py kills the workers of a real one."""

import ast
import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from serving_support import KEY, events, tiny_pipeline

import monoblock as mb
from monoblock.cli.ray_cluster import Cluster, connect
from monoblock.data.prepare import PartEncoder, TokenizerPlan, prepare_tokens
from monoblock.serving.app import ReplicaLost
from monoblock.serving.engine_loop import QueueFull
from monoblock.serving.relay import ATTEMPTS, build_relay, find_beginning
from monoblock.serving.replica import Replica, messages, post
from monoblock.serving.security import Gate
from monoblock.serving.served_model import ServedModel

BODY = {"model": "tiny", "prompt": "In the beginning", "max_tokens": 5, "temperature": 0}
LOST = ReplicaLost("the process that answered has ended")


def load():
    return [ServedModel("tiny", tiny_pipeline())]


class Replicas:
    """Asks one replica; the first asks end as `faults` says: an exception, and after how many messages."""

    def __init__(self, *faults):
        self.faults, self.asked, self.open = list(faults), [], 0
        self.replica = Replica(load, [KEY])

    async def ask(self, scope, body, beginning):
        self.asked.append(beginning)
        problem, after = self.faults.pop(0) if self.faults else (None, -1)
        self.open += 1
        try:
            if problem is not None and not after:
                raise problem
            async for message in self.replica.messages(scope, body):
                yield message
                after -= 1
                if problem is not None and not after:
                    raise problem
        finally:
            self.open -= 1

    def gate(self):
        return Gate(build_relay(self.ask), [KEY])


def run(replicas, work):
    async def main():
        gate = replicas.gate()
        async with gate.lifespan():
            try:
                return await work(gate)
            finally:
                await replicas.replica.stop()

    return asyncio.run(main())


def relayed(*faults, **body):
    """Return the replicas, the status and the bytes of the answer to a request."""
    replicas = Replicas(*faults)
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "path": "/v1/completions"}
    headers = {"host": "localhost", "authorization": f"Bearer {KEY}", "content-type": "application/json"}
    scope |= {"raw_path": b"", "root_path": "", "query_string": b""}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in headers.items()]

    async def work(gate):
        return [message async for message in messages(gate, scope, json.dumps(BODY | body).encode())]

    start, *parts = run(replicas, work)
    assert not replicas.open
    return replicas, start, b"".join(part.get("body", b"") for part in parts)


# -- the relay ---------------------------------------------------------------------------------------------------------


def test_requests_that_begin_alike_have_one_digest():
    text = "You are a helpful assistant of a library, and answer shortly. " * 2
    bodies = [{"model": "m", name: text + end} for name in ("prompt", "input") for end in ("", "a", "b" * 999)]
    assert len({find_beginning(json.dumps(body).encode()) for body in bodies}) == 1
    chats = [[{"role": "system", "content": text}, {"role": "user", "content": end}] for end in "ab"]
    assert len({find_beginning(json.dumps({"model": "m", "messages": chat}).encode()) for chat in chats}) == 1
    ids = [{"model": "m", "prompt": [*range(300, 316), end]} for end in (1, 2)]
    assert len({find_beginning(json.dumps(body).encode()) for body in ids}) == 1
    others = [{"model": "n", "prompt": text}, {"model": "m", "prompt": "x" + text}, {"model": "m", "prompt": [5, 6]}]
    assert len({find_beginning(json.dumps(body).encode()) for body in [*others, bodies[0]]}) == 4
    assert find_beginning(b'{"prompt": "\\ud800"}')


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b"5", b'"text"', b'{"model": "m"}', b"\xff", b"[" * 99_999])
def test_a_body_without_a_prompt_has_no_digest(body):
    assert find_beginning(body) is None


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_replica_that_is_lost_before_it_answers_costs_no_answer(after, stream):
    replicas, start, body = relayed((LOST, after), (LOST, after), stream=stream)
    _, undisturbed_start, undisturbed = relayed(stream=stream)
    assert start["status"] == undisturbed_start["status"] == 200
    assert len(replicas.asked) == 3
    assert len(set(replicas.asked)) == 1
    if stream:
        texts = ["".join(event["choices"][0]["text"] for event in events(raw.decode())) for raw in (body, undisturbed)]
        assert body.endswith(b"data: [DONE]\n\n")
    else:
        texts = [json.loads(raw)["choices"][0]["text"] for raw in (body, undisturbed)]
    assert texts[0] == texts[1]


def test_a_stream_that_has_begun_ends_with_an_error_and_is_not_begun_again():
    replicas, start, body = relayed((LOST, 3), stream=True)
    assert (start["status"], len(replicas.asked)) == (200, 1)
    *texts, last = events(body.decode())
    assert len(texts) == 2
    assert last["error"]["code"] == "replica_lost"
    assert b"[DONE]" not in body


def test_a_replica_that_is_lost_after_its_answer_changes_nothing():
    replicas, start, body = relayed((LOST, 2))
    assert (start["status"], len(replicas.asked)) == (200, 1)
    assert len(json.loads(body)["choices"]) == 1


def test_a_request_whose_replicas_are_all_lost_may_be_sent_again():
    replicas, start, body = relayed(*[(LOST, 1)] * ATTEMPTS)
    assert (start["status"], len(replicas.asked)) == (503, ATTEMPTS)
    assert json.loads(body)["error"]["code"] == "replica_lost"
    assert (b"retry-after", b"1") in start["headers"]


def test_what_the_cluster_has_no_room_for_is_refused():
    replicas, start, body = relayed((QueueFull("too many"), 0))
    assert (start["status"], len(replicas.asked)) == (429, 1)
    assert json.loads(body)["error"]["code"] == "queue_full"


def test_the_front_refuses_without_asking_a_replica():
    replicas = Replicas()
    replicas.gate = lambda: Gate(build_relay(replicas.ask), ["another-key-of-clients"], max_body=9)
    assert run(replicas, lambda gate: post(gate, KEY, "/v1/completions", BODY))[0] == 401
    assert run(replicas, lambda gate: post(gate, "another-key-of-clients", "/v1/completions", BODY))[0] == 413
    assert not replicas.asked


def test_a_client_that_goes_ends_its_request():
    replicas = Replicas()

    async def work(gate):
        await replicas.replica.start()
        task = asyncio.create_task(post(gate, KEY, "/v1/completions", BODY | {"max_tokens": 80, "n": 9, "seed": 1}))
        loop = replicas.replica.models[0].loop
        while not loop.num_open:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return replicas.open, loop.num_open

    assert run(replicas, work) == (0, 0)


def test_the_page_names_every_argument_of_the_application():
    tree = ast.parse((Path(mb.__file__).parent / "serving" / "ray.py").read_text())  # Ray is not needed to read it
    (arguments,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "Arguments"]
    names = {node.target.id for node in arguments.body if isinstance(node, ast.AnnAssign)}
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    table = page.partition("| argument | default | meaning |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == names


# -- workers -----------------------------------------------------------------------------------------------------------


def fake_ray(*nodes):
    about = [{"Alive": True, "Resources": {"CPU": float(cores), "GPU": float(gpus)}} for cores, gpus in nodes]
    total = {"CPU": sum(cores for cores, _ in nodes)}
    return SimpleNamespace(nodes=lambda: [*about, {"Alive": False}], cluster_resources=lambda: total)


@pytest.mark.parametrize(
    ("nodes", "workers", "use_gpus", "expected"),
    [
        ([(8, 0)], None, True, (1, {"num_cpus": 8})),
        ([(8, 0)], 3, True, (3, {"num_cpus": 2})),
        ([(8, 0), (4, 0)], None, True, (2, {"num_cpus": 4})),
        ([(8, 0), (4, 0)], 3, True, (3, {"num_cpus": 2})),
        ([(8, 4), (8, 4)], None, True, (8, {"num_gpus": 1})),
        ([(8, 4), (8, 4)], 2, True, (2, {"num_gpus": 1})),
        ([(8, 4), (8, 4)], None, False, (2, {"num_cpus": 8})),
    ],
)
def test_workers_share_a_cluster(nodes, workers, use_gpus, expected):
    assert Cluster(fake_ray(*nodes)).share(workers, use_gpus=use_gpus) == expected


def test_more_workers_than_a_cluster_has_room_for_are_refused(tmp_path):
    with pytest.raises(mb.ConfigError, match="--workers 3 is more than this cluster has cores"):
        Cluster(fake_ray((2, 0))).share(3, use_gpus=True)
    with pytest.raises(mb.ConfigError, match="--workers 3 is more than this cluster has GPUs"):
        Cluster(fake_ray((8, 2))).share(3, use_gpus=True)
    with (
        pytest.raises(mb.ConfigError, match="--jobs 3 is more than the 2 cores"),
        Cluster(fake_ray((2, 0))).encoders(tmp_path, 0.0, 3),
    ):
        pass


def test_without_an_address_no_cluster_is_asked():
    with connect(None) as cluster:
        assert cluster is None


def test_other_workers_write_the_same_tokens(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("In the beginning was the word.\n" * 9000)
    tokenizer = TokenizerPlan(mb.Tokenizer.train("byte", ["a"], 300))
    used = []

    @contextmanager
    def threads(folder, validation, jobs):
        encoder = PartEncoder(mb.Tokenizer.from_pretrained(folder), validation)
        with ThreadPoolExecutor(1) as pool:
            yield lambda part: used.append(part.number) or pool.submit(encoder, part)

    for name, workers in (("own", None), ("other", threads)):
        options = {"validation": 0.2, "part_bytes": 2**14, "workers": workers}
        prepare_tokens([str(text)], tmp_path / name, tokenizer=tokenizer, **options)
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / n).iterdir()} for n in ("own", "other"))
    assert first == second
    assert used == list(range(len(used)))
    assert len(used) > 9
