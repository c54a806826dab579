"""`data prepare`: the ids of the tokenizer, the same bytes for any number of processes and after any interruption."""

import contextlib
import gzip
import hashlib
import io
import itertools
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from monoblock.data import prepare
from monoblock.data.prepare import TokenizerPlan, lock_folder, prepare_tokens
from monoblock.data.text_parts import find_sources, iterate_parts
from monoblock.data.token_folder import MANIFEST_FILE, PROGRESS_FILE, TokenDataset, read_manifest, verify_files
from monoblock.errors import ConfigError, FileError, InputError
from monoblock.tokenizers.tokenizer import Tokenizer

WORDS = ["and", "the", "king", "said", "unto", "them", "Zürich", "it's", "42", "中文", "don't", "end."]
PART = 997  # bytes: many parts, of a prime size


def random_text(seed, length=3000):
    rng = random.Random(seed)
    return "".join(
        rng.choice(WORDS) + rng.choice([" ", " ", " ", "\n", "\n\n", "  ", "   ", ".\n"]) for _ in range(length)
    )


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train("bpe", [random_text(99)], 400)


@pytest.fixture
def documents():
    rng = random.Random(5)
    return [random_text(seed, rng.randrange(60)).strip() for seed in range(300)] + [random_text(7, 2000)]


