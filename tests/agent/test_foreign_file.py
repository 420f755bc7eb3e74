"""Files that somebody else has named: whatever they lead to, only the expected is opened."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle_eye.agent.foreign_files import (
    LINKS_MAX,
    SHOWN_CHARS_MAX,
    NotTheirs,
    open_file,
    open_output,
    open_pipe,
    shown,
    stat_of,
)

OWN = os.geteuid()
SOMEBODY = 12_345
as_root = pytest.mark.skipif(OWN != 0, reason="only root can make files of other users, and devices")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A container's root folder; beside it lies a file of the host."""
    (tmp_path / "secret").write_bytes(b"the host's")
    (tmp_path / "container").mkdir()
    return tmp_path / "container"


def content(path: Path, root: Path = Path("/"), user: int | None = OWN) -> bytes:
    descriptor = open_file(path, root, user)
    try:
        return os.read(descriptor, 1_000)
    finally:
        os.close(descriptor)


def folder_link(root: Path) -> Path:
    (root / "dumps").symlink_to(root.parent)
    return root / "dumps/secret"


def folder_link_upwards(root: Path) -> Path:
    (root / "dumps").symlink_to("../../../../../../../../" + str(root.parent))
    return root / "dumps/secret"


def link_within_a_link(root: Path) -> Path:
    (root / "a").symlink_to("b/..")
    (root / "b").symlink_to("/../..")
    return root / "a/secret"


def dots(root: Path) -> Path:
    return root / "../secret"


def link_of_proc(root: Path) -> Path:
    (root / "dumps").symlink_to(f"/proc/{os.getpid()}/root{root.parent}")
    return root / "dumps/secret"


@pytest.mark.parametrize("way", [folder_link, folder_link_upwards, link_within_a_link, dots, link_of_proc])
def test_no_way_leads_out_of_the_root_folder(root: Path, way: Callable[[Path], Path]) -> None:
    path = way(root)
    with pytest.raises(FileNotFoundError):
        open_file(path, root, OWN)
    with pytest.raises(FileNotFoundError):
        stat_of(path, root)


def test_links_are_followed_as_the_process_would_follow_them(root: Path) -> None:
    (root / "real").mkdir()
    (root / "real/log").write_bytes(b"abc")
    (root / "absolute").symlink_to("/real")
    (root / "real/up").symlink_to("../absolute/log")
    assert content(root / "absolute/log", root) == b"abc"
    assert content(root / "real/up", root) == b"abc"
    assert stat_of(root / "real/up", root).st_size == 3


