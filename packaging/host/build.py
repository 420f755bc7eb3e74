"""Builds the host packages: eagle-eye-agent and eagle-eye-server, each a .deb and an .rpm.

    .venv/bin/python packaging/host/build.py [--package agent server] [--format deb rpm] [--python 3.11 3.12 3.13]
                                             [--architecture amd64|arm64] [--out dist]

Runs in the environment of `make venv`. Needs pip and the package registry for the libraries' wheels (pinned by
requirements.lock), dpkg-deb for a .deb, rpmbuild for an .rpm (Debian: apt-get install dpkg-dev rpm). The agent's
package brings libraries for all Pythons from 3.10 on; the server's are large, so there is one package for each Python.
Built twice from one commit, packages are the same to the byte (SOURCE_DATE_EPOCH, else the commit's time).
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from recipes import (
    ARCHITECTURES,
    HOMEPAGE,
    MAINTAINER,
    RECIPES,
    REPOSITORY,
    SERVER,
    Architecture,
    Recipe,
    epoch_s,
    version,
)
from tree import UNITS, LibraryError, debian_changelog, stage

# A .deb and an .rpm are made of one tree: the same files at the same places, each with its distribution's customs.
#
# Equal trees give equal bytes: times, owners, the order of files and the builder's name are not the builder's.

SCRIPTS = Path(__file__).parent / "scripts"
LINTIAN = Path(__file__).parent / "lintian"  # what it says and is meant so, with the reason
LIBC = "2.28"  # of the oldest system that the libraries' wheels (manylinux_2_28) run on
# What the packages' scripts have update-alternatives make.
ALTERNATIVES = tuple(
    Path(link)
    for link in (
        "/usr/bin/eagle-eye",
        "/usr/share/man/man1/eagle-eye.1.gz",
        "/etc/alternatives/eagle-eye",
        "/etc/alternatives/eagle-eye.1.gz",
    )
)
USER_MARK = "# USER\n"  # stands in postinst where packages with a user of their own have more to do


def deb(tree: Path, recipe: Recipe, python: str, architecture: Architecture, out: Path, scratch: Path) -> Path:
    """Return the .deb made of the tree; ``python`` is the one that it is for, "" for all. Raises CalledProcessError."""
    full = f"{version()}+python{python}" if python else version()
    root = scratch / "deb"
    shutil.copytree(tree, root, symlinks=True)
    documents = root / "usr/share/doc" / recipe.name
    (documents / "changelog.gz").write_bytes(debian_changelog(recipe, full))
    overrides = root / "usr/share/lintian/overrides" / recipe.name
    overrides.parent.mkdir(parents=True)
    shutil.copyfile(LINTIAN / recipe.name, overrides)
    depends = [f"python{python}" if python else f"python3 (>= {recipe.pythons[0]})", f"libc6 (>= {LIBC})"]
    if recipe.user:
        depends.append("adduser")
    size_kib = sum(path.lstat().st_size for path in root.rglob("*") if path.is_file()) // 1024
    sums = _sums(root)
    control = root / "DEBIAN"
    control.mkdir()
    (control / "md5sums").write_text(sums)
    (control / "control").write_text(
        f"Package: {recipe.name}\n"
        f"Version: {full}\n"
        f"Architecture: {architecture.deb}\n"
        f"Maintainer: {MAINTAINER}\n"
        f"Installed-Size: {size_kib}\n"
        f"Depends: {', '.join(depends)}\n"
        "Section: admin\n"
        "Priority: optional\n"
        f"Homepage: {HOMEPAGE}\n"
        f"Description: {recipe.summary}\n" + "".join(f" {line}\n" for line in recipe.description)
    )
    (control / "conffiles").write_text(f"/etc/eagle-eye/{recipe.configuration}\n")
    for name in ("postinst", "prerm", "postrm"):
        text = (SCRIPTS / "deb" / name).read_text()
        user = (SCRIPTS / "deb/postinst-user").read_text() if recipe.user else ""
        (control / name).write_text(f"#!/bin/sh\nset -e\n{_variables(recipe)}{text.replace(USER_MARK, user)}")
    # copytree keeps modes; what was made here must not depend on the builder's umask.
    for path in [root, control, *control.iterdir(), *(root / "usr/share").rglob("*")]:
        path.chmod(0o755 if path.is_dir() or (path.parent == control and path.name.startswith("p")) else 0o644)
    package = out / f"{recipe.name}_{full}_{architecture.deb}.deb"
    # dpkg gives no file a time after SOURCE_DATE_EPOCH. Harder compression saves a tenth and takes four times as long.
    _run("dpkg-deb", "--root-owner-group", "-Zxz", "-z1", "--build", str(root), str(package))
    return package


def rpm(tree: Path, recipe: Recipe, python: str, architecture: Architecture, out: Path, scratch: Path) -> Path:
    """Return the .rpm made of the tree; ``python`` is the one that it is for, "" for all. Raises CalledProcessError."""
    release = f"1.python{python}" if python else "1"
    top = scratch / "rpm"
    top.mkdir()
    spec = top / f"{recipe.name}.spec"
    day = time.strftime("%a %b %d %Y", time.gmtime(epoch_s()))
    spec.write_text(
        f"Name: {recipe.name}\nVersion: {version()}\nRelease: {release}\n"
        f"Summary: {recipe.summary[0].upper()}{recipe.summary[1:]}\n"
        f"License: Apache-2.0\nURL: {HOMEPAGE}\nPackager: {MAINTAINER}\nGroup: System Environment/Daemons\n"
        f"Requires: {_python_for_rpm(recipe, python)}\n"
        "Requires(post): /usr/sbin/update-alternatives\nRequires(postun): /usr/sbin/update-alternatives\n"
        + ("Requires(pre): /usr/sbin/useradd\nRequires(pre): /usr/sbin/groupadd\n" if recipe.user else "")
        + "AutoReqProv: no\n%global debug_package %{nil}\n%global __os_install_post %{nil}\n"
        "%global _build_id_links none\n"
        "%description\n" + "".join(f"{line}\n" for line in recipe.description) + "%prep\n%build\n"
        f"%install\ncp -a {tree}/. %{{buildroot}}/\n"
        + "".join(f"mkdir -p %{{buildroot}}{state}\n" for state in recipe.states if recipe.user)
        + "".join(f"mkdir -p %{{buildroot}}{link.parent}\nln -s - %{{buildroot}}{link}\n" for link in ALTERNATIVES)
        + "".join(f"%{name}\n{text}" for name, text in _scriptlets(recipe).items())
        + f"%files\n%defattr(-,root,root)\n/{recipe.home}\n"
        + "".join(f"/{UNITS / unit}\n" for unit in recipe.units)
        + f"%doc /usr/share/doc/{recipe.name}\n/usr/share/man/man1/{recipe.name}.1.gz\n"
        + "".join(f"%ghost {link}\n" for link in ALTERNATIVES)
        + f"%dir /etc/eagle-eye\n%attr({recipe.configuration_mode:04o},root,{recipe.user or 'root'}) "
        f"%config(noreplace) /etc/eagle-eye/{recipe.configuration}\n"
        + "".join(f"%dir %attr(0700,{recipe.user},{recipe.user}) {state}\n" for state in recipe.states if recipe.user)
        + f"%changelog\n* {day} {MAINTAINER} - {version()}-{release}\n- See NEWS.md.\n"
    )
    macros = {
        "_topdir": str(top),
        "_rpmdir": str(out),
        "_build_name_fmt": "%%{NAME}-%%{VERSION}-%%{RELEASE}.%%{ARCH}.rpm",
        "_buildhost": "localhost",
        "_binary_payload": "w7.zstdio",
        "use_source_date_epoch_as_buildtime": "1",
        "clamp_mtime_to_source_date_epoch": "1",
        "source_date_epoch_from_changelog": "0",
    }
    defines = [word for name, value in macros.items() for word in ("--define", f"{name} {value}")]
    _run("rpmbuild", "-bb", "--quiet", "--target", architecture.rpm, *defines, str(spec))
    return out / f"{recipe.name}-{version()}-{release}.{architecture.rpm}.rpm"


def _sums(root: Path) -> str:
    """Return what dpkg --verify and debsums compare a host's files with; configuration is the administrator's."""
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return "".join(
        f"{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}  {path.relative_to(root)}\n"
        for path in files
        if not path.is_relative_to(root / "etc")
    )


def _python_for_rpm(recipe: Recipe, python: str) -> str:
    """Return the Python required. A newer one beside the system's is as good: RHEL 9 has 3.9 and offers 3.12."""
    if not python:
        newer = " or ".join(f"python{version}" for version in reversed(recipe.pythons))
        return f"(python3 >= {recipe.pythons[0]} or {newer})"
    major, _, minor = python.partition(".")
    return f"(python{python} or (python3 >= {python} with python3 < {major}.{int(minor) + 1}))"