@pytest.fixture
def files(tmp_path, documents):
    """A text file and a .jsonl file, some of whose lines are longer than a part."""
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf" + random_text(1).encode())
    rows = "".join(json.dumps({"text": text}, ensure_ascii=bool(n % 2)) + "\n" for n, text in enumerate(documents))
    (tmp_path / "b.jsonl").write_text(rows + "\n")
    return [str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")]


def options(tokenizer, /, **changes):
    return {
        "tokenizer": TokenizerPlan(tokenizer),
        "part_bytes": PART,
        "shard_tokens": 2011,
        "validation": 0.1,
    } | changes


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def read_documents(folder, split="train"):
    tokens = TokenDataset(folder, split)
    verify_files(folder, tokens.files)
    return [tokens.read(*map(int, ends)).tolist() for ends in itertools.pairwise(tokens.document_offsets)]


# -- the content -----------------------------------------------------------------------------------------------------


def test_the_tokens_are_those_of_whole_documents(tmp_path, files, documents, tokenizer):
    prepare_tokens(files, tmp_path / "t", **options(tokenizer, validation=0.0))
    texts = [random_text(1), *documents]
    assert read_documents(tmp_path / "t") == [[*tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    manifest = read_manifest(tmp_path / "t")
    assert manifest.fingerprint == Tokenizer.from_pretrained(tmp_path / "t").fingerprint == tokenizer.fingerprint
    assert manifest.train.bytes == sum(len(text.encode()) for text in texts)
    assert {shard.count for shard in manifest.train.shards[:-1]} == {2011}
    assert [source.name for source in manifest.settings.sources] == files
    assert set(digests(tmp_path / "t")) == {
        "manifest.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "train-documents.bin",
        *(f"train-{number:05d}.bin" for number in range(len(manifest.train.shards))),
    }


def test_every_document_is_in_one_split(tmp_path, files, documents, tokenizer):
    prepare_tokens(files[1:], tmp_path / "t", **options(tokenizer))
    train, valid = (read_documents(tmp_path / "t", split) for split in ("train", "valid"))
    expected = sorted([*tokenizer.encode(text), tokenizer.eos_id] for text in documents)
    assert sorted(train + valid) == expected
    assert 10 <= len(valid) <= 60


def test_pieces_of_a_running_text_are_held_out(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("monoblock.data.prepare.PIECE_LENGTH", 100)
    (tmp_path / "a.txt").write_text(random_text(1))
    prepare_tokens([str(tmp_path / "a.txt")], tmp_path / "t", **options(tokenizer))
    train, valid = (read_documents(tmp_path / "t", split) for split in ("train", "valid"))
    assert all(document[-1] == tokenizer.eos_id for document in train + valid)
    texts = [tokenizer.decode(document[:-1]) for document in train + valid]
    assert sum(map(len, texts)) == len(random_text(1))
    assert all(text in random_text(1) for text in texts)
    assert 0.04 < sum(map(len, valid)) / sum(map(len, train + valid)) < 0.2


def test_lines_are_documents_if_asked_for(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("one\r\n\ntwo words\n three")
    prepare_tokens([str(tmp_path / "a.txt")], tmp_path / "t", **options(tokenizer, documents="line", validation=0.0))
    expected = [[*tokenizer.encode(text), tokenizer.eos_id] for text in ("one", "two words", " three")]
    assert read_documents(tmp_path / "t") == expected


def test_a_tokenizer_is_trained_on_a_sample(tmp_path, files):
    plan = TokenizerPlan(None, "bpe", 290)
    result = prepare_tokens(files, tmp_path / "t", tokenizer=plan, validation=0.0)
    tokenizer = Tokenizer.from_pretrained(tmp_path / "t")
    assert tokenizer.vocab_size == result.manifest.vocab == 290
    assert tokenizer.decode(read_documents(tmp_path / "t")[0][:-1]) == random_text(1)


@pytest.mark.parametrize("part_bytes", [100, 997, 10**6])
def test_parts_are_the_text_and_do_not_depend_on_compression(tmp_path, files, part_bytes):
    for name in files:
        raw = Path(name).read_bytes()
        with gzip.open(f"{name}.gz", "wb") as file:
            file.write(raw)
        plain, compressed = (
            list(iterate_parts(find_sources([path]), "file", part_bytes)) for path in (name, f"{name}.gz")
        )
        assert b"".join(part.read() for part in plain) == raw
        assert [part.read() for part in plain] == [part.read() for part in compressed]
        assert [part.is_last for part in plain] == [part.is_last for part in compressed]
        assert len(plain) > len(raw) // part_bytes // 3
        for part in plain:
            part.read().decode()  # no character is cut


def test_folders_compressed_files_and_standard_input(tmp_path, files, tokenizer, monkeypatch):
    prepare_tokens(files, tmp_path / "t", **options(tokenizer))
    (tmp_path / "folder/sub").mkdir(parents=True)
    (tmp_path / "folder/a.txt").write_bytes((tmp_path / "a.txt").read_bytes())
    with gzip.open(tmp_path / "folder/sub/b.jsonl.gz", "wb") as file:
        file.write((tmp_path / "b.jsonl").read_bytes())
    (tmp_path / "folder/ignored.pdf").write_bytes(b"%PDF")
    prepare_tokens([str(tmp_path / "folder")], tmp_path / "u", **options(tokenizer))
    first, second = (digests(tmp_path / name) for name in "tu")
    assert {**first, MANIFEST_FILE: ""} == {**second, MANIFEST_FILE: ""}
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO((tmp_path / "a.txt").read_bytes())))
    prepare_tokens(["-"], tmp_path / "v", **options(tokenizer, validation=0.0))
    assert read_documents(tmp_path / "v") == [[*tokenizer.encode(random_text(1)), tokenizer.eos_id]]


# -- processes and interruptions -------------------------------------------------------------------------------------


def test_the_bytes_do_not_depend_on_the_number_of_processes(tmp_path, files, tokenizer):
    for jobs in (1, 2, 3):
        prepare_tokens(files, tmp_path / str(jobs), **options(tokenizer, jobs=jobs))
    assert digests(tmp_path / "1") == digests(tmp_path / "2") == digests(tmp_path / "3")


def interrupt_after(count):
    remaining = [count]

    def on_progress(size):
        remaining[0] -= 1
        if not remaining[0]:
            raise KeyboardInterrupt

    return on_progress


@pytest.mark.parametrize("sync_seconds", [0.0, 1e9], ids=["synced", "never synced"])
def test_an_interrupted_preparation_goes_on_and_gives_the_same_bytes(
    tmp_path, files, tokenizer, monkeypatch, sync_seconds
):
    prepare_tokens(files, tmp_path / "whole", **options(tokenizer))
    monkeypatch.setattr(prepare, "SYNC_SECONDS", sync_seconds)
    folder, resumed = tmp_path / "t", []
    for count in (1, 2, 9, 23):
        with pytest.raises(KeyboardInterrupt):
            prepare_tokens(files, folder, **options(tokenizer, on_progress=interrupt_after(count)))
        with pytest.raises(FileError, match="not complete; run the same"):
            TokenDataset(folder)
        for pattern in ("train-0*.bin", "valid-0*.bin", "*-documents.bin"):  # written, but not recorded
            with open(max(folder.glob(pattern)), "ab") as file:
                file.write(b"torn")
        (folder / "train-00099.bin").write_bytes(b"later")
    result = prepare_tokens(files, folder, **options(tokenizer), on_start=lambda total, done: resumed.append(done))
    assert digests(folder) == digests(tmp_path / "whole")
    assert (result.resumed_bytes > 0) == (resumed[0] > 0) == (sync_seconds == 0)


@pytest.mark.parametrize("stage", ["write_manifest", "_finish"])
def test_an_interruption_at_the_end_is_repaired(tmp_path, files, tokenizer, monkeypatch, stage):
    monkeypatch.setattr(prepare, "SYNC_SECONDS", 0.0)
    prepare_tokens(files, tmp_path / "whole", **options(tokenizer, validation=0.0))
    with monkeypatch.context() as patch:
        patch.setattr(prepare, stage, Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare_tokens(files, tmp_path / "t", **options(tokenizer, validation=0.0))
    prepare_tokens(files, tmp_path / "t", **options(tokenizer, validation=0.0))
    assert digests(tmp_path / "t") == digests(tmp_path / "whole")


def test_a_complete_folder_is_left_as_it_is(tmp_path, files, tokenizer):
    prepare_tokens(files, tmp_path / "t", **options(tokenizer))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()}
    assert prepare_tokens(files, tmp_path / "t", **options(tokenizer)).was_complete
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "t").iterdir()} == before


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation": 0.2}, r"another --validation \(0.1, and now 0.2\)"),
        ({"shard_tokens": 99}, r"another --shard-tokens \(2011, and now 99\)"),
        ({"documents": "line"}, "another --documents"),
        ({"tokenizer": TokenizerPlan(None, "bpe", 300)}, "another tokenizer"),
        ("changed", r"a\.txt was changed since then"),
        ("missing", r"b\.jsonl is missing now"),
        ("order", "their order differs"),
    ],
)
def test_other_arguments_are_refused_with_what_differs(tmp_path, files, tokenizer, changes, message, complete):
    done = options(tokenizer) if complete else options(tokenizer, on_progress=interrupt_after(3))
    with contextlib.suppress(KeyboardInterrupt):
        prepare_tokens(files, tmp_path / "t", **done)
    before = digests(tmp_path / "t")
    names = {"missing": files[:1], "order": files[::-1]}.get(changes if isinstance(changes, str) else "", files)
    if changes == "changed":
        (tmp_path / "a.txt").write_text("other text")
    with pytest.raises(ConfigError, match=message) as caught:
        prepare_tokens(names, tmp_path / "t", **options(tokenizer, **(changes if isinstance(changes, dict) else {})))
    assert "\n" not in str(caught.value)
    assert digests(tmp_path / "t") == before


