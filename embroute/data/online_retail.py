"""Online Retail, the real trace in the package: `online-retail(negatives=2, history=0, seed=0)`.

Chen, Sain and Guo (2012), UCI Machine Learning Repository, CC BY 4.0; see retail/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import as_file, files

import numpy as np
import polars as pl

from embroute.config.spec import LARGEST_SEED, CallSpec, bind, parse_int
from embroute.data.batch import Batch, one_hot, positions_of, with_bags
from embroute.data.schema import Field, Schema, Table
from embroute.kernels.array_types import F32, I32, I64

NAMES = ("InvoiceNo", "StockCode", "CustomerID", "Country", "Description")
STOCK_CODE, CUSTOMER, ITEM_FIELDS = 1, 2, (1, 4)  # an item is a stock code and a description
NO_CUSTOMER = 32  # the id of a missing customer
SIZES = (25_900, 4_070, 4_373, 38, 4_224)
NUM_LINES = 541_909
CHUNK_LINES = 32_768
FIRST_DRAWS = 1000  # number of lines from which early invoices draw negatives


@dataclass(frozen=True)
class RetailSource:
    """Every invoice line in time order, each among `negatives` drawn lines.

    Without negatives: five ids, dense log quantity and log price (signed: returns are negative),
    no label. With k negatives: a line of the trace has label 1 and comes with k drawn lines of
    label 0. A drawn line has the invoice, customer and country of the real line, and the item
    (stock code, description, price) of a line before the invoice. All earlier lines are equally
    likely, so items are drawn by popularity so far. The earliest invoices draw from the first
    thousand lines. A drawn item may be on the invoice too. A cancellation is a real line.

    With a history, a bag field holds the stock codes of the last `history` lines of the same
    customer before the line, oldest first: purchases, the basket so far, and cancellations. A line
    without a customer has the lines of its invoice. A drawn line has the history of its real line.

    The quantity is left out, because only real lines have a quantity. The position of the real
    line among its negatives is random: a sample's number must not reveal the label, because
    samples may be assigned to workers by number.
    """

    negatives: int = 0
    seed: int = 0
    history: int = 0

    @property
    def schema(self) -> Schema:
        """Five fields, 38,605 rows; the history has the table of stock codes."""
        bag = Field("History", STOCK_CODE, True, self.history)
        return Schema(
            tuple(Table(name, size) for name, size in zip(NAMES, SIZES, strict=True)),
            (
                *(Field(name, table) for table, name in enumerate(NAMES)),
                *([bag] if self.history else []),
            ),
            ("log_price",) if self.negatives else ("log_quantity", "log_price"),
            labelled=self.negatives > 0,
        )

    @property
    def num_samples(self) -> int:
        """Lines and negatives."""
        return NUM_LINES * (1 + self.negatives)

    @cached_property
    def _lines(self) -> _Lines:
        return _load(self.schema.first_rows)

    def chunks(self) -> Iterator[Batch]:
        """One pass in time order."""
        for number, start in enumerate(range(0, NUM_LINES, CHUNK_LINES)):
            lines = np.arange(start, min(start + CHUNK_LINES, NUM_LINES))
            if self.negatives:
                batch = self._labelled(lines, np.random.default_rng([self.seed, number]))
            else:
                batch = one_hot(
                    self._lines.rows_NF[lines].astype(np.int64), self._lines.dense[lines]
                )
            yield with_bags(batch, [self._bag(lines)]) if self.history else batch

    def _labelled(self, lines: I64, random: np.random.Generator) -> Batch:
        """The given lines, each among its negatives."""
        data, copies = self._lines, 1 + self.negatives
        candidates = np.maximum(data.first_line[lines], FIRST_DRAWS)
        item = np.repeat(lines[:, None], copies, axis=1)
        item[:, 1:] = random.integers(0, candidates[:, None], (len(lines), self.negatives))
        # Swap the real line from column 0 into a random column.
        every, real = np.arange(len(lines)), random.integers(0, copies, len(lines))
        item[every, 0], item[every, real] = item[every, real], lines
        rows = data.rows_NF[np.repeat(lines, copies)].astype(np.int64)
        for field in ITEM_FIELDS:
            rows[:, field] = data.rows_NF[item.ravel(), field]
        label = np.zeros((len(lines), copies), np.float32)
        label[every, real] = 1
        return one_hot(rows, data.dense[item.ravel(), 1:], label.ravel())

    def _bag(self, lines: I64) -> tuple[I64, I64]:
        """The histories of the samples of these lines."""
        order, place, first = self._by_customer
        line = np.repeat(lines, 1 + self.negatives)
        lengths = np.minimum(place[line] - first[line], self.history)
        before = order[positions_of(place[line] - lengths, lengths)]
        return self._lines.rows_NF[before, STOCK_CODE].astype(np.int64), lengths

    @cached_property
    def _by_customer(self) -> tuple[I64, I64, I64]:
        """Lines by customer, then time; each line's place in this order, and its customer's."""
        data = self._lines
        customer = data.rows_NF[:, CUSTOMER] - self.schema.first_rows[CUSTOMER]
        # Below 0 are the lines without a customer, by invoice.
        group = np.where(customer == NO_CUSTOMER, -1 - data.first_line, customer)
        order = np.argsort(group, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(NUM_LINES)
        return order, place, np.searchsorted(group[order], group)


@dataclass(frozen=True)
class _Lines:
    """Global row ids and dense columns of every line, and the first line of its invoice."""

    rows_NF: I32
    dense: F32
    first_line: I64


def _load(first_rows: I64) -> _Lines:
    """Join the packed tables into one line per sample."""
    lines, items, invoices = (_table(name) for name in ("lines", "items", "invoices"))
    invoice, item = lines["InvoiceNo"].to_numpy(), lines["Item"].to_numpy()
    columns = (
        invoice,
        items["StockCode"].to_numpy()[item],
        invoices["CustomerID"].to_numpy()[invoice],
        invoices["Country"].to_numpy()[invoice],
        items["Description"].to_numpy()[item],
    )
    rows = np.stack(columns, axis=1).astype(np.int32) + first_rows[:-1].astype(np.int32)
    raw = np.stack([lines["Quantity"].to_numpy(), lines["UnitPrice"].to_numpy() / 1000], axis=1)
    dense = (np.sign(raw) * np.log1p(np.abs(raw))).astype(np.float32)
    # Invoices are numbered by first appearance, so the first lines are in order of invoice.
    _, first = np.unique(invoice, return_index=True)
    return _Lines(rows, dense, first[invoice])


def _table(name: str) -> pl.DataFrame:
    """One of the packed tables."""
    with as_file(files("embroute.data") / "retail" / f"{name}.parquet") as path:
        return pl.read_parquet(path)


def open_retail(call: CallSpec) -> RetailSource:
    """`online-retail` as a trace, or `online-retail(negatives=2, history=20)` with labels."""
    options = bind(call, ("negatives", "seed", "history"))
    return RetailSource(
        parse_int("negatives", options.get("negatives", "0"), 0, 1000),
        parse_int("seed", options.get("seed", "0"), 0, LARGEST_SEED),
        parse_int("history", options.get("history", "0"), 0, 1000),
    )
