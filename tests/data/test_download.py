"""Downloads: complete and checked, or not there at all. The server runs in this process."""

import contextlib
import dataclasses
import hashlib
import http.server
import threading

import pytest

from monoblock.data.corpora.load import CORPORA, corpus_location, load_corpus
from monoblock.data.download import download
from monoblock.errors import FileError

CONTENT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()
LIMIT = len(CONTENT)


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path == "/endless":
            self.end_headers()
            with contextlib.suppress(OSError):  # until the client hangs up
                while True:
                    self.wfile.write(CONTENT)
            return
        if self.path != "/unsized":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if self.path == "/broken" else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["/file", "/unsized"])
def test_a_file_is_downloaded_once_and_leaves_no_temporary_file(server, tmp_path, path):
    target = tmp_path / "a" / "b.txt"
    for _ in range(2):
        assert download(server.url + path, SHA256, target, max_bytes=LIMIT) == target
        assert target.read_bytes() == CONTENT
    assert server.requests == [path]
    assert [path.name for path in target.parent.iterdir()] == ["b.txt"]


@pytest.mark.parametrize(
    ("path", "sha256", "message"),
    [
        ("/file", "0" * 64, "but 000000000000… was expected, so it was deleted"),
        ("/broken", SHA256, "broke off after 152,500 of 305,000 bytes"),
        ("/missing", SHA256, "Not Found.*--data"),
    ],
)
def test_a_wrong_or_incomplete_file_is_never_kept(server, tmp_path, path, sha256, message):
    with pytest.raises(FileError, match=message) as caught:
        download(server.url + path, sha256, tmp_path / "b.txt", max_bytes=LIMIT)
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["/file", "/unsized"])
def test_a_file_larger_than_expected_is_not_downloaded(server, tmp_path, path):
    with pytest.raises(
        FileError, match=r"is larger than the 304,999 bytes expected, so it was not downloaded; [^\n]*$"
    ):
        download(server.url + path, SHA256, tmp_path / "b.txt", max_bytes=LIMIT - 1)
    assert not any(tmp_path.iterdir())


def test_the_limit_holds_without_an_end_in_sight(server, tmp_path):
    with pytest.raises(FileError, match="is larger than the 1,000 bytes"):
        download(server.url + "/endless", SHA256, tmp_path / "b.txt", max_bytes=1000)
    assert not any(tmp_path.iterdir())


def test_every_corpus_from_the_web_has_a_checksum_and_a_limit():
    specs = [spec for spec in CORPORA.values() if spec.url is not None]
    assert specs
    assert all(len(spec.sha256) == 64 and spec.max_bytes > 0 for spec in specs)


def test_a_refused_connection_raises_one_line(tmp_path):
    with pytest.raises(FileError, match="cannot be downloaded"):
        download("http://127.0.0.1:9/file", SHA256, tmp_path / "b.txt", max_bytes=LIMIT)
    assert not any(tmp_path.iterdir())


def test_a_damaged_copy_is_deleted_with_a_message(server, tmp_path):
    target = tmp_path / "b.txt"
    target.write_bytes(b"half")
    with pytest.raises(FileError, match="deleted, so try again"):
        download(server.url + "/file", SHA256, target, max_bytes=LIMIT)
    assert not target.exists()
    assert download(server.url + "/file", SHA256, target, max_bytes=LIMIT).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_raises_one_line(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        download(server.url + "/file", SHA256, tmp_path / "file" / "b.txt", max_bytes=LIMIT)


def test_a_corpus_from_the_web_is_cached(server, tmp_path, monkeypatch):
    row = dataclasses.replace(CORPORA["shakespeare"], url=server.url + "/file", sha256=SHA256)
    monkeypatch.setitem(CORPORA, "shakespeare", row)
    assert corpus_location("shakespeare", cache=tmp_path) is None
    train = load_corpus("shakespeare", "train", cache=tmp_path)
    valid = load_corpus("shakespeare", "valid", cache=tmp_path)
    assert train.rows[0] + valid.rows[0] == CONTENT.decode()
    assert server.requests == ["/file"]
    assert corpus_location("shakespeare", cache=tmp_path) == "cache"
