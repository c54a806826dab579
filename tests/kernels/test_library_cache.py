"""The stored kernels: whose file is loaded, a damaged file, no HOME, and a compiler that does not work."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from processes import run_code

from monoblock.data.corpora import load
from monoblock.kernels.cpu import library
from monoblock.training import resume_state

NAME = "kernels-0.so"
SOMEBODY = 12_345  # a user id that is not ours


@pytest.fixture
def cache(monkeypatch, tmp_path):
    """An empty cache folder, and no other folder that could hold libraries."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path / "tmp"))
    return tmp_path / "cache"


def store(content=b"machine code"):
    folder = library.make_library_folder()
    file = folder / "output"
    file.write_bytes(content)
    library.store_library(file, folder / NAME)
    return folder / NAME


def test_a_stored_library_is_found_and_only_this_user_can_write_it(cache):
    assert library.find_library(NAME) is None
    previous = os.umask(0)
    try:
        stored = store()
    finally:
        os.umask(previous)
    assert stored == cache / "monoblock" / "kernels" / NAME
    assert library.find_library(NAME) == stored
    for path in (stored, stored.parent, Path(f"{stored}.sha256")):
        assert not path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    assert {path.name for path in stored.parent.iterdir()} == {NAME, f"{NAME}.sha256"}


@pytest.mark.parametrize(
    "damage", ["truncated", "one byte", "no digest", "digest not text", "a folder", "a link", "a pipe"]
)
def test_a_damaged_library_is_not_loaded_and_can_be_stored_again(cache, tmp_path, damage):
    stored = store(b"x" * 5000)
    digest = Path(f"{stored}.sha256")
    if damage == "truncated":
        os.truncate(stored, 1000)
    elif damage == "one byte":
        stored.write_bytes(b"y" + b"x" * 4999)
    elif damage == "no digest":
        digest.unlink()
    elif damage == "digest not text":
        digest.write_bytes(b"\xff" * 64)
    else:
        stored.rename(tmp_path / "elsewhere")
        {"a folder": stored.mkdir, "a pipe": lambda: os.mkfifo(stored)}.get(
            damage, lambda: stored.symlink_to(tmp_path / "elsewhere")
        )()
    assert library.find_library(NAME) is None
    if damage != "a folder":
        assert library.find_library(store().name) == stored


def test_a_library_that_others_can_write_is_not_loaded(cache):
    stored = store()
    for path in (stored, Path(f"{stored}.sha256"), stored.parent):
        mode = path.stat().st_mode
        for others in (0o020, 0o002):
            path.chmod(mode | others)
            assert library.find_library(NAME) is None, (path, others)
        path.chmod(mode)
    assert library.find_library(NAME) == stored
    cache.chmod(0o777)  # anyone can put another folder in its place
    assert library.find_library(NAME) is None
    cache.chmod(0o1777)
    assert library.find_library(NAME) == stored


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_a_library_of_another_user_in_a_shared_cache_folder_is_not_loaded(cache, level):
    """Level 0 is the file, the others are the folders around it."""
    stored = store()
    os.chown([stored, *stored.parents][level], SOMEBODY, -1)
    assert library.find_library(NAME) is None
    again = store()  # in a folder of this user
    assert (SOMEBODY in {path.stat().st_uid for path in (again, *again.parents)}) is False
    assert library.find_library(NAME) == again


def test_without_any_folder_the_library_lives_as_long_as_the_process(monkeypatch, cache, tmp_path):
    (tmp_path / "tmp").mkdir(exist_ok=True)
    for folder in (cache, tmp_path / "tmp" / f"monoblock-{os.geteuid()}"):
        folder.write_text("a file where the folder should be")
    library._temporary_folder.cache_clear()
    folder = library.make_library_folder()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert folder == library.make_library_folder()


def test_no_home_is_no_error(monkeypatch, tmp_path):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.setattr(Path, "expanduser", lambda path: no_home())
    monkeypatch.setattr(library.tempfile, "gettempdir", lambda: str(tmp_path))
    assert library.make_library_folder() == tmp_path / f"monoblock-{os.geteuid()}" / "kernels"
    assert load._cache_path("shakespeare", None).is_relative_to(tmp_path)


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert library.make_library_folder() == tmp_path / ".cache" / "monoblock" / "kernels"


# -- the real kernels -------------------------------------------------------------------------------------------------

LOAD = (
    "from monoblock.kernels.cpu import library; status = library.load_kernels(); print(status.is_ready, status.reason)"
)
FAKE_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo 1 && exit 0
while [ "$1" != -o ]; do shift; done
echo built >> {log}
cp {library} "$2"
"""


def load_in_another_process(**environment):
    done = run_code(LOAD, environment=environment, timeout=300)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.strip()


@pytest.fixture
def compiler(monkeypatch, tmp_path):
    """A compiler that copies the real kernels, in the folder bin; the file `log` has a line for each time."""
    if not library.load_kernels().is_ready:
        pytest.skip(library.load_kernels().reason)
    real = library._build_library(library.find_compiler())
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "g++"
    program.write_text(FAKE_COMPILER.format(log=tmp_path / "log", library=real))
    program.chmod(0o755)
    return {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "XDG_CACHE_HOME": str(tmp_path / "cache")}


def test_a_truncated_library_is_built_again_and_does_not_end_the_process(compiler, tmp_path):
    assert load_in_another_process(**compiler) == "True"
    assert load_in_another_process(**compiler) == "True"
    assert (tmp_path / "log").read_text() == "built\n"
    [stored] = (tmp_path / "cache").rglob("*.so")
    os.truncate(stored, stored.stat().st_size // 2)
    assert load_in_another_process(**compiler) == "True"
    assert (tmp_path / "log").read_text() == "built\nbuilt\n"


def test_processes_that_start_together_compile_once(compiler, tmp_path):
    program = tmp_path / "bin" / "g++"
    program.write_text(program.read_text().replace("cp ", "sleep 1\ncp "))
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda _: load_in_another_process(**compiler), range(2)))
    assert results == ["True", "True"]
    assert (tmp_path / "log").read_text() == "built\n"


def test_several_threads_load_the_kernels_once(compiler, tmp_path):
    """functools.cache alone may run a function once for each thread."""
    script = (
        "import threading\nfrom concurrent.futures import ThreadPoolExecutor\n"
        "from monoblock.kernels.cpu import library\nbarrier = threading.Barrier(8)\n"
        "def load(_):\n    barrier.wait()\n    return library.load_kernels().is_ready\n"
        "print(list(ThreadPoolExecutor(8).map(load, range(8))) == [True] * 8)"
    )
    done = run_code(script, environment=compiler, timeout=300)
    assert done.stdout.strip() == "True", done.stderr
    assert (tmp_path / "log").read_text() == "built\n"


@pytest.mark.parametrize("script", ["exit 1", "kill -9 $$", "printf '\\377'; exit 1"])
def test_a_compiler_that_cannot_tell_its_version_ends_no_training(monkeypatch, tmp_path, script):
    program = tmp_path / "g++"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr(library.shutil, "which", lambda name: str(program))
    status = library.load_kernels.__wrapped__()
    assert not status.is_ready
    assert "\n" not in status.reason
    monkeypatch.setattr(library, "kernels_id", library.kernels_id.__wrapped__)
    assert library.kernels_id() == ""
    assert resume_state.environment(resume_state.torch.device("cpu"), False, 1)["kernels"] == ""  # as a save asks