def test_a_folder_exchanged_for_a_link_on_the_way_changes_nothing(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "dumps").mkdir()
    (root / "dumps/secret").write_bytes(b"its own")
    real, opened = os.open, []

    def exchanging(path: str, flags: int, *rest: int, dir_fd: int | None = None) -> int:
        if path == "secret":  # the folder has just been entered
            (root / "dumps").rename(root / "away")
            (root / "dumps").symlink_to(root.parent)
        opened.append(path)
        return real(path, flags, *rest, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", exchanging)
    assert content(root / "dumps/secret", root) == b"its own"
    assert "secret" in opened


def test_a_ring_of_links_ends(root: Path) -> None:
    (root / "a").symlink_to("b")
    (root / "b").symlink_to("a")
    with pytest.raises(NotTheirs, match=f"{LINKS_MAX} symbolic links"):
        open_file(root / "a", root, OWN)


def test_a_path_outside_the_root_folder_is_refused(root: Path) -> None:
    with pytest.raises(NotTheirs, match="expected a path below"):
        open_file(root.parent / "secret", root, OWN)


def fifo(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("devices may not be made here")


@pytest.mark.parametrize("make", [fifo, Path.mkdir, pytest.param(device, marks=as_root)])
def test_what_is_no_regular_file_is_refused_without_being_opened(
    root: Path, make: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(root / "log")
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, flags, **rest: real(path, flags | _only_named(flags), **rest))
    with pytest.raises(NotTheirs, match="log: not a regular file"):
        open_file(root / "log", root, OWN)


def _only_named(flags: int) -> int:
    assert flags & os.O_PATH
    return 0


@as_root
def test_a_file_of_another_user_is_refused(root: Path) -> None:
    (root / "log").write_bytes(b"abc")
    os.chown(root / "log", SOMEBODY, SOMEBODY)
    assert content(root / "log", root, SOMEBODY) == b"abc"
    with pytest.raises(NotTheirs, match=f"log: belongs to user {SOMEBODY}, the process to user {OWN}"):
        open_file(root / "log", root, OWN)


@as_root
def test_where_no_process_names_the_file_a_strangers_link_leads_to_the_strangers_files_only(tmp_path: Path) -> None:
    for name, owner in (("roots", 0), ("theirs", SOMEBODY)):
        (tmp_path / name).write_bytes(b"abc")
        os.chown(tmp_path / name, owner, owner)
        (tmp_path / f"their_link_to_{name}").symlink_to(tmp_path / name)
        os.chown(tmp_path / f"their_link_to_{name}", SOMEBODY, SOMEBODY, follow_symlinks=False)
        (tmp_path / f"root_link_to_{name}").symlink_to(tmp_path / name)
    for name in ("root_link_to_theirs", "root_link_to_roots", "their_link_to_theirs"):
        assert content(tmp_path / name, user=None) == b"abc"
    with pytest.raises(NotTheirs, match=f"a link on the way belongs to user {SOMEBODY}, the file to user 0"):
        open_file(tmp_path / "their_link_to_roots")


def test_another_file_than_the_one_that_was_found_is_not_opened(root: Path) -> None:
    (root / "log").write_bytes(b"abc")
    found = (root / "log").stat()
    os.close(open_file(root / "log", identity=(found.st_dev, found.st_ino)))
    (root / "next").write_bytes(b"other")
    (root / "next").rename(root / "log")
    with pytest.raises(OSError, match="exchanged while it was opened"):
        open_file(root / "log", identity=(found.st_dev, found.st_ino))


def test_only_a_pipe_is_written_to(root: Path) -> None:
    (root / "file").write_bytes(b"keep")
    with pytest.raises(NotTheirs, match="file: not a named pipe"):
        open_pipe(root / "file", root, OWN)
    assert (root / "file").read_bytes() == b"keep"


def test_a_pipe_is_written_to_without_waiting_for_a_reader(root: Path) -> None:
    os.mkfifo(root / "pipe")
    with pytest.raises(OSError) as raised:  # noqa: PT011 - the number is asked for below
        open_pipe(root / "pipe", root, OWN)
    assert raised.value.errno == errno.ENXIO
    reader = os.open(root / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    writer = open_pipe(root / "pipe", root, OWN)
    assert os.write(writer, b"1") == 1
    assert not os.get_blocking(writer)
    os.close(reader)
    os.close(writer)


@as_root
def test_a_pipe_of_another_user_is_not_written_to(root: Path) -> None:
    os.mkfifo(root / "pipe")
    os.chown(root / "pipe", SOMEBODY, SOMEBODY)
    with pytest.raises(NotTheirs, match=f"pipe: belongs to user {SOMEBODY}"):
        open_pipe(root / "pipe", root, OWN)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A file of this user alone."""
    (tmp_path / "log").write_bytes(b"abc")
    (tmp_path / "log").chmod(0o600)
    return tmp_path / "log"


def output_of_a_stranger(path: Path, flags: int) -> bytes:
    """Let a process of SOMEBODY have the file as its stdout, opened so; return what the agent reads of it."""
    descriptor = os.open(path, flags)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=descriptor, user=SOMEBODY) as process:
        os.close(descriptor)
        try:
            opened = open_output(Path(f"/proc/{process.pid}/fd/1"), SOMEBODY)
            try:
                return os.read(opened, 100)
            finally:
                os.close(opened)
        finally:
            process.kill()


@as_root
def test_a_file_that_a_process_was_given_to_write_to_is_read(log: Path) -> None:
    assert output_of_a_stranger(log, os.O_WRONLY | os.O_APPEND) == b"abc"


@as_root
@pytest.mark.parametrize("flags", [os.O_PATH, os.O_RDONLY])
def test_a_descriptor_alone_is_no_right_to_have_a_file_read(log: Path, flags: int) -> None:
    with pytest.raises(NotTheirs, match=f"belongs to user {OWN}, the process to user {SOMEBODY}"):
        output_of_a_stranger(log, flags)


def test_an_output_of_the_processes_own_user_is_read(log: Path) -> None:
    with log.open("rb") as file:
        descriptor = open_output(Path(f"/proc/self/fd/{file.fileno()}"), OWN)
        assert os.read(descriptor, 100) == b"abc"
        os.close(descriptor)


def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "log").write_bytes(b"abc")
    (root / "tmp").mkdir()
    os.mkfifo(root / "pipe")
    before = len(list(Path("/proc/self/fd").iterdir()))
    content(root / "tmp/../log", root)
    stat_of(root / "pipe", root)
    for name in ("tmp/none", "pipe", "tmp"):
        with pytest.raises(OSError, match=r"none|regular"):
            open_file(root / name, root, OWN)
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_path_in_a_message_is_short_and_printable() -> None:
    assert shown("/tmp/x") == "/tmp/x"
    assert shown("/tmp/\udcff\n\x1b[31m") == r"'/tmp/\udcff\n\x1b[31m'"
    assert len(shown("/" + "x" * 5_000)) == SHOWN_CHARS_MAX


PARTS = st.sampled_from(["..", ".", "", "file", "folder", "link", "upwards", "secret"]) | st.text(max_size=4)


@settings(max_examples=300)
@given(st.lists(PARTS, max_size=8))
def test_whatever_a_path_holds_it_is_refused_or_leads_to_a_file_below_the_root_folder(
    tmp_path_factory: pytest.TempPathFactory, parts: list[str]
) -> None:
    root = tmp_path_factory.getbasetemp() / "any/root"
    if not root.exists():
        (root / "folder").mkdir(parents=True)
        (root / "file").write_bytes(b"abc")
        (root / "folder/link").symlink_to("../../../../folder/../file")
        (root / "folder/upwards").symlink_to("/../..")
        (root / "../secret").write_bytes(b"the host's")
    try:
        assert content(root / "/".join(parts).lstrip("/"), root) == b"abc"
    except OSError:
        return