def test_another_text_on_standard_input_is_refused(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "SYNC_SECONDS", 0.0)

    def pipe(text, **changes):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(text.encode())))
        return prepare_tokens(["-"], tmp_path / "t", **options(tokenizer, **changes))

    with pytest.raises(KeyboardInterrupt):
        pipe(random_text(1), on_progress=interrupt_after(5))
    with pytest.raises(FileError, match="standard input is not the one"):
        pipe(random_text(2))
    assert pipe(random_text(1)).resumed_bytes > 4000


def test_a_shard_that_lost_data_is_named(tmp_path, files, tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "SYNC_SECONDS", 0.0)
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer, on_progress=interrupt_after(30)))
    (tmp_path / "t/train-00000.bin").write_bytes(b"")
    with pytest.raises(FileError, match=r"train-00000\.bin is missing or has another size"):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer))


def test_two_processes_do_not_write_the_same_folder(tmp_path, files, tokenizer):
    (tmp_path / "t").mkdir()
    with lock_folder(tmp_path / "t"), pytest.raises(FileError, match="another process"):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer))


# -- bad input -------------------------------------------------------------------------------------------------------


def write_gzip(path, raw):
    path.write_bytes(gzip.compress(raw)[:-9])


BAD_FILES = {
    "bytes.txt": (lambda path: path.write_bytes(b"fine\n" * 500 + b"\xff\xfe\n"), "line 501: a byte is not UTF-8"),
    "bytes.jsonl": (
        lambda path: path.write_bytes(b'{"text": "a"}\n' * 200 + b"\xff\n"),
        "line 201: a byte is not UTF-8",
    ),
    "broken.jsonl": (lambda path: path.write_text('{"text": "a"}\n' * 200 + '{"text"\n'), "line 201: not JSON"),
    "deep.jsonl": (lambda path: path.write_text("[" * 10**5), "line 1: not JSON"),
    "other.jsonl": (lambda path: path.write_text('{"text": "a"}\n{"body": "a"}\n'), 'line 2: no "text"'),
    "half.jsonl": (lambda path: path.write_text('{"text": "\\ud800"}\n'), "line 1: .* surrogate"),
    "cut.txt.gz": (lambda path: write_gzip(path, random_text(1).encode()), "is damaged|cannot be read"),
    "no.txt.gz": (lambda path: path.write_bytes(b"plain"), "is damaged|cannot be read"),
    "file.pdf": (lambda path: path.write_bytes(b"%PDF"), "ends in none of .txt, .jsonl"),
    "gone.txt": (lambda path: None, "there is no file or folder"),
    "empty": (lambda path: path.mkdir(), "has no file that ends in"),
    "twice.txt": (lambda path: path.write_text("a"), "is given twice"),
}


