"""`podium explain RUN`: the arithmetic of a run, and where the bytes of its last step went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import typer
from rich.filesize import decimal
from rich.table import Table

from podium.cli.terminal import text_console
from podium.trainers import RunDirectory
from podium.trainers.traffic import StepTraffic, read_traffic

NOTHING_MEASURED = "no bytes were measured: no step of RL was finished since they are counted"


def explain_run(path: Path, arithmetic: Sequence[str], *, as_json: bool) -> None:
    """Print both. ConfigError when `traffic.json` is damaged."""
    directory = RunDirectory(path)
    traffic = read_traffic(directory.traffic)
    if as_json:
        typer.echo(json.dumps({"arithmetic": list(arithmetic), "traffic": None if traffic is None else _summary(traffic)}))
        return
    typer.echo("\n".join(arithmetic) + f"\nall settings: {directory.config}\n")
    if traffic is None:
        typer.echo(NOTHING_MEASURED)
        return
    console = text_console()
    console.print(_table(traffic))
    console.print(_sums(traffic), soft_wrap=True)


def _summary(traffic: StepTraffic) -> dict[str, object]:
    edges = [{"call": edge.call, "way": edge.way, "columns": dict(edge.columns)} for edge in traffic.edges()]
    sums = {"by_way": traffic.by_way(), "through_driver": traffic.through_driver, "moved": traffic.moved}
    return {"step": traffic.step, "edges": edges, **sums}


def _table(traffic: StepTraffic) -> Table:
    table = Table(title=f"bytes of each column in step {traffic.step}, as measured", title_justify="left")
    for heading in ("from -> to", "column"):
        table.add_column(heading, overflow="fold")
    table.add_column("bytes", justify="right")
    for edge in traffic.edges():
        for number, (column, count) in enumerate(edge.columns.items()):
            table.add_row("" if number else edge.label, column, decimal(count))
        table.add_section()
    return table


def _sums(traffic: StepTraffic) -> str:
    ways = ", ".join(f"{way} {decimal(count)}" for way, count in traffic.by_way().items())
    return f"{ways}\nthrough the driver: {decimal(traffic.through_driver)} of {decimal(traffic.moved)} that moved"
