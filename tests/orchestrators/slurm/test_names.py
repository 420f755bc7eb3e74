"""Which of Slurm's jobs a name is, also while the server does not say."""

from __future__ import annotations

import pytest

from eagle_eye.orchestrators.protocol import RejectedError, ServerUnreachableError
from eagle_eye.orchestrators.slurm.answers import KEPT_S, JobNames, SlurmError
from tests.orchestrators.slurm.builders import Server


class Failing(Server):
    """A server that answers until it ``fails``."""

    fails: Exception | None = None
    asked = 0

    def call(self, method: str, path: str, body: object = None, timeout_s: float = 2.0) -> object:
        self.asked += 1
        if self.fails is not None:
            raise self.fails
        return super().call(method, path, body, timeout_s)


SILENT = ServerUnreachableError("GET /api/v1/jobs/4711: ConnectError")


def failing(error: Exception) -> Failing:
    server = Failing()
    server.fails = error
    return server


@pytest.mark.parametrize("error", [SILENT, RejectedError("HTTP 503 standby", 503), RejectedError("HTTP 401", 401)])
def test_without_the_servers_word_a_number_is_an_id(error: Exception) -> None:
    assert JobNames(failing(error), lambda: 0.0).id_of("4711") == 4711


def test_without_the_servers_word_its_last_one_holds() -> None:
    server, now_s = Failing(**{"4711": "slurm:12"}), [0.0]
    names = JobNames(server, lambda: now_s[0])
    assert names.id_of("4711") == 12
    server.fails, now_s[0] = SILENT, 100 * KEPT_S
    assert names.id_of("4711") == 12


def test_without_the_servers_word_another_name_stays_unknown() -> None:
    with pytest.raises(SlurmError, match="which of Slurm's jobs 'llama' is: GET"):
        JobNames(failing(SILENT), lambda: 0.0).id_of("llama")


def test_a_silent_server_is_not_asked_at_every_step() -> None:
    server = failing(SILENT)
    names = JobNames(server, lambda: 0.0)
    assert [names.id_of("4711") for _ in range(3)] == [4711] * 3
    assert server.asked == 1