@pytest.mark.parametrize(("name", "jobs"), [*((name, 1) for name in BAD_FILES), ("broken.jsonl", 2), ("cut.txt.gz", 2)])
def test_bad_input_is_one_line_that_names_the_file(tmp_path, tokenizer, name, jobs):
    write, message = BAD_FILES[name]
    write(tmp_path / name)
    names = [str(tmp_path / name)] * (2 if name == "twice.txt" else 1)
    with pytest.raises(FileError, match=message) as caught:
        prepare_tokens(names, tmp_path / "t", **options(tokenizer, jobs=jobs))
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "t" / MANIFEST_FILE).exists()


def test_a_line_that_is_too_long_is_an_error(tmp_path, tokenizer, monkeypatch):
    monkeypatch.setattr("monoblock.data.text_parts.MAX_LINE_BYTES", 5000)
    monkeypatch.setattr("monoblock.data.text_parts.READ_BLOCK", 1000)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a" * 9000}) + "\n")
    with pytest.raises(FileError, match="a line of more than"):
        prepare_tokens([str(tmp_path / "a.jsonl")], tmp_path / "t", **options(tokenizer))


def test_no_text_at_all_is_an_error(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(InputError, match="no tokens"):
        prepare_tokens([str(tmp_path / "a.txt")], tmp_path / "t", **options(tokenizer))
    with pytest.raises(InputError, match="are empty"):
        prepare_tokens([str(tmp_path / "a.txt")], tmp_path / "u", **options(None))
    with pytest.raises(ConfigError, match="give --tokenizer"):
        prepare_tokens(["-"], tmp_path / "v", **options(None))


def test_a_folder_with_other_files_is_not_touched(tmp_path, files, tokenizer):
    (tmp_path / "t").mkdir()
    (tmp_path / "t/thesis.md").write_text("mine")
    with pytest.raises(FileError, match=r"is not empty \(it has thesis\.md\)"):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer))
    assert [path.name for path in (tmp_path / "t").iterdir()] == ["thesis.md"]


def test_a_file_that_grows_meanwhile_is_an_error(tmp_path, files, tokenizer):
    def grow(size):
        with open(files[0], "a") as file:
            file.write("more")

    with pytest.raises(FileError, match="was changed while it was read"):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer, on_progress=grow))
    assert not (tmp_path / "t" / MANIFEST_FILE).exists()


@pytest.mark.parametrize("content", ["", "{}", '{"format": "monoblock-tokens-progress", "next_part": -1}'])
def test_a_damaged_progress_file_is_one_line(tmp_path, files, tokenizer, content):
    with pytest.raises(KeyboardInterrupt):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer, on_progress=interrupt_after(3)))
    (tmp_path / "t" / PROGRESS_FILE).write_text(content)
    if content == "{}":  # all fields have defaults: begin again
        prepare_tokens(files, tmp_path / "t", **options(tokenizer))
        return
    with pytest.raises(FileError, match=r"progress\.json"):
        prepare_tokens(files, tmp_path / "t", **options(tokenizer))


def test_a_vocabulary_of_many_tokens_is_stored_in_four_bytes(tmp_path):
    words = [f"w{number}" for number in range(70_000)]
    (tmp_path / "a.txt").write_text(" ".join(words))
    tokenizer = Tokenizer.train("word", [" ".join(words)], 80_000)
    prepare_tokens([str(tmp_path / "a.txt")], tmp_path / "t", **options(tokenizer, validation=0.0, part_bytes=10**6))
    assert read_manifest(tmp_path / "t").dtype == "uint32"
    ids = read_documents(tmp_path / "t")[0]
    assert max(ids) >= 2**16
    assert np.array_equal(ids[:-1], tokenizer.encode(" ".join(words)))
