"""``eagle-eye tokens``: creates, lists and revokes tokens directly in the server's files."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import msgspec
from msgspec.structs import replace

from eagle_eye.schema.configuration import ConfigurationError, private_file
from eagle_eye.server import config as configuration
from eagle_eye.server.admin import data_folder
from eagle_eye.server.admin.data_folder import had
from eagle_eye.server.model.clock import Clock, SystemClock, rfc3339
from eagle_eye.server.model.errors import StoreUnavailable
from eagle_eye.server.model.records import AuditEntry, Token
from eagle_eye.server.security.auth import mint
from eagle_eye.server.store.database import REMEDY
from eagle_eye.server.store.settings import RecordsSettings
from eagle_eye.server.store.sql_store import RECORDS_FILE, open_records
from eagle_eye.server.store.store import TOKENS, Change, Store

DAY_S = 86_400.0
JOIN_LIFETIME_S = DAY_S  # of a join token by default


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's verbs."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    create = verbs.add_parser("create", help="make a token; its text is shown only once")
    create.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write its text to a new file, for its owner alone",
    )
    scopes = ["agent", "remote_write", "join", "read", "operate", "admin"]
    create.add_argument("--scope", required=True, choices=scopes, help="what it may do: docs/explanation/security.md")
    create.add_argument("--node", help="the node that an agent's token is bound to")
    create.add_argument("--expires-days", type=float, metavar="N", help="default: never; a join token's: 1")
    create.add_argument(
        "--nodes",
        action="append",
        default=[],
        metavar="GLOB",
        help="nodes that a join token enrols (any), or that a remote_write token speaks for; repeatable",
    )
    create.add_argument(
        "--replaces", action="store_true", help="a join token also enrols nodes anew; what they had is revoked"
    )
    create.add_argument(
        "--nodes-max",
        type=int,
        metavar="N",
        help="nodes that a remote_write token may name while nobody vouches for them"
        " (default: remote_write.token_nodes_max)",
    )
    listing = verbs.add_parser("list", help="list tokens; never their text")
    revoke = verbs.add_parser("revoke", help="have a token refused from now on")
    revoke.add_argument("id", metavar="TOKEN-ID", help="as tokens list shows it")
    for verb in (create, listing, revoke):
        verb.add_argument("--data", metavar="DIR", help="folder of the server's files, as the server has it")
        verb.add_argument("--config", type=Path, metavar="FILE", help="the server's TOML file")
        verb.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace, clock: Clock | None = None) -> int:
    """Run the verb and return the exit code. Raises ConfigurationError, StoreUnavailable, LookupError."""
    clock = clock or SystemClock()
    config = configuration.load(args.config, os.environ, {"data_dir": args.data})
    data = Path(config.data_dir)
    lost = None if config.records.url else data_folder.missing(data, RECORDS_FILE, had(data))
    if lost is not None:  # creating tokens in a new file would hide the loss of the old one
        raise StoreUnavailable(f"{data / RECORDS_FILE} {lost}; {REMEDY}")
    where = (config.records, data)
    if args.verb == "create":
        if args.out is None:
            return _create(where, args, clock, None)
        with private_file(args.out, "--out") as file:
            return _create(where, args, clock, file)
    with _opened(*where) as store:
        if args.verb == "revoke":
            return _revoke(store, args.id, clock, as_json=args.json)
        return _list(store, args.json)


@contextmanager
def _opened(settings: RecordsSettings, data: Path) -> Iterator[Store]:
    """Open the records as the owner of the folder: the server could not write to files created by root."""
    owner, me = data.stat() if data.is_dir() else None, (os.geteuid(), os.getegid())
    if owner is not None and me[0] == 0:
        os.setegid(owner.st_gid)
        os.seteuid(owner.st_uid)
    try:
        store = open_records(settings, data)
        try:
            yield store
        finally:
            store.close()
    finally:
        os.seteuid(me[0])
        os.setegid(me[1])


def _create(where: tuple[RecordsSettings, Path], args: argparse.Namespace, clock: Clock, out: TextIO | None) -> int:
    if args.expires_days is not None and not 0 < args.expires_days <= 36_500:
        raise ConfigurationError(f"--expires-days: expected more than 0 and at most 36500, got {args.expires_days:g}")
    lifetime_s = None if args.expires_days is None else args.expires_days * DAY_S
    if args.scope == "join" and lifetime_s is None:
        lifetime_s = JOIN_LIFETIME_S
    try:
        text, token = mint(
            args.scope,
            args.node,
            clock.now_s(),
            lifetime_s,
            nodes=args.nodes,
            replaces=args.replaces,
            nodes_max=args.nodes_max,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    with _opened(*where) as store:
        _commit(store, token, "token create", f"scope {token.scope} {_for(token)}".rstrip(), clock)
    if out is not None:
        out.write(text + "\n")
    if args.json:
        reported = _shown(token) if out is not None else {**_shown(token), "token": text}
        sys.stdout.write(msgspec.json.encode(reported).decode() + "\n")
    elif out is not None:
        sys.stderr.write(f"token {token.id}, scope {token.scope}; its text is in {args.out} and nowhere else\n")
    else:
        sys.stderr.write(f"token {token.id}, scope {token.scope}; it is shown only now:\n")
        sys.stdout.write(text + "\n")
    return 0


def _revoke(store: Store, token_id: str, clock: Clock, *, as_json: bool) -> int:
    token = store.get(TOKENS, token_id)
    if token is None:
        raise LookupError(f"no token is called {token_id[:80]!r}; eagle-eye tokens list shows them")
    revoked = replace(token, revoked=True)
    if not token.revoked:
        _commit(store, revoked, "token revoke", "", clock)
    if as_json:
        sys.stdout.write(msgspec.json.encode(_shown(revoked)).decode() + "\n")
    sys.stderr.write(f"token {token_id} is revoked\n")
    return 0


def _list(store: Store, as_json: bool) -> int:
    tokens = [_shown(token) for token in store.all(TOKENS)]
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(tokens), indent=2).decode() + "\n")
        return 0
    for token in tokens:
        state = "revoked" if token["revoked"] else f"until {token['expires'] or 'revoked'}"
        sys.stdout.write(f"{token['id']}  {token['scope']:<8} {token['for'] or '-':<24} {state}\n")
    return 0


def _commit(store: Store, token: Token, verb: str, detail: str, clock: Clock) -> None:
    entry = AuditEntry(time_s=clock.now_s(), who="local", verb=verb, subject=token.id, detail=detail)
    store.commit(Change(tokens=(token,), audit=(entry,)))


def _shown(token: Token) -> dict[str, object]:
    """Return the public fields of a token, without its hash."""
    return {
        "id": token.id,
        "scope": token.scope,
        "node": token.node,
        "nodes": token.nodes,
        "replaces": token.replaces,
        "nodes_max": token.nodes_max,
        "for": _for(token),
        "created": rfc3339(token.created_s),
        "expires": None if token.expires_s is None else rfc3339(token.expires_s),
        "revoked": token.revoked,
    }


def _for(token: Token) -> str:
    """Return what the token is for; empty if nothing in particular."""
    if token.scope == "remote_write":
        return ", ".join(token.nodes)
    if token.scope != "join":
        return token.node or ""
    return (", ".join(token.nodes) or "any node") + (", anew" if token.replaces else "")
