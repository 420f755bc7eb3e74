"""Builds the agent's host package: one .deb and one .rpm that bring all that the agent needs beside Python 3.10.

    python packaging/host/build.py [--architecture amd64|arm64] [--out dist] [--format deb rpm]

Needs pip and the package registry for the libraries' wheels (pinned by requirements.lock), dpkg-deb for the .deb,
rpmbuild for the .rpm (Debian: apt-get install dpkg-dev rpm). Compiled libraries come once for each Python version.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
HOME = Path("usr/lib/eagle-eye")
PORTIONS = ("schema", "agent", "checks", "cli")  # of the namespace package: what a GPU host runs
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
COMPILED = ("msgspec", "psutil")
PURE = ("nvidia-ml-py",)
NAME = "eagle-eye-agent"
CONFIGURATION = "/etc/eagle-eye/agent.toml"
UNIT = f"/usr/lib/systemd/system/{NAME}.service"
SUMMARY = "watches a GPU host and its training processes for Eagle Eye"


class Architecture(NamedTuple):
    """One processor as Debian, RPM and wheels call it."""

    deb: str
    rpm: str


ARCHITECTURES = {
    "amd64": Architecture("amd64", "x86_64"),
    "arm64": Architecture("arm64", "aarch64"),
}


def main() -> int:
    """Build what was asked for; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--architecture", choices=sorted(ARCHITECTURES), default="amd64")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "dist")
    parser.add_argument("--format", nargs="+", choices=["deb", "rpm"], default=["deb", "rpm"])
    args = parser.parse_args()
    builders = {"deb": ("dpkg-deb", deb), "rpm": ("rpmbuild", rpm)}
    for kind in args.format:
        if shutil.which(builders[kind][0]) is None:
            print(f"{builders[kind][0]} is not installed: apt-get install dpkg-dev rpm", file=sys.stderr)
            return 2
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        try:
            stage(tree, ARCHITECTURES[args.architecture])
            for kind in args.format:
                print(builders[kind][1](tree, ARCHITECTURES[args.architecture], args.out, Path(scratch)))
        except subprocess.CalledProcessError as error:
            print(f"{error.cmd[0]} failed: {(error.stderr or b'').decode()[-2000:]}", file=sys.stderr)
            return 1
    return 0


