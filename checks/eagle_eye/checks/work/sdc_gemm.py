"""Repeated matrix products, each number compared with its exact value: finds otherwise silent corruption.

The exact values are computed beforehand on the host's CPU and proven there by an integer checksum, so that neither the
device's first answer nor the CPU's is trusted by itself.
"""

from __future__ import annotations

import time
from typing import Any, NamedTuple

from .lines import LOADING, WORKING, WorkerOutput

SEED = 20_260_302
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
REPETITIONS = 8  # of each product in a round
LOAD_ROWS = 8_192  # ordinary numbers, large enough for a GPU's full speed and power


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
            for repetition in range(REPETITIONS):
                line.phase(WORKING)
                by_host = repetition == 0 and rounds % HOST_EVERY == 0
                wrong += _wrong(torch.matmul(one.left, one.right), one, line, by_host=by_host)
                operations += 1
        if load is not None:
            for _ in range(REPETITIONS):
                line.phase(WORKING)
                wrong += load.wrong(line)
                operations += 1
        rounds += 1
    return {"operations": operations, "wrong": wrong, "seconds": time.monotonic() - begin_s}


def _known(torch: Any, device: Any, product: Product) -> _Known:
    """Return a product with its exact result. Raises HostMiscomputes where the host's own result is not proven."""
    source = torch.Generator().manual_seed(SEED + product.inner)
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
        source = torch.Generator(device=device).manual_seed(SEED)
        shape = (LOAD_ROWS, LOAD_ROWS)
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
            row, column = divmod(int(differing.flatten().int().argmax()), LOAD_ROWS)
            exact = float(self._left[row].cpu().double() @ self._right[:, column].cpu().double())
            got, before = float(result[row, column]), float(self._first[row, column])
            line.finding(f"bfloat16 {LOAD_ROWS}^3 repeated, {before!r} before", [row, column], exact, got)
        return wrong


class HostMiscomputes(Exception):
    """The host's own arithmetic is wrong: nothing can be compared with it."""
