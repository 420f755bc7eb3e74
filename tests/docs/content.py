"""Blocks that are no commands, given to what reads them: loaders, structs, Prometheus's own tools, signatures."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import tomllib
import yaml

from eagle_eye.agent import config as agent_config
from eagle_eye.agent.evidence.requests import _Request as EvidenceRequest
from eagle_eye.agent.hook import Training, attach
from eagle_eye.agent.node_check import _Request as NodeCheckRequest
from eagle_eye.orchestrators.orchestrate import settings
from eagle_eye.orchestrators.orchestrate.settings import KINDS
from eagle_eye.schema.action import ActionRequest, JobUpdate
from eagle_eye.schema.configuration import ConfigurationError
from eagle_eye.server import config as server_config
from eagle_eye.server.backtest.policy_cases import read_cases
from eagle_eye.server.backtest.trace import Label
from tests.docs.pages import Block

# The struct that reads or writes a JSON block, by keys that no other has; in an answer to frames, each request's.
STRUCTS: tuple[tuple[set[str], type[msgspec.Struct]], ...] = (
    ({"action_id", "report_to"}, ActionRequest),
    ({"state", "ranks"}, JobUpdate),
    ({"start", "end", "expect"}, Label),
    ({"kind", "gemm_s"}, NodeCheckRequest),
    ({"kind", "bytes_max"}, EvidenceRequest),
)


NOT_READ = {"kind"}  # says which struct it is


def check_toml(block: Block, folder: Path) -> str:
    """Return "" where the agent, the server, a subscriber or the policy's cases take the file; else what they said."""
    try:
        table = tomllib.loads(block.text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    file = folder / "block.toml"
    file.write_text(re.sub(r"/etc/eagle-eye|/var/lib/[\w-]+", str(folder), block.text), encoding="utf-8")
    loaders: dict[str, Callable[[], object]] = {
        "server": lambda: server_config.load(file, {}, {}),
        "agent": lambda: agent_config.read(file, {}, {}),
        "policy cases": lambda: read_cases(file),
    }
    for kind in KINDS:
        if kind.name in table or ("webhook_url" in table and not any(each.name in table for each in KINDS)):
            loaders[kind.name] = partial(settings.read, kind, ["--config", str(file)], {})
    said = []
    for name, load in loaders.items():
        try:
            load()
        except (ConfigurationError, msgspec.ValidationError, ValueError, OSError) as error:
            if f"{folder}/" in str(error) and "cannot be read" in str(error):
                return ""  # all its keys are right, and the reader's files are not here
            said.append(f"{name}: {error}")
        else:
            return ""
    return "\n".join(said)


def check_json(block: Block) -> str:
    """Return "" where the block is JSON and its struct takes it with no key left over, else what is wrong."""
    try:
        reported = json.loads(block.text)
    except json.JSONDecodeError as error:
        return str(error)
    if block.mark.startswith("run by "):
        return ""
    for each in reported["requests"] if isinstance(reported, dict) and "watermark" in reported else [reported]:
        struct = next((struct for keys, struct in STRUCTS if isinstance(each, dict) and keys <= set(each)), None)
        if struct is None:
            return (
                "nothing reads it: STRUCTS in tests/docs/content.py says what does, <!-- run by TEST --> who tries it"
            )
        if unknown := set(each) - {field.encode_name for field in msgspec.structs.fields(struct)} - NOT_READ:
            return f"{struct.__name__} has no {sorted(unknown)}"
        try:
            msgspec.convert(each, struct)
        except msgspec.ValidationError as error:
            return str(error)
    return ""


def check_yaml(block: Block, folder: Path) -> str:
    """Return "" where the YAML parses and the tool that it is for takes it, where that is installed."""
    try:
        table: Any = yaml.safe_load(block.text)
    except yaml.YAMLError as error:
        return str(error)
    keys = set(table) if isinstance(table, dict) else set()
    file = folder / "block.yml"
    tool: list[str] = []
    text = re.sub(r"/etc/(prometheus|alertmanager|eagle-eye)/", f"{folder}/", block.text)
    for name in re.findall(rf"{folder}/([\w.-]+)", text):
        (folder / name).touch()
    if keys & {"remote_write", "scrape_configs", "rule_files", "storage"}:
        tool = ["promtool", "check", "config", str(file)]
        text = re.sub(r"^storage:.*out_of_order.*$", "", text, flags=re.MULTILINE) or "{}"
    elif "route" in keys:
        tool = ["amtool", "check-config", str(file)]
        if "receivers" not in keys:
            names = sorted(set(re.findall(r"receiver: (\w+)", text)))
            text += "\nreceivers:\n" + "".join(f"  - name: {name}\n" for name in names)
    if tool and shutil.which(tool[0]):
        file.write_text(text, encoding="utf-8")
        done = subprocess.run(tool, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stdout + done.stderr
    return ""


def check_python(block: Block) -> Iterator[str]:
    """Yield what is wrong: syntax, names of ours that do not exist, arguments that the training hook does not take."""
    parts = [block.text]
    try:
        ast.parse(textwrap.dedent(block.text))
    except SyntaxError:
        parts = re.split(r"^ *\.\.\.$", block.text, flags=re.MULTILINE)  # an excerpt: what is between is the reader's
    for part in parts:
        try:
            tree = ast.parse(textwrap.dedent(part.strip("\n")))
        except SyntaxError as error:
            yield str(error)
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("eagle_eye"):
                yield from _missing(str(node.module), [alias.name for alias in node.names])
            elif isinstance(node, ast.Call):
                yield from _not_taken(node)


def _missing(module: str, names: list[str]) -> Iterator[str]:
    """Yield the names that a module of ours does not define; it is not imported: some need a training framework."""
    found = importlib.util.find_spec(module)
    if found is None or found.origin is None:
        yield f"there is no module {module}"
        return
    tree = ast.parse(Path(found.origin).read_text(encoding="utf-8"))
    defined = {node.name for node in ast.walk(tree) if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    defined |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    defined |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    yield from (f"{module} has no {name}" for name in names if name not in defined)


def _not_taken(call: ast.Call) -> Iterator[str]:
    name = ast.unparse(call.func)
    owner, _, method = name.rpartition(".")
    called = attach if name == "attach" else getattr(Training, method, "") if owner.endswith("training") else None
    if called == "":
        yield f"the training hook has no {method}"
    elif callable(called):
        taken = inspect.signature(called).parameters
        yield from (f"{name} takes no {each.arg}" for each in call.keywords if each.arg and each.arg not in taken)
