"""Record types are complete before a second thread can decode them, in every program of ours."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from eagle_eye.cli.main import COMMANDS

ROOT = Path(__file__).parents[2]
CALL = "prepare_record_types"
SERVERS = [
    "eagle_eye.server.command",
    "eagle_eye.agent.command",
    "eagle_eye.orchestrators.launch.command",
    "eagle_eye.orchestrators.orchestrate.service",
    "eagle_eye.checkpoint.store",
    "eagle_eye.client",
]
# Values for all record types that a program has loaded, made in a process of its own: to describe a type completes it.
SAMPLES = """
import importlib, sys
import msgspec
from msgspec import inspect

def below(kind):
    for derived in kind.__subclasses__():
        yield derived
        yield from below(derived)

def sample(kind, depth=0):
    match kind:
        case inspect.StructType():
            tag = {kind.tag_field: kind.tag} if kind.tag_field else {}
            taken = [one for one in kind.fields if depth < 3 or one.required]
            fields = [(one.encode_name, sample(one.type, depth + 1)) for one in taken]
            return [*tag.values(), *(value for _, value in fields)] if kind.array_like else {**tag, **dict(fields)}
        case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
            return [sample(kind.item_type, depth + 1)] if depth < 3 else []
        case inspect.TupleType():
            return [sample(one, depth + 1) for one in kind.item_types]
        case inspect.DictType():
            return {str(sample(kind.key_type)): sample(kind.value_type, depth + 1)} if depth < 3 else {}
        case inspect.UnionType():
            return sample(max(kind.types, key=lambda one: isinstance(one, inspect.StructType)), depth + 1)
        case inspect.LiteralType():
            return kind.values[0]
        case inspect.IntType():
            return 1
        case inspect.FloatType():
            return 0.5
        case inspect.BoolType():
            return True
        case inspect.StrType():
            return "a"
        case _:
            return None

importlib.import_module(sys.argv[1])
found = {f"{one.__module__}:{one.__qualname__}": sample(inspect.type_info(one)) for one in below(msgspec.Struct)}
sys.stdout.buffer.write(msgspec.json.encode(found))
"""
# One thread decodes each type first, outer ones before their parts; once it is at the annotations of a second type, the
# others decode as well. Some samples break a rule of their type: to be refused is as good.
DECODE = """
import contextlib, importlib, sys, threading
import msgspec
from eagle_eye.schema.record_types import prepare_record_types

importlib.import_module(sys.argv[1])
samples = msgspec.json.decode(open(sys.argv[2], "rb").read(), type=dict[str, msgspec.Raw])
kinds = []
for name, raw in samples.items():
    module, _, path = name.partition(":")
    kind = getattr(sys.modules[module], path, None)  # None: made by a function
    if kind is not None:
        kinds.append((kind, raw))
if sys.argv[3] == "prepared":
    prepare_record_types()

together, seen = threading.Barrier(4), []
def second_type(frame, event, _):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        seen.append(frame)
        if len(seen) == 2:
            together.wait()
            together.wait()  # the others have decoded it
def decode(kind, raw):
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.json.decode(raw, type=kind)
def first():
    for kind, raw in reversed(kinds):
        seen.clear()
        sys.setprofile(second_type)
        decode(kind, raw)
        sys.setprofile(None)
        if len(seen) < 2:
            together.wait()
            together.wait()
def other():
    for kind, raw in reversed(kinds):
        together.wait()
        decode(kind, raw)
        together.wait()
threads = [threading.Thread(target=work, daemon=True) for work in (first, other, other, other)]
for one in threads:
    one.start()
for one in threads:
    one.join()
sys.stdout.write(str(len(kinds)))
"""


@pytest.mark.parametrize("module", SERVERS)
def test_threads_may_decode_any_type_first_at_once(module: str, tmp_path: Path) -> None:
    made = subprocess.run([sys.executable, "-c", SAMPLES, module], check=False, capture_output=True, timeout=60)
    assert made.returncode == 0, made.stderr.decode()
    samples = tmp_path / "samples"
    samples.write_bytes(made.stdout)
    command = [sys.executable, "-c", DECODE, module, str(samples), "prepared"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 15


@cache
def _modules() -> dict[str, Path]:
    found = {}
    for file in ROOT.glob("*/eagle_eye/*/**/*.py"):
        parts = file.relative_to(ROOT).with_suffix("").parts[1:]
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def _named(statement: ast.Import | ast.ImportFrom) -> set[str]:
    """Return the modules of ours that the statement loads, with their packages."""
    names = [one.name for one in statement.names]
    if isinstance(statement, ast.ImportFrom):
        names = [f"{statement.module}.{name}" for name in names]
    parts = [name.split(".") for name in names]
    return {".".join(part[:n]) for part in parts for n in range(2, len(part) + 1)} & set(_modules())


class _Module:
    """Which modules of ours one of them loads with itself, and which its functions load ``late``."""

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        self.defines = "msgspec.Struct" in text
        self.program = 'if __name__ == "__main__":' in text
        self.prepares = False
        self.loads: set[str] = set()
        self.late: list[tuple[str, bool, set[str]]] = []
        self._read(ast.parse(text))

    def _read(self, tree: ast.AST) -> None:
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self.loads |= _named(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                inside = [one for one in ast.walk(node) if isinstance(one, ast.Import | ast.ImportFrom)]
                if named := set().union(*map(_named, inside)):
                    self.late.append((node.name, _calls(node), named))
            elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            else:
                self.prepares = self.prepares or (not isinstance(node, ast.ClassDef) and _calls(node))
                self._read(node)


def _calls(tree: ast.AST) -> bool:
    return any(isinstance(one, ast.Call) and ast.unparse(one.func) == CALL for one in ast.walk(tree))


@cache
def _module(name: str) -> _Module:
    return _Module(_modules()[name])


def _loaded(names: set[str]) -> set[str]:
    seen: set[str] = set()
    todo = list(names)
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += _module(name).loads
    return seen


def _unprepared(program: str) -> Iterator[str]:
    """Yield the functions that bring record types into the program after it has prepared those it has."""
    first = {".".join(program.split(".")[:n]) for n in range(2, program.count(".") + 2)} & set(_modules())
    at_start = _loaded(first)
    whole = set(at_start)
    todo = list(at_start)
    while todo:
        name = todo.pop()
        for function, calls, named in _module(name).late:
            new = _loaded(named) - at_start
            todo += new - whole
            whole |= new
            if any(_module(one).defines for one in new) and not calls and not any(_module(n).prepares for n in named):
                yield f"{name}.{function}"


# Jobs of a user's, whose libraries prepare what they bring.
TRAINING = {"eagle_eye.demo.train", "eagle_eye.demo.pipeline_train"}
PROGRAMS = sorted({command.module.partition(":")[0] for command in COMMANDS})


@pytest.mark.parametrize("program", PROGRAMS)
def test_late_imports_prepare_the_types_that_they_bring(program: str) -> None:
    assert sorted(set(_unprepared(program))) == []


def test_every_program_prepares_its_record_types() -> None:
    programs = {name for name in _modules() if _module(name).program} - TRAINING - {"eagle_eye.cli.main"}
    programs = {name for name in programs if any(_module(one).defines for one in _loaded({name}))}
    assert "eagle_eye.orchestrators.launch.runner" in programs
    assert [name for name in sorted(programs) if not _module(name).prepares] == []
