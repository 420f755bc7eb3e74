from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from eagle_eye.agent.nvml.simulation import SOURCE, SimulationFailed, cache_folder, compiled
from tests.agent.simulated_gpus import needs_compiler

pytestmark = needs_compiler

SIMULATE = """
import sys
from pathlib import Path
from eagle_eye.agent.nvml.simulation import SimulationFailed, simulate
try:
    simulate(Path(sys.argv[1]))
except SimulationFailed as error:
    sys.exit(f"failed: {error}")
from eagle_eye.agent.collectors.nvml import NvmlCollector
collector = NvmlCollector()
seen = collector.collect(1000.0)
print(len(seen.devices), f"simulated: {seen.simulated}{seen.problem}")
"""


def run(program: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *arguments],
        env={"PATH": "/usr/bin:/bin", **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_process_without_gpus_gets_eight_that_say_what_they_are(tmp_path: Path) -> None:
    done = run(SIMULATE, str(tmp_path / "cache"))
    assert (done.stdout, done.stderr) == ("8 simulated: True\n", "")


def test_simulated_gpus_go_before_real_ones(tmp_path: Path) -> None:
    """Another library of the same name is where the dynamic loader looks."""
    (tmp_path / "other.c").write_text("int nvmlInitWithFlags(unsigned flags) { return 999; }\n")
    options = ["-shared", "-fPIC", "-Wl,-soname,libnvidia-ml.so.1", "-o", str(tmp_path / "libnvidia-ml.so.1")]
    subprocess.run(["cc", *options, str(tmp_path / "other.c")], check=True)
    with_other = "import pynvml; pynvml.nvmlInit()"
    assert "Unknown Error" in run(with_other, LD_LIBRARY_PATH=str(tmp_path)).stderr
    done = run(SIMULATE, str(tmp_path / "cache"), LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout == "8 simulated: True\n"


def test_what_the_gpus_show_moves(tmp_path: Path) -> None:
    program = """
    import ctypes, json, sys
    library = ctypes.CDLL(sys.argv[1])
    import pynvml
    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(place) for place in range(8)]
    print(len({pynvml.nvmlDeviceGetPowerUsage(handle) for handle in handles for _ in range(1000)}))
    """
    assert int(run(program, str(compiled(tmp_path / "cache"))).stdout) > 8


def test_the_library_is_compiled_once_and_kept_for_us_alone(tmp_path: Path) -> None:
    folder = tmp_path / "home" / "cache"
    library = compiled(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    made = library.stat().st_mtime_ns
    assert compiled(folder) == library
    assert library.stat().st_mtime_ns == made
    assert [path.name for path in folder.iterdir()] == [library.name]


def test_another_source_or_other_options_make_another_library(tmp_path: Path) -> None:
    assert compiled(tmp_path / "cache") != compiled(tmp_path / "cache", "-DOLD_DRIVER")


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(SimulationFailed, match="chmod 700"):
        compiled(folder)


def test_a_cache_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SimulationFailed, match=r"file/cache: .*XDG_CACHE_HOME"):
        compiled(tmp_path / "file" / "cache")


def test_without_a_compiler_the_package_is_named(tmp_path: Path) -> None:
    done = run(SIMULATE, str(tmp_path / "cache"), PATH=str(tmp_path))
    assert done.returncode == 1
    assert done.stderr == (
        "failed: simulated GPUs need a C compiler: apt-get install gcc libc6-dev, or dnf install gcc\n"
    )


def test_a_compiler_that_fails_is_quoted(tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'simulated.c:1:10: fatal error: math.h: No such file' >&2\nexit 1\n")
    compiler.chmod(0o755)
    done = run(SIMULATE, str(tmp_path / "cache"), PATH=f"{tmp_path}:/usr/bin:/bin")
    assert "fatal error: math.h: No such file (is libc6-dev installed?)" in done.stderr
    assert done.stderr.count("\n") == 1
    assert list((tmp_path / "cache").iterdir()) == []


def test_once_nvml_is_open_it_is_too_late(tmp_path: Path) -> None:
    program = """
    import ctypes, sys
    from pathlib import Path
    ctypes.CDLL(sys.argv[1])
    import pynvml
    pynvml.nvmlInit()
    from eagle_eye.agent.nvml.simulation import simulate
    simulate(Path(sys.argv[2]))
    """
    done = run(program, str(compiled(tmp_path / "cache")), str(tmp_path / "cache"))
    assert "NVML is open already" in done.stderr


def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    options = ["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    for variant in ([], ["-DOLD_DRIVER"]):
        subprocess.run(["cc", *options, *variant, "-o", str(tmp_path / "x.so"), str(SOURCE), "-lm"], check=True)


def test_a_word_that_is_not_known_is_said(tmp_path: Path) -> None:
    gpus = tmp_path / "gpus"
    gpus.write_text("gpus 2\nexplode 1\n")
    done = run(SIMULATE, str(tmp_path / "cache"), EAGLE_EYE_SIMULATED_GPUS=str(gpus))
    assert done.stdout.startswith("2 ")
    assert "not understood: explode 1" in done.stderr


def test_the_cache_is_where_the_user_keeps_caches() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/c", "HOME": "/h"}) == Path("/c/eagle-eye")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/eagle-eye")
