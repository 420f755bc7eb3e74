"""A child with torch: opens its devices, runs one kind of work on each, reports the result. Touches: GPUs, memory."""

from __future__ import annotations

import json
import os
import time
from datetime import timedelta
from statistics import median
from typing import Any, NamedTuple

from .lines import LOADING, OPENING, WORKING, WorkerOutput, bounded, side_by_side

CHUNK_BYTES = 256 << 20
CPU_CHUNK_BYTES = 8 << 20
FREE_SHARE = 0.8  # of a GPU's free memory; what is left serves the comparison
QUICK_FREE_SHARE = 0.2
CPU_BYTES_MAX = 64 << 20
CPU_AVAILABLE_SHARE = 0.1
# All bits off, all on, and each bit unlike its neighbours, both ways. Then each word its own place, for addresses that
# lead to another's memory.
PATTERNS = (0, -1, 0x5555_5555_5555_5555, -0x5555_5555_5555_5556)
_WORD_BYTES = 8


def memory(torch: Any, device: Any, job: dict[str, Any], _worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many bytes were tried, in how many passes, how many words were wrong, and the speed."""
    until_s = time.monotonic() + float(job["seconds"])
    chunks = _memory_chunks(torch, device, quick=bool(job["quick"]), line=line)
    words = sum(len(chunk) for chunk in chunks)
    wrong = passes = 0
    begin_s = time.perf_counter()
    while passes == 0 or time.monotonic() < until_s:
        pattern = PATTERNS[passes % (len(PATTERNS) + 1)] if passes % (len(PATTERNS) + 1) < len(PATTERNS) else None
        for number, chunk in enumerate(chunks):
            _write_pattern(torch, chunk, pattern, number)
            line.phase(WORKING)
        for number, chunk in enumerate(chunks):
            wrong += _wrong_words(torch, chunk, pattern, number)
            line.phase(WORKING)
        passes += 1
    spent_s = time.perf_counter() - begin_s
    return {
        "bytes": words * _WORD_BYTES,
        "passes": passes,
        "wrong_words": wrong,
        "bytes_per_second": 2.0 * words * _WORD_BYTES * passes / spent_s,
    }


def _memory_chunks(torch: Any, device: Any, *, quick: bool, line: WorkerOutput) -> list[Any]:
    if device.type == "cuda":
        free, _total = torch.cuda.mem_get_info(device)
        chunk_bytes, most = CHUNK_BYTES, int(free * (QUICK_FREE_SHARE if quick else FREE_SHARE))
    else:
        available = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        chunk_bytes, most = CPU_CHUNK_BYTES, min(CPU_BYTES_MAX, int(available * CPU_AVAILABLE_SHARE))
    chunks = []
    for _ in range(max(1, most // chunk_bytes)):
        chunks.append(torch.empty(chunk_bytes // _WORD_BYTES, dtype=torch.int64, device=device))
        line.phase(WORKING)
    return chunks


def _write_pattern(torch: Any, chunk: Any, pattern: int | None, number: int) -> None:
    if pattern is None:
        torch.arange(number * len(chunk), (number + 1) * len(chunk), out=chunk)
    else:
        chunk.fill_(pattern)


def _wrong_words(torch: Any, chunk: Any, pattern: int | None, number: int) -> int:
    if pattern is None:
        first = number * len(chunk)
        return int((chunk != torch.arange(first, first + len(chunk), device=chunk.device)).sum())
    return int((chunk != pattern).sum())


# Products and sums of -1 and 1 are whole numbers up to INNER, which float16 holds exactly up to 2,048: every order of
# summation gives the same bits.
ROWS, INNER = 4_096, 2_048
CPU_ROWS, CPU_INNER = 512, 512
GEMM_LOAD_ROWS = 8_192  # large enough for a GPU's full speed and power
GEMM_LOAD_BATCH = 8
COPY_BYTES = 64 << 20
KNOWN_SHARE = 0.3  # of the time for products with known results; the rest is for speed and heat
GEMM_SEED = 20_260_301


def gemm(torch: Any, device: Any, job: dict[str, Any], _worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many rows were not as known, how many numbers differed between repetitions, and the speed."""
    begin_s, seconds = time.monotonic(), float(job["seconds"])
    on_gpu = device.type == "cuda"
    known_s = seconds * KNOWN_SHARE if on_gpu else seconds
    values = _known_product(torch, device, begin_s + known_s, line)
    if on_gpu:
        loaded = _under_load(torch, device, begin_s + seconds, line)
        loaded["differing"] += values["differing"]
        loaded["repetitions"] += values["repetitions"]
        values |= loaded
    return values


def _known_product(torch: Any, device: Any, until_s: float, line: WorkerOutput) -> dict[str, float]:
    """Repeat one product until the time is over; every row is verified (Freivalds, 1977)."""
    on_gpu = device.type == "cuda"
    rows, inner = (ROWS, INNER) if on_gpu else (CPU_ROWS, CPU_INNER)
    source = torch.Generator().manual_seed(GEMM_SEED)
    left, right, weights = (
        torch.randint(0, 2, shape, generator=source, dtype=torch.int8) * 2 - 1
        for shape in ((rows, inner), (inner, rows), (rows,))
    )
    weights = weights.double()
    expected = left.double() @ (right.double() @ weights)  # exact: whole numbers far below 2**53
    number = torch.float16 if on_gpu else torch.float32
    left, right = left.to(device, number), right.to(device, number)
    first = torch.matmul(left, right)
    result = torch.empty_like(first)
    wrong = int((first.cpu().double() @ weights != expected).sum())
    differing = repetitions = 0
    spent_s = 0.0
    while repetitions == 0 or time.monotonic() < until_s:
        begin_s = time.perf_counter()
        torch.matmul(left, right, out=result)
        if on_gpu:
            torch.cuda.synchronize()
        spent_s += time.perf_counter() - begin_s
        differing += int((result != first).sum())
        repetitions += 1
        line.phase(WORKING)
    return {
        "wrong_rows": wrong,
        "differing": differing,
        "repetitions": repetitions,
        "flops_per_second": 2.0 * rows * rows * inner * repetitions / spent_s,
    }


def _under_load(torch: Any, device: Any, until_s: float, line: WorkerOutput) -> dict[str, float]:
    """Repeat one large product of ordinary numbers, with copies over PCIe in between, until the time is over.

    cuBLAS gives the same bits at every run on one GPU (cuBLAS, Results reproducibility).
    """
    source = torch.Generator(device=device).manual_seed(GEMM_SEED)
    left, right = (
        torch.randn((GEMM_LOAD_ROWS, GEMM_LOAD_ROWS), generator=source, device=device, dtype=torch.float16)
        for _ in range(2)
    )
    first = torch.matmul(left, right)
    result = torch.empty_like(first)
    there = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    here = torch.zeros(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    differing = repetitions = copies = 0
    spent_s = copied_s = 0.0
    torch.cuda.synchronize()
    while repetitions == 0 or time.monotonic() < until_s:
        begin_s = time.perf_counter()
        for _ in range(GEMM_LOAD_BATCH):
            torch.matmul(left, right, out=result)
        torch.cuda.synchronize()
        spent_s += time.perf_counter() - begin_s
        repetitions += GEMM_LOAD_BATCH
        differing += int((result != first).sum())
        begin_s = time.perf_counter()
        there.copy_(here)
        torch.cuda.synchronize()
        copied_s += time.perf_counter() - begin_s
        copies += 1
        line.phase(WORKING)
    return {
        "differing": differing,
        "repetitions": repetitions,
        "flops_per_second": 2.0 * GEMM_LOAD_ROWS**3 * repetitions / spent_s,
        "host_to_device_bytes_per_second": COPY_BYTES * copies / copied_s,
    }


ALL_REDUCE_BYTES = 128 << 20
ALL_REDUCE_CPU_BYTES = 4 << 20
WARM_UPS = 3  # connections are made at the first
REPETITIONS_MIN = 5
REPETITIONS_MAX = 200
_WAIT = timedelta(seconds=60)


def all_reduce(torch: Any, device: Any, job: dict[str, Any], worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many numbers of the sums were wrong, and the bus bandwidth, as nccl-tests define it."""
    on_gpu, ranks = device.type == "cuda", int(job["workers"])
    dist = join(device, job, worker, line)
    size = ALL_REDUCE_BYTES if on_gpu else ALL_REDUCE_CPU_BYTES
    # Whole numbers below 2**24, which float32 holds exactly in every order of summation.
    own = (torch.arange(size // 4, device=device) % 1_024 + worker).float()
    sums = (torch.arange(size // 4, device=device) % 1_024 * ranks + ranks * (ranks - 1) // 2).float()
    buffer = torch.empty_like(own)
    wrong, took_s = 0, []
    # The same number on every rank: a rank's own clock must not decide how long the others wait.
    repetitions = max(REPETITIONS_MIN, min(REPETITIONS_MAX, int(float(job["seconds"]) * 10)))
    for repetition in range(WARM_UPS + repetitions):
        buffer.copy_(own)
        if on_gpu:
            torch.cuda.synchronize()
        begin_s = time.perf_counter()
        dist.all_reduce(buffer)
        if on_gpu:
            torch.cuda.synchronize()
        if repetition >= WARM_UPS:
            took_s.append(time.perf_counter() - begin_s)
        wrong += int((buffer != sums).sum())
        line.phase(WORKING)
    return {
        "wrong": wrong,
        "repetitions": len(took_s) + WARM_UPS,
        "bytes": size,
        "bus_bytes_per_second": 2.0 * (ranks - 1) / ranks * size / median(took_s),
    }


def join(device: Any, job: dict[str, Any], worker: int, line: WorkerOutput) -> Any:
    """Return torch.distributed with this worker as one rank of all; they meet in the job's ``folder``."""
    import torch.distributed as dist

    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")  # all ranks are here
    line.phase(WORKING)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{job['folder']}/rendezvous",
        rank=worker,
        world_size=int(job["workers"]),
        timeout=_WAIT,
    )
    line.phase(WORKING)
    return dist


# The search for silent corruption compares each number of repeated products with its exact value, which is computed
# beforehand on the host's CPU and proven there by an integer checksum, so that neither the device's first answer nor
# the CPU's is trusted by itself.

SDC_SEED = 20_260_302
HOST_EVERY = 16  # one in so many comparisons is also made on the host: the device's own may be broken


class Product(NamedTuple):
    """(rows, inner) times (inner, rows) of whole numbers from -most to most.

    ``inner * most**2`` is a whole number that the type holds exactly, and so is each part of each sum: every order of
    summation, and every rounding between, gives the same bits.
    """

    number: str
    rows: int
    inner: int
    most: int
    tf32: bool = False

    @property
    def name(self) -> str:
        """Return it for people."""
        return f"{'tf32' if self.tf32 else self.number} {self.rows}x{self.inner}x{self.rows}"


# Up to which every whole number is exact: 8, 11, 24 and 53 bits.
EXACT = {"bfloat16": 256, "float16": 2_048, "float32": 1 << 24, "float64": 1 << 53}

# Shapes for the paths of the hardware: tensor cores in three types, ordinary units in two.
PRODUCTS = (
    Product("bfloat16", 2_048, 256, 1),
    Product("bfloat16", 2_048, 16, 4),
    Product("float16", 2_048, 2_048, 1),
    Product("float16", 2_048, 32, 8),
    Product("float32", 2_048, 1_024, 32, tf32=True),
    Product("float32", 2_048, 2_048, 64),
    Product("float64", 2_048, 1_024, 1 << 20),
)
CPU_PRODUCTS = (
    Product("bfloat16", 256, 256, 1),
    Product("float32", 256, 1_024, 64),
    Product("float64", 256, 512, 1 << 20),
)
SDC_REPETITIONS = 8  # of each product in a round
SDC_LOAD_ROWS = 8_192  # ordinary numbers, large enough for a GPU's full speed and power


class _Known(NamedTuple):
    """A product's factors and result on the device, and its result on the host."""

    product: Product
    left: Any
    right: Any
    expected: Any
    on_host: Any


def sdc_gemm(torch: Any, device: Any, job: dict[str, Any], _worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many products were made and how many numbers of them were wrong; one round of all at least.

    The first wrong ones are reported with place, what was expected and what came. ``seconds`` is how long it compared.
    """
    on_gpu = device.type == "cuda"
    known = []
    for product in PRODUCTS if on_gpu else CPU_PRODUCTS:
        line.phase(LOADING)  # the host's work: no silence in it is the device's
        known.append(_known(torch, device, product))
    line.phase(WORKING)
    load = _Load(torch, device) if on_gpu else None
    begin_s = time.monotonic()
    until_s = begin_s + float(job["seconds"])
    operations = wrong = rounds = 0
    while rounds == 0 or time.monotonic() < until_s:
        for one in known:
            torch.backends.cuda.matmul.allow_tf32 = one.product.tf32
            for repetition in range(SDC_REPETITIONS):
                line.phase(WORKING)
                by_host = repetition == 0 and rounds % HOST_EVERY == 0
                wrong += _wrong(torch.matmul(one.left, one.right), one, line, by_host=by_host)
                operations += 1
        if load is not None:
            for _ in range(SDC_REPETITIONS):
                line.phase(WORKING)
                wrong += load.wrong(line)
                operations += 1
        rounds += 1
    return {"operations": operations, "wrong": wrong, "seconds": time.monotonic() - begin_s}


def _known(torch: Any, device: Any, product: Product) -> _Known:
    """Return a product with its exact result. Raises HostMiscomputes where the host's own result is not proven."""
    source = torch.Generator().manual_seed(SDC_SEED + product.inner)
    left, right = (
        torch.randint(-product.most, product.most + 1, shape, generator=source, dtype=torch.int64)
        for shape in ((product.rows, product.inner), (product.inner, product.rows))
    )
    on_host = left.double() @ right.double()
    # In whole numbers, by other units of the CPU: rows (Freivalds, 1977) and columns (Huang and Abraham, 1984).
    weights = torch.randint(0, 2, (product.rows,), generator=source, dtype=torch.int64) * 2 - 1
    rows = (left * (right * weights).sum(1)).sum(1)
    columns = ((left * weights.unsqueeze(1)).sum(0).unsqueeze(1) * right).sum(0)
    whole = on_host.long()
    if not (
        torch.equal((whole * weights).sum(1), rows) and torch.equal((whole * weights.unsqueeze(1)).sum(0), columns)
    ):
        raise HostMiscomputes(f"{product.name}: the host's own product does not agree with its checksums")
    number = getattr(torch, product.number)
    on_host = on_host.to(number)
    return _Known(product, left.to(device, number), right.to(device, number), on_host.to(device), on_host)


def _wrong(result: Any, one: _Known, line: WorkerOutput, *, by_host: bool) -> int:
    """Return how many numbers of a result are wrong by the device's word, and by the host's where that is asked."""
    by_device = int((result != one.expected).sum())
    if not by_device and not by_host:
        return 0
    copied = result.cpu()
    differing = copied != one.on_host
    wrong = int(differing.sum())
    if wrong:
        row, column = divmod(int(differing.flatten().int().argmax()), one.product.rows)
        line.finding(one.product.name, [row, column], float(one.on_host[row, column]), float(copied[row, column]))
    elif by_device:
        line.finding(f"{one.product.name}, numbers that only the device's comparison calls wrong", [], 0.0, by_device)
    return max(by_device, wrong)


class _Load:
    """One large product of ordinary numbers: a GPU gives the same bits each time (cuBLAS, Results reproducibility)."""

    def __init__(self, torch: Any, device: Any) -> None:
        self._torch = torch
        source = torch.Generator(device=device).manual_seed(SDC_SEED)
        shape = (SDC_LOAD_ROWS, SDC_LOAD_ROWS)
        self._left, self._right = (
            torch.randn(shape, generator=source, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._first = torch.matmul(self._left, self._right)

    def wrong(self, line: WorkerOutput) -> int:
        """Return how many numbers differ from the first time; expected is what the host gets for one of them."""
        result = self._torch.matmul(self._left, self._right)
        differing = result != self._first
        wrong = int(differing.sum())
        if wrong:
            row, column = divmod(int(differing.flatten().int().argmax()), SDC_LOAD_ROWS)
            exact = float(self._left[row].cpu().double() @ self._right[:, column].cpu().double())
            got, before = float(result[row, column]), float(self._first[row, column])
            line.finding(f"bfloat16 {SDC_LOAD_ROWS}^3 repeated, {before!r} before", [row, column], exact, got)
        return wrong


class HostMiscomputes(Exception):
    """The host's own arithmetic is wrong: nothing can be compared with it."""


SDC_SUM_BYTES = 64 << 20
SDC_SUM_CPU_BYTES = 1 << 20
# (type, up to which whole numbers are exact in it, and so in every order of summation)
SDC_SUM_NUMBERS = (("float32", 1 << 24), ("bfloat16", 256))
SDC_SUM_CPU_NUMBERS = SDC_SUM_NUMBERS[:1]


def sdc_all_reduce(torch: Any, device: Any, job: dict[str, Any], worker: int, line: WorkerOutput) -> dict[str, float]:
    """Return how many all-reduces were made and how many numbers of their sums were wrong; each kind at least once."""
    on_gpu, ranks = device.type == "cuda", int(job["workers"])
    dist = join(device, job, worker, line)
    kinds = []
    for number, exact in SDC_SUM_NUMBERS if on_gpu else SDC_SUM_CPU_NUMBERS:
        ranks_sum = ranks * (ranks - 1) // 2
        if ranks_sum + ranks > exact:
            continue  # no sum of so many ranks is exact in it
        kind = getattr(torch, number)
        size = (SDC_SUM_BYTES if on_gpu else SDC_SUM_CPU_BYTES) // torch.empty(0, dtype=kind).element_size()
        places = torch.arange(size, device=device) % ((exact - ranks_sum) // ranks)
        sums = places * ranks + ranks_sum
        kinds.append((number, (places + worker).to(kind), sums.to(kind), torch.empty(size, dtype=kind, device=device)))
    begin_s = time.monotonic()
    until_s = begin_s + float(job["seconds"])
    over = torch.zeros(1, device=device)
    operations = wrong = 0
    while not over:
        for number, own, sums, buffer in kinds:
            buffer.copy_(own)
            dist.all_reduce(buffer)
            differing = buffer != sums
            count = int(differing.sum())
            if count:
                place = int(differing.int().argmax())
                line.finding(f"all-reduce {number}", [place], float(sums[place]), float(buffer[place]))
            wrong += count
            operations += 1
            line.phase(WORKING)
        # Agreed upon: a rank that stopped by its own clock would leave the others waiting.
        over.fill_(time.monotonic() >= until_s)
        dist.all_reduce(over)
    return {"operations": operations, "wrong": wrong, "seconds": time.monotonic() - begin_s}


CPU_THREADS_MAX = 4  # enough to load a few cores; a host has other work
WORKS = {
    "gemm": gemm,
    "memory": memory,
    "all_reduce": all_reduce,
    "sdc_gemm": sdc_gemm,
    "sdc_all_reduce": sdc_all_reduce,
}
TOGETHER = ("all_reduce", "sdc_all_reduce")  # the ranks must see each other's GPUs

# CUDA's and NCCL's texts for hardware errors, whatever the program did. Source: CUDA Runtime API, cudaError: 214
# uncorrectable ECC error, 220 uncorrectable NVLink error, 714 hardware stack error, 721 contained error.
HARDWARE_ERRORS = ("uncorrectable ecc error", "uncorrectable nvlink error", "hardware stack error", "hardware error")


def main(job_json: str) -> None:
    """Do the work that the parent asks for: ``work``, ``devices`` (UUIDs of GPUs), ``workers``, ``seconds``, ..."""
    job: dict[str, Any] = json.loads(job_json)
    bounded(int(job["parent"]), float(job["until_s"]))
    side_by_side(int(job["workers"]), float(job["until_s"]), lambda worker, line: _work(job, worker, line))


def _work(job: dict[str, Any], worker: int, line: WorkerOutput) -> None:
    devices: list[str] = job["devices"]
    line.phase(LOADING)
    together = job["work"] in TOGETHER
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(devices if together else devices[worker : worker + 1])
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # the same bits every time
    import torch

    if not devices:
        torch.set_num_threads(max(1, min(CPU_THREADS_MAX, len(os.sched_getaffinity(0))) // int(job["workers"])))
    elif not torch.version.cuda:
        raise RuntimeError(f"torch {torch.__version__} was built without CUDA")
    line.phase(OPENING)
    try:
        device = torch.device("cpu" if not devices else f"cuda:{worker if together else 0}")
        if devices:
            torch.cuda.set_device(device)
            torch.zeros(1, device=device)
            torch.cuda.synchronize()
        line.phase(WORKING)
        line.values(WORKS[job["work"]](torch, device, job, worker, line))
    except Exception as error:  # noqa: BLE001 - whatever torch raises is judged by its words
        hardware = isinstance(error, HostMiscomputes) or any(word in str(error).lower() for word in HARDWARE_ERRORS)
        line.error(error, hardware=hardware)
