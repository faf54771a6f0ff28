"""Pack the daily files of Online Retail into the three tables that ship with the package.

Run `python -m benchmarks.pack_retail FOLDER/online_retail/NAME.tar.xz`.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import click
import polars as pl

FIELDS = ("InvoiceNo", "StockCode", "CustomerID", "Country", "Description")
FOLDER = Path(__file__).parent.parent / "embroute" / "data" / "retail"


def read_days(archive: Path) -> pl.DataFrame:
    """All lines of the archive's CSV files, in time order, as text."""
    with tarfile.open(archive) as tar:
        members = sorted((m for m in tar if m.name.endswith(".csv")), key=lambda m: m.name)
        days = [pl.read_csv(tar.extractfile(m) or b"", infer_schema=False) for m in members]
    return pl.concat(days).sort("InvoiceDate", maintain_order=True)


def by_appearance(values: pl.Series) -> pl.Series:
    """The values as ids 0, 1, ... in the order in which they first appear."""
    seen = values.unique(maintain_order=True)
    return values.replace_strict(seen, pl.int_range(len(seen), eager=True)).cast(pl.UInt16)


def packed(lines: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The lines without repetition: an item is a (StockCode, Description) pair, and an
    invoice has one customer and one country. Prices are in thousandths of a pound, the
    resolution of the data. A missing customer or description has its own id.
    """
    ids = lines.select(by_appearance(lines[field].fill_null("")) for field in FIELDS)
    item = by_appearance(ids["StockCode"].cast(pl.UInt32) * 2**16 + ids["Description"])
    price = (lines["UnitPrice"].cast(pl.Float64) * 1000).round().cast(pl.Int32)
    ids = ids.with_columns(item.alias("Item"), price, lines["Quantity"].cast(pl.Int32))
    invoices = ids.select("InvoiceNo", "CustomerID", "Country").unique().sort("InvoiceNo")
    assert len(invoices) == lines["InvoiceNo"].n_unique()
    return {
        "lines": ids.select("InvoiceNo", "Item", "Quantity", "UnitPrice"),
        "items": ids.select("Item", "StockCode", "Description").unique().sort("Item").drop("Item"),
        "invoices": invoices.drop("InvoiceNo"),
    }


@click.command()
@click.argument("archive", type=click.Path(exists=True, path_type=Path))
def main(archive: Path) -> None:
    for name, table in packed(read_days(archive)).items():
        path = FOLDER / f"{name}.parquet"
        table.write_parquet(path, compression="zstd", compression_level=22, row_group_size=2**20)
        click.echo(f"{path}: {len(table):,} rows, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
