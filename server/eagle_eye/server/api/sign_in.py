"""Who asks: /api/v1/me."""

from __future__ import annotations

from fastapi import APIRouter, Response

from eagle_eye.server.api.requests import Somebody, answer

router = APIRouter(prefix="/api/v1", tags=["sign-in"])


@router.get("/me")
def get_me(principal: Somebody) -> Response:
    """Who the server takes you for, and the scope that you have; ``person`` is "" for tokens."""
    return answer(
        {
            "who": principal.who,
            "person": principal.person,
            "scope": principal.scope,
            "groups": sorted(principal.groups),
        }
    )