def version() -> str:
    """Return the project's version."""
    found = re.search(r'^version = "([^"]+)"', (REPOSITORY / "pyproject.toml").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("pyproject.toml names no version")
    return found[1]


def stage(tree: Path, architecture: Architecture) -> None:
    """Lay the package's files out under ``tree``."""
    home = tree / HOME
    ours = home / "eagle-eye"
    for portion in PORTIONS:
        source = REPOSITORY / portion / "eagle_eye"
        shutil.copytree(source, ours / "eagle_eye", dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    _describe(ours / f"eagle_eye-{version()}.dist-info")
    _wheels(ours, PURE, "3.10", architecture)
    for python in PYTHONS:
        wanted = (*COMPILED, "tomli") if python == "3.10" else COMPILED
        _wheels(home / f"python{python}", wanted, python, architecture)
    shutil.copy(HERE / "run.py", home)
    _copy(HERE / "eagle-eye", tree / "usr/bin/eagle-eye", 0o755)
    _copy(HERE / "agent.toml", tree / CONFIGURATION.lstrip("/"))
    _copy(REPOSITORY / "packaging/systemd" / f"{NAME}.service", tree / UNIT.lstrip("/"))
    _copy(REPOSITORY / "LICENSE", tree / f"usr/share/doc/{NAME}/copyright")


def deb(tree: Path, architecture: Architecture, out: Path, scratch: Path) -> Path:
    """Return the .deb made of the tree."""
    root = scratch / "deb"
    shutil.copytree(tree, root, symlinks=True)
    control = root / "DEBIAN"
    control.mkdir()
    (control / "control").write_text(
        f"Package: {NAME}\n"
        f"Version: {version()}\n"
        f"Architecture: {architecture.deb}\n"
        "Maintainer: The Eagle Eye authors <eagle-eye@localhost>\n"
        "Section: admin\n"
        "Priority: optional\n"
        "Depends: python3 (>= 3.10)\n"
        f"Description: {SUMMARY}\n"
        " A small daemon for every GPU host. It reads the driver, the kernel's log, the\n"
        " network's ports and the training processes, and reports to the server.\n"
    )
    (control / "conffiles").write_text(f"{CONFIGURATION}\n")
    for name, text in _scripts().items():
        (control / name).write_text(f"#!/bin/sh\nset -e\n{text}")
        (control / name).chmod(0o755)
    package = out / f"{NAME}_{version()}_{architecture.deb}.deb"
    _run("dpkg-deb", "--root-owner-group", "-Zxz", "--build", str(root), str(package))
    return package


def rpm(tree: Path, architecture: Architecture, out: Path, scratch: Path) -> Path:
    """Return the .rpm made of the tree."""
    top = scratch / "rpm"
    spec = top / f"{NAME}.spec"
    top.mkdir()
    scripts = _scripts()
    spec.write_text(
        f"Name: {NAME}\nVersion: {version()}\nRelease: 1\nSummary: {SUMMARY}\nLicense: Apache-2.0\n"
        # A newer Python beside the system's is as good: RHEL 9 has 3.9 and offers 3.12.
        "Requires: (python3 >= 3.10 or python3.12 or python3.11 or python3.13)\n"
        "AutoReqProv: no\n%global debug_package %{nil}\n%global __os_install_post %{nil}\n"
        "%global _build_id_links none\n"
        "%description\nA small daemon for every GPU host. It reads the driver, the kernel's log, the network's\n"
        "ports and the training processes, and reports to the server.\n"
        f"%install\ncp -a {tree}/. %{{buildroot}}/\n"
        f"%post\n{scripts['postinst']}%preun\n{scripts['prerm']}"
        f"%files\n%defattr(-,root,root)\n/{HOME}\n/usr/bin/eagle-eye\n"
        f"{UNIT}\n/usr/share/doc/{NAME}\n"
        f"%config(noreplace) {CONFIGURATION}\n"
    )
    macros = {
        "_topdir": str(top),
        "_rpmdir": str(out),
        "_build_name_fmt": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
    }
    defines = [word for name, value in macros.items() for word in ("--define", f"{name} {value}")]
    _run("rpmbuild", "-bb", "--quiet", "--target", architecture.rpm, *defines, str(spec))
    return out / f"{NAME}-{version()}-1.{architecture.rpm}.rpm"


def _scripts() -> dict[str, str]:
    """Return what runs after installing and before removing; neither starts a service that nobody configured."""
    systemd = "[ -d /run/systemd/system ]"
    return {
        # Python's own cache is made here, for the Python that will be used, and removed with the package. An upgrade
        # leaves a running agent as it was enabled; the frames in its spool survive the restart.
        "postinst": "for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10; do\n"
        '    python=$(command -v "$name") || continue\n'
        f'    libraries=/{HOME}/python$("$python" -I -S -c \'import sys; print("%d.%d" % sys.version_info[:2])\')\n'
        '    [ -d "$libraries" ] || continue\n'
        f'    "$python" -I -m compileall -q /{HOME}/eagle-eye "$libraries" || true\n'
        "    break\ndone\n"
        f"if {systemd}; then systemctl daemon-reload; systemctl try-restart {NAME}.service || true; fi\n",
        # dpkg says "remove" or "upgrade", rpm how many versions stay.
        "prerm": f'if {systemd} && {{ [ "$1" = remove ] || [ "$1" = 0 ]; }}; then\n'
        f"    systemctl disable --now {NAME}.service || true\nfi\n"
        f"find /{HOME} -name __pycache__ -prune -exec rm -rf {{}} +\n",
    }


def _wheels(folder: Path, names: tuple[str, ...], python: str, architecture: Architecture) -> None:
    """Install the locked versions of the libraries, as wheels for that Python and processor."""
    lock = (REPOSITORY / "requirements.lock").read_text()
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", lock, re.MULTILINE))
    platforms = [f"{tag}_{architecture.rpm}" for tag in ("manylinux2014", "manylinux_2_17", "manylinux_2_28")]
    _run(
        *(sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"),
        *("--no-compile", "--no-deps"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--target={folder}"),
        *(f"--platform={platform}" for platform in platforms),
        *(f"{name}=={locked[name]}" for name in names),
    )
    shutil.rmtree(folder / "bin", ignore_errors=True)
    for tests in folder.glob("*/tests"):
        shutil.rmtree(tests)


def _describe(folder: Path) -> None:
    """Say which version this is to whoever asks importlib."""
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: eagle-eye\nVersion: {version()}\n")


def _copy(source: Path, target: Path, mode: int = 0o644) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(mode)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


if __name__ == "__main__":
    raise SystemExit(main())
