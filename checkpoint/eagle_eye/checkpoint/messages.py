"""The messages between ranks and stores: msgspec structs, one length-prefixed frame each, of bounded size.

A rank talks to the store of its node over a Unix socket, stores and ranks of other nodes over TCP after a handshake
(``connection.py``). A shard's bytes follow the frame that announces them, unframed.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

VERSION = 2
FRAME_BYTES_MAX = 64 << 20  # a plan of 100,000 tensors fits; what is longer is no message of ours

Captures = Annotated[int, msgspec.Meta(ge=1)]


class CopyInfo(msgspec.Struct, frozen=True):
    """A copy of one rank's shard of one step, whole and verified when it was written.

    ``tail`` are the lengths of the objects behind the tensors; ``captured_s`` is the Unix time of the capture, and
    ``attempt`` the one that captured it: shards of another attempt's same step may be of another course of training.
    """

    plan: str
    rank: int
    step: int
    length: int
    tail: tuple[int, ...]
    captured_s: float
    attempt: int = 0


class KeptStep(msgspec.Struct, frozen=True):
    """A step that an attempt keeps from before: whole, captured in ``attempt`` at ``captured_s``, Unix time."""

    step: int
    attempt: int
    captured_s: float


class JobNode(msgspec.Struct, frozen=True):
    """A node of the job with the TCP address of its store and the ranks that it runs."""

    node: str
    address: str
    ranks: tuple[int, ...]


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """A rank greets its node's store. ``key`` is the job's key, required to ask about the job."""

    version: int
    job: str
    key: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The store's state: its identity, the newest attempt that it has seen of the job, and its copies.

    ``kept`` are the steps that this attempt keeps, whether this store has copies of them or not.
    """

    version: int
    node: str
    address: str
    attempt: int
    copies: tuple[CopyInfo, ...]
    kept: tuple[int, ...] = ()


class Open(msgspec.Struct, frozen=True, tag="open"):
    """A rank begins an attempt: its shards need ``capacity_bytes`` a slot.

    ``holders`` are the nodes that keep copies of them, its own first. ``plan`` names what is laid out where in shards;
    ``blob`` says it (opaque to stores). The attempt goes on after ``step``; ``resumed_step`` is the same where it came
    from memory (captured in ``resumed_attempt``), else None. ``keep`` are the newest whole steps that stay, and others
    behind them reach ``reach_s`` back; ``kept`` are those from before, of this plan: the resumed one and what reaches
    back. ``sources`` are stores that hold this rank's shards of them. ``persisted_step`` is the newest on storage.
    ``again``: the attempt goes on, and the store was started anew.
    """

    job: str
    key: bytes
    attempt: int
    rank: int
    members: tuple[JobNode, ...]
    holders: tuple[str, ...]
    plan: str
    blob: bytes
    capacity_bytes: int
    keep: int
    step: int
    resumed_step: int | None
    sources: tuple[str, ...]
    directory: str
    persist_every: int
    persisted_step: int = 0
    resumed_attempt: int = 0
    again: bool = False
    reach_s: float = 0.0
    kept: tuple[KeptStep, ...] = ()


class SlotsOpened(msgspec.Struct, frozen=True, tag="opened"):
    """The rank's slots that are reserved, as paths of files in shared memory of the capacity that was asked for.

    The others are reserved while it trains: a ``Grant`` names the file, too.
    """

    slots: tuple[str, ...]


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """Why not; ``reason`` gives the value, the limit and the remedy."""

    reason: str


class Captured(msgspec.Struct, frozen=True, tag="captured"):
    """A rank has written its shard of a step into a slot, and was blocked for ``blocked_s`` by it."""

    step: int
    slot: int
    length: int
    tail: tuple[int, ...]
    captured_s: float
    blocked_s: float = 0.0


class Skipped(msgspec.Struct, frozen=True, tag="skipped"):
    """A rank has not captured a step, and why. Not ``due``: no rank does, as the job has agreed (``CaptureEvery``)."""

    step: int
    reason: str
    due: bool = True


class Grant(msgspec.Struct, frozen=True, tag="grant"):
    """The rank may write into this slot, once: the file ``path``, possibly reserved since ``SlotsOpened``."""

    slot: int
    path: str


class CaptureEvery(msgspec.Struct, frozen=True, tag="capture_every"):
    """From now on the rank makes the last of each ``captures``, counted from the start of the attempt."""

    captures: Captures


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """All copies of all shards of this step are whole."""

    step: int


class MetadataWanted(msgspec.Struct, frozen=True, tag="metadata_wanted"):
    """Rank 0 is asked for the ``.metadata`` of a step that is written to storage; ``tails`` by rank."""

    step: int
    tails: dict[int, tuple[int, ...]]


class MetadataMade(msgspec.Struct, frozen=True, tag="metadata_made"):
    """Rank 0's answer: the metadata."""

    step: int
    data: bytes


class Persisted(msgspec.Struct, frozen=True, tag="persisted"):
    """A step is whole on storage, as a folder."""

    step: int
    path: str


class Close(msgspec.Struct, frozen=True, tag="close"):
    """The rank has ended as it should: the job's memory may be freed once all have.

    The store ends the connection once nothing that this node's ranks captured is on its way any more.
    """


class Find(msgspec.Struct, frozen=True, tag="find"):
    """A rank asks for the path of the slot with a copy on this node."""

    plan: str
    rank: int
    step: int


class Found(msgspec.Struct, frozen=True, tag="found"):
    """It is there: ``sums`` are the chunks' checksums, eight bytes each. No path: it is not held here."""

    path: str | None
    length: int = 0
    sums: bytes = b""
    copy: CopyInfo | None = None


class GetBlob(msgspec.Struct, frozen=True, tag="get_blob"):
    """Asks for a plan's layout."""

    plan: str


