"""Lays a package's files out as they will lie on the host, with its libraries.

Those are wheels in requirements.lock's versions, unpacked, for Pythons that need not be here.
"""

from __future__ import annotations

import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterable
from email.message import Message
from email.parser import HeaderParser
from pathlib import Path, PurePosixPath

import tomllib
from manual import manual
from recipes import MAINTAINER, REPOSITORY, Architecture, Recipe, epoch_s, files, version

# What no program of ours reads: tests of libraries, headers, sources and archives for compiling against them.
LEFT_OUT = re.compile(r"example\.py$|[^/]+/tests/|pyarrow/(include|src)/|[^/]+\.data/(scripts|data|headers)/|.+\.a$")
_OLDER_THAN = re.compile(r"(?P<requirement>[^;]+); *python_version *< *'(?P<python>[\d.]+)'")
_NORMAL = re.compile(r"[-_.]+")


class LibraryError(Exception):
    """Libraries are not to be had as requirements.lock says; the message says which and why."""


def download(recipe: Recipe, python: str, architecture: Architecture, folder: Path) -> list[Path]:
    """Return the wheels that the recipe needs on that Python. Raises LibraryError."""
    platforms = [f"{tag}_{architecture.rpm}" for tag in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    _run(
        *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"),
        *("--only-binary=:all:", "--implementation=cp", f"--python-version={python}", f"--dest={folder}"),
        *(f"--platform={platform}" for platform in platforms),
        *("--constraint", str(REPOSITORY / "requirements.lock")),
        *_requirements(recipe, python),
    )
    wheels = sorted(folder.glob("*.whl"))
    locked = _locked()
    unknown = [wheel.name for wheel in wheels if name_and_version(wheel) not in locked]
    if unknown:
        raise LibraryError(f"these are not in requirements.lock: {', '.join(unknown)}")
    return wheels


def unpack(wheel: Path, folder: Path) -> None:
    """Lay a wheel's files out in the folder, but for those that nobody reads. Raises LibraryError."""
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            path = PurePosixPath(re.sub(r"^[^/]+\.data/(purelib|platlib)/", "", member.filename))
            if member.is_dir() or LEFT_OUT.match(member.filename):
                continue
            if path.is_absolute() or ".." in path.parts:
                raise LibraryError(f"{wheel.name} wants to write {member.filename}")
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(archive.read(member))


def fits_all(wheel: Path) -> bool:
    """Return whether all our Pythons can use the wheel on its processor."""
    return wheel.name.endswith("-none-any.whl") or "-abi3-" in wheel.name


def name_and_version(wheel: Path) -> tuple[str, str]:
    """Return the wheel's distribution, spelled one way, and its version."""
    name, version = wheel.name.split("-")[:2]
    return _NORMAL.sub("-", name).lower(), version


def _requirements(recipe: Recipe, python: str) -> list[str]:
    """Return what pyproject.toml asks for. pip would read its markers for the Python that runs it."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    asked = [*project["dependencies"]]
    for extra in recipe.extras:
        asked += project["optional-dependencies"][extra]
    wanted = []
    for requirement in asked:
        conditional = _OLDER_THAN.fullmatch(requirement)
        if conditional is None:
            wanted.append(requirement)
        elif _number(python) < _number(conditional["python"]):
            wanted.append(conditional["requirement"].strip())
    return sorted(set(wanted))


def _locked() -> set[tuple[str, str]]:
    lock = (REPOSITORY / "requirements.lock").read_text()
    found = re.findall(r"^([A-Za-z0-9_.-]+)==(\S+)", lock, re.MULTILINE)
    return {(_NORMAL.sub("-", name).lower(), version) for name, version in found}


def _number(python: str) -> tuple[int, ...]:
    return tuple(map(int, python.split(".")))


def _run(*command: str) -> None:
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise LibraryError(f"pip failed: {done.stderr[-2000:]}")


HERE = Path(__file__).parent
PROGRAMS = {"eagle-eye": 0o755, "compile": 0o755, "find-python": 0o644}
UNITS = Path("usr/lib/systemd/system")
DECISIONS = REPOSITORY / "docs" / "decisions"  # for contributors


def stage(tree: Path, recipe: Recipe, pythons: Iterable[str], architecture: Architecture) -> None:
    """Lay the files out below ``tree``, all with the same time and modes that say nothing of the builder's.

    Raises LibraryError, and what reading and writing raises.
    """
    home = tree / recipe.home
    library = home / "lib"
    for portion in recipe.portions:
        for file in files(f"{portion}/eagle_eye"):
            if not _is_for_contributors(file):
                _copy(file, library / file.relative_to(REPOSITORY / portion))
    _describe(tree / recipe.home / _description())
    brought: set[tuple[str, str]] = set()
    for python in pythons:
        packages = _environment(home / f"python{python}", python)
        with tempfile.TemporaryDirectory() as downloads:
            for wheel in download(recipe, python, architecture, Path(downloads)):
                if not fits_all(wheel):
                    unpack(wheel, packages)
                elif name_and_version(wheel) not in brought:
                    unpack(wheel, library)
                brought.add(name_and_version(wheel))
    for program in PROGRAMS:
        _copy(HERE / program, home / program)
    _copy(HERE / recipe.configuration, tree / "etc/eagle-eye" / recipe.configuration)
    for unit in recipe.units:
        # Two packages on one host have one command, of the one that can do more; a service is its own package's.
        text = (REPOSITORY / "packaging/systemd" / unit).read_text()
        _write(tree / UNITS / unit, text.replace("/usr/bin/eagle-eye", f"/{recipe.home}/eagle-eye").encode())
    _document(tree, recipe)
    _settle(tree, recipe)


def _is_for_contributors(file: Path) -> bool:
    """Whether the file says how to work on its room; what lies in ``vendor`` says whose code it is."""
    return file.name == "README.md" and file.parent.name != "vendor"


def _environment(folder: Path, python: str) -> Path:
    """Return the folder of packages of a virtual environment for the host's Python, so that children find them, too."""
    packages = folder / f"lib/python{python}/site-packages"
    packages.mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "bin/python3").symlink_to(f"/usr/bin/python{python}")
    (folder / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = false\n")
    (packages / "eagle-eye.pth").write_text("../../../../lib\n")
    return packages


def _document(tree: Path, recipe: Recipe) -> None:
    documents = tree / "usr/share/doc" / recipe.name
    _write(documents / "copyright", _copyright(tree / recipe.home).encode())
    _copy(REPOSITORY / "CHANGELOG.md", documents / "NEWS.md")
    for page in files("docs"):
        if not page.is_relative_to(DECISIONS):
            _copy(page, documents / page.relative_to(REPOSITORY))
    _write(tree / f"usr/share/man/man1/{recipe.name}.1.gz", _zipped(manual(recipe.name, recipe.portions, version())))


def debian_changelog(recipe: Recipe, debian_version: str) -> bytes:
    """Return what Debian's tools expect to find of a package's history; NEWS.md beside it tells it."""
    day = time.strftime("%a, %d %b %Y %H:%M:%S +0000", time.gmtime(epoch_s()))
    return _zipped(
        f"{recipe.name} ({debian_version}) stable; urgency=medium\n\n  * See NEWS.md.\n\n -- {MAINTAINER}  {day}\n"
    )


def _copyright(home: Path) -> str:
    """Return our licence and those that the libraries say are theirs; their texts lie in their dist-info folders."""
    lines = [
        "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/",
        "Upstream-Name: eagle-eye",
        "",
        "Files: *",
        "Copyright: 2026 The Eagle Eye authors",
        "License: Apache-2.0",
    ]
    for metadata in sorted(home.rglob("*.dist-info/METADATA"), key=lambda path: (path.parent.name.lower(), str(path))):
        said = HeaderParser().parsestr(metadata.read_text(encoding="utf-8"))
        if said["Name"] == "eagle-eye":
            continue
        where = "/" / metadata.parent.relative_to(home.parents[2])
        lines += [
            "",
            f"Files: {where}",
            f"Copyright: the authors of {said['Name']} {said['Version']}",
            f"License: {_licence(said)}",
        ]
    lines += ["", "License: Apache-2.0", " Debian has its text in /usr/share/common-licenses/Apache-2.0; it is also in"]
    return "\n".join([*lines, f" /{home.relative_to(home.parents[2])}/{_description()}/licenses/LICENSE.", ""])


def _licence(said: Message) -> str:
    """Return the licence's short name. Raises ValueError where a library names none: somebody has to look."""
    if said["License-Expression"]:
        return str(said["License-Expression"])
    if (name := (said["License"] or "").strip()) and "\n" not in name and name.upper() != "UNKNOWN":
        return str(name)
    for classifier in said.get_all("Classifier", []):
        if classifier.startswith("License ::"):
            return str(classifier.rpartition("::")[2].strip())
    raise ValueError(f"{said['Name']} {said['Version']} names no licence in its metadata")


def _description() -> str:
    return f"lib/eagle_eye-{version()}.dist-info"


def _describe(folder: Path) -> None:
    """Say which version this is to whoever asks importlib, and under which licence."""
    _copy(REPOSITORY / "LICENSE", folder / "licenses/LICENSE")
    _write(folder / "METADATA", f"Metadata-Version: 2.1\nName: eagle-eye\nVersion: {version()}\n".encode())


def _settle(tree: Path, recipe: Recipe) -> None:
    """Give every file the time of the release and a mode that depends on nothing but what it is."""
    programs = {tree / recipe.home / name for name, mode in PROGRAMS.items() if mode == 0o755}
    configuration = tree / "etc/eagle-eye" / recipe.configuration
    when = epoch_s()
    for path in [tree, *tree.rglob("*")]:
        if path.is_symlink():
            os.utime(path, (when, when), follow_symlinks=False)
            continue
        mode = 0o755 if path.is_dir() or path in programs else 0o644
        path.chmod(recipe.configuration_mode if path == configuration else mode)
        os.utime(path, (when, when))


def _zipped(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


def _copy(source: Path, target: Path) -> None:
    _write(target, source.read_bytes())


def _write(target: Path, content: bytes) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