def _scriptlets(recipe: Recipe) -> dict[str, str]:
    names = ("pre", "post", "preun", "postun", "posttrans") if recipe.user else ("post", "preun", "postun", "posttrans")
    return {name: _variables(recipe) + (SCRIPTS / "rpm" / name).read_text() for name in names}


def _variables(recipe: Recipe) -> str:
    return (
        f"name={recipe.name}\nhome=/{recipe.home}\nservice={recipe.service}\nunits='{' '.join(recipe.units)}'\n"
        f"user={recipe.user}\nstates='{' '.join(recipe.states)}'\nconfiguration=/etc/eagle-eye/{recipe.configuration}\n"
        f"priority={recipe.priority}\n"
    )


def _run(*command: str) -> None:
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch_s()), "LC_ALL": "C.UTF-8"}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment)


FORMATS = {"deb": ("dpkg-deb", deb), "rpm": ("rpmbuild", rpm)}
# Debian 12 has 3.11; Ubuntu 24.04 and RHEL 9 and 10 have 3.12; Debian 13 has 3.13.
SERVER_PYTHONS = {"deb": ["3.11", "3.12", "3.13"], "rpm": ["3.12"]}


def main() -> int:
    """Build what was asked for, print each package's path and return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--package", nargs="+", choices=sorted(RECIPES), default=sorted(RECIPES), help="which (both)")
    add("--format", nargs="+", choices=sorted(FORMATS), default=sorted(FORMATS), help="what (both)")
    add("--python", nargs="+", choices=SERVER.pythons, help="server packages for these (of Debian, Ubuntu and RHEL)")
    add("--architecture", choices=sorted(ARCHITECTURES), default="amd64", help="of which processor (amd64)")
    add("--out", type=Path, default=REPOSITORY / "dist", help="folder of the packages (dist)")
    args = parser.parse_args()
    for kind in args.format:
        if shutil.which(FORMATS[kind][0]) is None:
            print(f"{FORMATS[kind][0]} is not installed: apt-get install dpkg-dev rpm", file=sys.stderr)
            return 2
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        for name in args.package:
            for pythons, formats in _variants(name, args.format, args.python):
                _build(name, pythons, formats, args.architecture, args.out)
    except (LibraryError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[0]} failed: {(error.stderr or b'').decode()[-2000:]}", file=sys.stderr)
        return 1
    return 0


def _variants(name: str, formats: list[str], wished: list[str] | None) -> list[tuple[tuple[str, ...], list[str]]]:
    """Return the trees to be laid out: for which Pythons, and what is made of each."""
    recipe = RECIPES[name]
    if not recipe.each_python:
        return [(recipe.pythons, formats)]
    wanted = {kind: wished or SERVER_PYTHONS[kind] for kind in formats}
    return [
        ((python,), kinds)
        for python in recipe.pythons
        if (kinds := [kind for kind in formats if python in wanted[kind]])
    ]


def _build(name: str, pythons: tuple[str, ...], formats: list[str], architecture: str, out: Path) -> None:
    recipe, processor = RECIPES[name], ARCHITECTURES[architecture]
    python = pythons[0] if recipe.each_python else ""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        stage(tree, recipe, pythons, processor)
        for kind in formats:
            print(FORMATS[kind][1](tree, recipe, python, processor, out.resolve(), Path(scratch)), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
