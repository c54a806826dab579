"""Downloads: whole, checked and in place, or not there at all.  The server is on this machine."""

import hashlib
import http.server
import threading

import pytest

from monoblock.data import corpora
from monoblock.data.download import fetch
from monoblock.errors import FileError

CONTENT = b"First Citizen:\nBefore we proceed any further, hear me speak.\n" * 5000
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class Answers(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.asked.append(self.path)
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        if self.path != "/unsized":
            self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: len(CONTENT) // 2] if self.path == "/broken" else CONTENT)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.asked = []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("path", ["/file", "/unsized"])
def test_a_file_is_fetched_once_and_lies_alone_in_its_place(server, tmp_path, path):
    place = tmp_path / "a" / "b.txt"
    for _ in range(2):
        assert fetch(server.url + path, SHA256, place) == place
        assert place.read_bytes() == CONTENT
    assert server.asked == [path]
    assert [one.name for one in place.parent.iterdir()] == ["b.txt"]


@pytest.mark.parametrize(
    ("path", "sha256", "said"),
    [
        ("/file", "0" * 64, "and not 000000000000…; it was deleted"),
        ("/broken", SHA256, "broke off after 152,500 of 305,000 bytes"),
        ("/missing", SHA256, "Not Found.*--data"),
    ],
)
def test_what_is_not_the_file_never_gets_there(server, tmp_path, path, sha256, said):
    with pytest.raises(FileError, match=said) as caught:
        fetch(server.url + path, sha256, tmp_path / "b.txt")
    assert "\n" not in str(caught.value)
    assert not any(tmp_path.iterdir())


def test_nobody_there_is_one_line(tmp_path):
    with pytest.raises(FileError, match="cannot be downloaded"):
        fetch("http://127.0.0.1:9/file", SHA256, tmp_path / "b.txt")
    assert not any(tmp_path.iterdir())


def test_a_damaged_copy_is_deleted_and_says_so(server, tmp_path):
    place = tmp_path / "b.txt"
    place.write_bytes(b"half")
    with pytest.raises(FileError, match="deleted, so run this again"):
        fetch(server.url + "/file", SHA256, place)
    assert not place.exists()
    assert fetch(server.url + "/file", SHA256, place).read_bytes() == CONTENT


def test_a_folder_that_cannot_be_written_is_one_line(server, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot be written"):
        fetch(server.url + "/file", SHA256, tmp_path / "file" / "b.txt")


def test_a_corpus_of_the_web_comes_through_the_cache(server, tmp_path, monkeypatch):
    import dataclasses

    row = dataclasses.replace(corpora.CORPORA["shakespeare"], url=server.url + "/file", sha256=SHA256)
    monkeypatch.setitem(corpora.CORPORA, "shakespeare", row)
    assert corpora.place_of("shakespeare", cache=tmp_path) is None
    train = corpora.load("shakespeare", "train", cache=tmp_path)
    valid = corpora.load("shakespeare", "valid", cache=tmp_path)
    assert train.rows[0] + valid.rows[0] == CONTENT.decode()
    assert server.asked == ["/file"]
    assert corpora.place_of("shakespeare", cache=tmp_path) == "cache"
