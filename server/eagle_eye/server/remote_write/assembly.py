"""Remote write put together from a server's parts."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from eagle_eye.schema.frame import Frame
from eagle_eye.server.remote_write import mapping
from eagle_eye.server.remote_write.endpoint import RemoteWrite
from eagle_eye.server.remote_write.intake import Intake
from eagle_eye.server.remote_write.keeper import Keeper, known_interval_s
from eagle_eye.server.remote_write.last_codes import CodeMemory
from eagle_eye.server.remote_write.membership import Membership
from eagle_eye.server.services import Services


def build(services: Services, found: Callable[[list[str]], Awaitable[None]]) -> RemoteWrite:
    """Return the endpoint; ``found(nodes)`` is awaited for nodes that were never heard of."""
    settings, fleet = services.config.remote_write, services.fleet
    table = mapping.load()

    def observe(frame: Frame, received_s: float, offset_s: float) -> None:
        services.watcher.observe(frame, received_s, offset_s)
        if frame.events:
            services.bookkeeper.note(frame.node, frame.events)

    membership = Membership(services.store, services.clock, fleet.vouchers)
    codes = CodeMemory(services.store, services.telemetry.failures.labels("last codes").inc)
    fleet.when_forgotten(codes.forget)
    return RemoteWrite(
        settings,
        services.config.ingest,
        services.tokens,
        fleet,
        Intake(
            table,
            settings.node_labels,
            settings.job_labels,
            settings.series_max,
            2 * services.config.ingest.nodes_max,
            lambda node: known_interval_s(fleet.last(node)),
            codes.of,
        ),
        Keeper(
            services.history,
            fleet,
            services.telemetry,
            services.clock,
            observe,
            found,
            membership.job_of,
            codes,
        ),
        membership,
        table.wanted,
        services.telemetry,
        services.clock,
        services.limits.check_remote_write,
    )
