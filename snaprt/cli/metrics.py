"""``snaprt metrics``: prints the metrics that a program saved."""

from __future__ import annotations

from pathlib import Path

import click

from snaprt import metrics
from snaprt.cli import output


@click.command("metrics")
@click.argument("file", type=output.PATH)
@click.option("--short", is_flag=True, help="Print only the most important metrics.")
@output.json_option
def command(file: Path, short: bool, as_json: bool) -> None:
    """Print the metrics that a program saved to FILE at exit.

    A program saves them if SNAPRT_METRICS_FILE or `snaprt run --metrics` names a file. The report
    has PyTorch/XLA's format: counts, totals, and rates and percentiles of the last 1,024 samples.

    \b
    Example:
      snaprt run --lazy --metrics run.json -- train.py
      snaprt metrics --short run.json
    """
    saved = metrics.load(file)
    chosen = metrics.short(saved) if short else saved
    if as_json:
        output.print_json(metrics.to_json(chosen))
    else:
        click.echo(metrics.metrics_report(chosen), nl=False)
