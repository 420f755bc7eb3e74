"""Settings for delivery attempts."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from eagle_eye.server.model.bounds import Count, NotNegative, Positive


class WebhookSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How deliveries are attempted. Delays double from ``backoff_base_s`` to ``backoff_max_s``, with full jitter."""

    allow_private: bool = False  # whether targets may be loopback, private or link-local addresses
    timeout_s: Positive = 10.0  # for one attempt, from connecting to the end of the answer
    attempts_max: Count = 20
    backoff_base_s: Positive = 1.0
    backoff_max_s: Positive = 3600.0
    heartbeat_s: NotNegative = 60.0  # 0: no heartbeat
    concurrency_per_subscription: Count = 16  # in flight; four more are kept for actions
    target_concurrency: Count = 32  # in flight to one host and port; one subscription takes half
    target_requests_per_s: Positive = 50.0  # likewise
    target_burst: Count = 100  # requests allowed at once after an idle time
    pending_max: Count = 10_000  # per subscription; beyond it the oldest fail with "backlog"
    subscriptions_max: Count = 100
    rotation_overlap_s: NotNegative = 86_400.0  # how long a replaced secret still signs
    disable_after_s: NotNegative = 0.0  # a subscription with nothing delivered for this long ends; 0: never
    alert_refresh_s: Annotated[float, Meta(ge=1, le=3_600)] = 60.0  # how often an Alertmanager gets firing alerts again
    runbook_url: str = ""  # the runbook_url of alerts, "{fault}" is replaced; "": none
