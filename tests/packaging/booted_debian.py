"""An empty Debian with systemd as its first process and a shell in it, in namespaces of its own: without a network."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

MIRROR = os.environ.get("EAGLE_EYE_TEST_DEBIAN_MIRROR", "")  # "": debootstrap's own
TOOLS = ("debootstrap", "dpkg-deb", "ip", "nsenter", "unshare")
# What any installed Debian has and debootstrap's smallest has not, and what README.md asks for.
INCLUDED = "adduser,dbus,python3,python3-venv,systemd,systemd-sysv"
BOOT_S = 120.0
UP = ("running", "degraded")  # degraded: a unit that wants to change this machine's kernel
T = TypeVar("T")
ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "DEBIAN_FRONTEND": "noninteractive",
}
# cgroup2 alone, whatever the machine has: systemd takes it for the unified hierarchy.
BOOT = r"""
set -e
root=$1 name=$2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t sysfs sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs tmpfs "$root/run"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 devpts "$root/dev/pts"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
for device in "null 1 3" "zero 1 5" "full 1 7" "random 1 8" "urandom 1 9" "tty 5 0" "kmsg 1 11"; do
  set -- $device
  mknod -m 666 "$root/dev/$1" c "$2" "$3"
done
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
ip link set lo up
hostname "$(cat "$root/etc/hostname")"
cd "$root"
mkdir old
pivot_root . old
umount --lazy /old
rmdir /old
export container=other
exec /lib/systemd/systemd --log-target=console
"""


JOIN = 'echo $$ > "$0/cgroup.procs" && exec "$@"'  # before its namespace is made: it becomes that one's root


class Done(NamedTuple):
    """What came of a command: its exit code, and all that it said."""

    code: int
    said: str


class Shell:
    """One shell on the host, in which one command after the other is typed: folder and variables stay."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(
            command, env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._typed = 0

    def type(self, command: str, within_s: float) -> Done:
        """Return what came of it; a question on its way is answered with y. Raises TimeoutError, with what it said."""
        self._typed += 1
        mark = f"--typed-{os.getpid()}-{self._typed}--"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{{ {command}\n}} <<< y\nprintf '\\n%s %d\\n' {mark} $?\n".encode())
        self._process.stdin.flush()
        said = b""
        until_s = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while f"\n{mark} ".encode() not in said or not said.endswith(b"\n"):
                if not selector.select(max(0.0, until_s - time.monotonic())):
                    raise TimeoutError(f"{command}: not done within {within_s:.0f} s: {said.decode(errors='replace')}")
                part = os.read(self._process.stdout.fileno(), 1 << 16)
                if not part:
                    raise TimeoutError(f"{command}: the shell has ended: {said.decode(errors='replace')}")
                said += part
        text, _, code = said.decode(errors="replace").rpartition(f"\n{mark} ")
        return Done(int(code), text)

    def close(self) -> None:
        """End the shell."""
        self._process.kill()
        self._process.communicate()


class Debian:
    """A booted host, its files below ``root``."""

    def __init__(self, root: Path, first: int) -> None:
        self.root = root
        self._enter = ["nsenter", "--target", str(first), "--all", "--root", "--wd"]
        self.shell = Shell([*self._enter, "bash", "--norc"])


def missing() -> str:
    """Return what this machine lacks for such a host, "" if nothing."""
    if os.geteuid() != 0:
        return "root"
    gone = [tool for tool in TOOLS if shutil.which(tool) is None]
    return gone[0] if gone else "" if _unified() else "a cgroup2 hierarchy"


def _unified() -> Path | None:
    mounts = (line.split() for line in Path("/proc/mounts").read_text(encoding="ascii").splitlines())
    return next((Path(words[1]) for words in mounts if words[2] == "cgroup2"), None)


@contextmanager
def booted(release: str, folder: Path, name: str) -> Iterator[Debian]:
    """Give a Debian of that release, all its services up; neither a process nor a file of it is left afterwards."""
    root = folder / release
    group = Path(_unified() or "") / f"eagle-eye-test-{os.getpid()}-{release}"
    try:
        _run("debootstrap", "--variant=minbase", f"--include={INCLUDED}", release, str(root), *filter(None, [MIRROR]))
        (root / "etc/hostname").write_text(f"{name}\n")
        (root / "etc/hosts").write_text(f"127.0.0.1 localhost {name}\n")
        group.mkdir()
        with _first_process(root, group, name) as first:
            debian = Debian(root, first)
            try:
                _until(lambda: debian.shell.type("systemctl is-system-running", BOOT_S).said.strip() in UP)
                yield debian
            finally:
                debian.shell.close()
    finally:
        with contextlib.suppress(OSError):
            _remove(group)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _first_process(root: Path, group: Path, name: str) -> Iterator[int]:
    """Boot, and give the id of systemd's process; with it everything in its namespace ends."""
    separate = ["--pid", "--mount", "--uts", "--ipc", "--net", "--cgroup", "--propagation", "private"]
    unshare = ["unshare", *separate, "--fork", "--kill-child", "bash", "-c", BOOT, "", str(root), name]
    log = root.parent / f"{root.name}.log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            ["sh", "-c", JOIN, str(group), *unshare],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as outer,
    ):
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")

        def booted() -> int:
            assert outer.poll() is None, log.read_text()
            first = int((children.read_text().split() or ["0"])[0])
            return first if first and Path(f"/proc/{first}/comm").read_text().strip() == "systemd" else 0

        try:
            yield _until(booted)
        finally:
            outer.send_signal(signal.SIGKILL)


def _remove(group: Path) -> None:
    """Remove a control group and those below it, once their processes are gone."""
    _until(lambda: not any(each.read_text() for each in group.rglob("cgroup.procs")))
    for below in sorted((each for each in group.rglob("*") if each.is_dir()), reverse=True):
        below.rmdir()
    group.rmdir()


def _until(holds: Callable[[], T], within_s: float = BOOT_S) -> T:
    until_s = time.monotonic() + within_s
    while not (found := holds()):
        assert time.monotonic() < until_s, "it did not happen in time"
        time.sleep(0.2)
    return found


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, f"{command}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
