from __future__ import annotations

import argparse
import io
import json
import logging
import re
from pathlib import Path

import pytest

from eagle_eye.orchestrators import command_line
from eagle_eye.orchestrators.launch import command
from eagle_eye.orchestrators.launch.coordinator import LauncherMemory, MemoryFile
from eagle_eye.orchestrators.launch.logs import Output
from eagle_eye.orchestrators.launch.state import LauncherNodes, State
from eagle_eye.orchestrators.protocol import OrchestratorError
from eagle_eye.schema.configuration import ConfigurationError


def parse(*words: str, job: str = "j", nnodes: str = "2", nodes: str = "n1,n2,n3") -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(["--job", job, "--nnodes", nnodes, "--nodes", nodes, *words])


def test_a_whole_command_line() -> None:
    arguments = parse("--exec", "ssh -o 'BatchMode yes' {node}", "--env", "A=x-{node}-{index}",
                      "--nproc-per-node", "8", "--", "-m", "train", "--lr", "1e-3")  # fmt: skip
    job = command.read_job(arguments)
    assert job.command == ("-m", "train", "--lr", "1e-3")
    assert job.exec_words == ("ssh", "-o", "BatchMode yes", "{node}")
    assert job.on_node(job.env["A"], "n3") == "x-n3-2"
    assert job.ranks_per_node == 8
    assert command.read_rules(arguments).fleet == LauncherNodes(("n1", "n2", "n3"), 2, 2)


def test_shrinking_is_asked_for_with_a_range() -> None:
    assert command.read_rules(parse("--", "x.py", nnodes="1:3")).fleet == LauncherNodes(("n1", "n2", "n3"), 1, 3)


@pytest.mark.parametrize(
    ("words", "changes", "message"),
    [
        ((), {}, "training command is missing"),
        (("--", "--flag"), {}, "expected a script or -m"),
        (("--", "x.py"), {"nnodes": "4"}, "--nnodes 4"),
        (("--", "x.py"), {"nnodes": "3:2"}, "--nnodes 3:2"),
        (("--", "x.py"), {"nnodes": "0"}, "--nnodes 0"),
        (("--", "x.py"), {"nnodes": "two"}, "expected N or MIN:N"),
        (("--", "x.py"), {"nodes": "n1,-oProxyCommand=reboot"}, "is no node name"),
        (("--", "x.py"), {"nodes": "n1,n1"}, "named twice"),
        (("--", "x.py"), {"job": "../x"}, "--job"),
        (("--env", "A", "--", "x.py"), {}, "--env"),
        (("--exec", "ssh '", "--", "x.py"), {}, "--exec"),
        (("--server", "ftp://x", "--", "x.py"), {}, "--server"),
        (("--listen", "x", "--", "x.py"), {}, "--listen"),
        (("--token-file", "/nowhere", "--", "x.py"), {}, "--token-file"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_flag(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], changes: dict[str, str], message: str
) -> None:
    assert command.run(parse("--state-dir", str(tmp_path), *words, **changes)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert message in lines[0]


def test_what_a_launcher_remembers_belongs_to_one_launcher_and_one_job(tmp_path: Path) -> None:
    first = MemoryFile(tmp_path, "j")
    assert first.memory == LauncherMemory("j", launch=first.memory.launch)
    first.keep(State(attempt=4, excluded=frozenset({"n2"})))
    with pytest.raises(OrchestratorError, match="another launcher"):
        MemoryFile(tmp_path, "j")
    first.close()
    second = MemoryFile(tmp_path, "j")
    assert second.memory == LauncherMemory("j", 4, ["n2"], phase="gathering", launch=first.memory.launch)
    second.close()
    with pytest.raises(OrchestratorError, match="belongs to job 'j'"):
        MemoryFile(tmp_path, "k")
    (tmp_path / "launch.json").write_text("{")
    with pytest.raises(OrchestratorError, match="repair or remove"):
        MemoryFile(tmp_path, "j")


def test_output_for_programs_and_for_people() -> None:
    for_programs, for_people = io.StringIO(), io.StringIO()
    Output(for_programs, "j", as_json=True, clock=lambda: 5.0).say("excluded", 2, {"nodes": ["n2"]})
    Output(for_people, "j", as_json=False, clock=lambda: 5.0).say("excluded", 2, {"nodes": ["n2"], "reason": ""})
    assert json.loads(for_programs.getvalue()) == {
        "time": 5.0, "event": "excluded", "job": "j", "attempt": 2, "nodes": ["n2"],
    }  # fmt: skip
    assert for_people.getvalue().endswith("attempt 2: excluded  nodes=n2\n")


def test_what_ranks_wrote_begins_no_line_of_its_own() -> None:
    stream = io.StringIO()
    Output(stream, "j", as_json=False).say("failed", 1, {"tails": {"n1": "Error\n\x1b[2J12:00:00 attempt 9: finished"}})
    assert len(stream.getvalue().splitlines()) == 1
    assert r"Error\n\x1b[2J12:00:00" in stream.getvalue()


def test_names_in_the_log_begin_no_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    handlers, level = root.handlers, root.level
    root.handlers = []
    try:
        command_line.to_stderr()
        logging.getLogger("x").error(
            "node %s", "n1\nINFO forged\x1b[2J\u2028", exc_info=ValueError("first\nERROR second")
        )
    finally:
        root.handlers, root.level = handlers, level
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == r"ERROR node n1\nINFO forged\x1b[2J\u2028"
    assert all(line.startswith("  ") for line in lines[1:])
    assert len(lines) > 1


def test_a_reader_who_went_away_does_not_end_the_job() -> None:
    class Closed(io.StringIO):
        def write(self, _: str) -> int:
            raise BrokenPipeError

    output = Output(Closed(), "j", as_json=True)
    output.say("running", 1, {})
    output.say("running", 1, {})


def test_errors_of_reading_name_the_key() -> None:
    with pytest.raises(ConfigurationError, match="--nodes"):
        command.read_job(parse("--", "x.py", nodes="a b"))


def test_every_flag_and_every_event_is_in_the_manual() -> None:
    manual = (Path(__file__).parents[2] / "docs" / "how-to" / "launch.md").read_text(encoding="utf-8")
    parser = argparse.ArgumentParser(add_help=False)
    command.configure(parser)
    flags = [flag for action in parser._actions for flag in action.option_strings]
    assert [flag for flag in flags if f"`{flag}" not in manual] == []
    launch = Path(command.__file__).parent
    code = "".join(path.read_text(encoding="utf-8") for path in launch.glob("*.py"))
    events = re.findall(r'(?:Say\(|\.say\(\s*)"(\w+)"', code)
    assert len(set(events)) > 10
    assert [event for event in events if f"`{event}`" not in manual] == []