class Blob(msgspec.Struct, frozen=True, tag="blob"):
    """The layout; None: unknown here."""

    data: bytes | None


class Read(msgspec.Struct, frozen=True, tag="read"):
    """A rank of another node asks for a part of a copy: whole chunks, of which the last may be shorter."""

    plan: str
    rank: int
    step: int
    offset: int
    length: int


class Bytes(msgspec.Struct, frozen=True, tag="bytes"):
    """``length`` bytes follow; ``sums`` are those of their chunks. Negative length: not held here."""

    length: int
    sums: bytes = b""


class Reserve(msgspec.Struct, frozen=True, tag="reserve"):
    """A store asks another one for memory for copies of a rank's shards."""

    attempt: int
    rank: int
    plan: str
    blob: bytes
    capacity_bytes: int
    keep: int
    resumed_step: int | None
    resumed_attempt: int = 0
    reach_s: float = 0.0
    kept: tuple[KeptStep, ...] = ()


class Reserved(msgspec.Struct, frozen=True, tag="reserved"):
    """The memory is reserved."""


class Put(msgspec.Struct, frozen=True, tag="put"):
    """The bytes of a shard follow once the other side has a place for them (``Proceed``).

    By the steps that this side knows to be ``whole``, or never to be (``void``), the other may make room.
    """

    attempt: int
    copy: CopyInfo
    sums: bytes
    whole: tuple[int, ...] = ()
    void: tuple[int, ...] = ()


class Proceed(msgspec.Struct, frozen=True, tag="proceed"):
    """Whether to send the bytes. ``have``: this copy is here already. Not ``reserved``: nothing is for this shard."""

    yes: bool
    have: bool = False
    reserved: bool = True


class Stored(msgspec.Struct, frozen=True, tag="stored"):
    """The copy is here, and each chunk was verified; or which was not."""

    yes: bool
    reason: str = ""


class Copies(msgspec.Struct, frozen=True, tag="copies"):
    """A store tells the coordinator that all copies of a shard of its node are whole.

    ``whole`` are the steps that it knows to be whole on all: a coordinator that was started anew hears of them.
    ``again``: it has said so before, and heard nothing of this step. ``given_up`` are those of the whole steps of which
    it has dropped a copy for a newer one, because it has fewer slots than it should.
    """

    attempt: int
    copy: CopyInfo
    whole: tuple[int, ...] = ()
    again: bool = False
    given_up: tuple[int, ...] = ()


class Missed(msgspec.Struct, frozen=True, tag="missed"):
    """A store tells the coordinator that there will be no shard of this rank of this step; the rest as in Copies."""

    attempt: int
    rank: int
    step: int
    reason: str
    whole: tuple[int, ...] = ()
    again: bool = False


class Agreed(msgspec.Struct, frozen=True, tag="agreed"):
    """The coordinator's current state, sent to every store: the next one makes up for a lost one.

    The steps that are ``whole`` and kept; one that never will be (``void``); the one that is to go to storage
    (``persist``); the newest of those that are there or have failed to be (``persisted``); whether all have ``ended``;
    of how many captures ranks make one (``capture_every``).
    """

    attempt: int
    whole: tuple[int, ...] = ()
    void: int | None = None
    persist: int | None = None
    persisted: int | None = None
    ended: bool = False
    capture_every: Captures = 1


class RanksDone(msgspec.Struct, frozen=True, tag="ended"):
    """A store tells the coordinator that its ranks have ended as they should, and nothing is on its way any more."""

    attempt: int
    node: str


class ShardPersisted(msgspec.Struct, frozen=True, tag="shard_persisted"):
    """A store tells the coordinator that the shards of its node are on storage; or why not."""

    attempt: int
    node: str
    step: int
    reason: str = ""


class Greet(msgspec.Struct, frozen=True, tag="greet"):
    """Whoever connects over TCP says for which job, with a number used once."""

    version: int
    job: str
    nonce: bytes


class Challenge(msgspec.Struct, frozen=True, tag="challenge"):
    """The store's own number, and the proof that it has the job's key."""

    nonce: bytes
    proof: bytes


class Proof(msgspec.Struct, frozen=True, tag="proof"):
    """The proof that the other side has it, too."""

    proof: bytes


class StatusAsked(msgspec.Struct, frozen=True, tag="status"):
    """Somebody asks what the store holds."""


class StoreStatus(msgspec.Struct, frozen=True, tag="status_is"):
    """As the store says it: plain containers."""

    jobs: list[dict[str, Any]]


class VerifyAsked(msgspec.Struct, frozen=True, tag="verify"):
    """Somebody asks whether every copy is what was written."""


class Verified(msgspec.Struct, frozen=True, tag="verified"):
    """So many are, of so many bytes; these are not, and are gone."""

    copies: int
    total_bytes: int
    damaged: tuple[str, ...]


Message = (
    Hello | Welcome | Open | SlotsOpened | RequestRefused | Captured | Skipped | Grant | CaptureEvery | Whole
    | MetadataWanted
    | MetadataMade | Persisted | Close | Find | Found | GetBlob | Blob | Read | Bytes | Reserve | Reserved | Put
    | Proceed | Stored | Copies | Missed | Agreed | RanksDone | ShardPersisted | Greet | Challenge | Proof | StatusAsked
    | StoreStatus | VerifyAsked | Verified
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode(message: Message) -> bytes:
    """Return the message as one frame: four bytes of length, big-endian, then msgpack."""
    body = _encoder.encode(message)
    return len(body).to_bytes(4, "big") + body


def decode(body: bytes) -> Message:
    """Return the message of a frame without its length. Raises msgspec.DecodeError for what is none."""
    message: Message = _decoder.decode(body)
    return message
