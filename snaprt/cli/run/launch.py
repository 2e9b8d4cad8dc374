"""``snaprt launch``: runs a program as the processes of one job, each under ``snaprt run``."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import click

from snaprt.cli import output
from snaprt.cli.run.command import ProgramCommand
from snaprt.cli.run.command import command as run_command
from snaprt.errors import UsageError
from snaprt.fleet.launch import Job, check_master, free_address, launch
from snaprt.snapshot.recorder.conditions import parse_conditions

_OF_RUN = [parameter for parameter in run_command.params if isinstance(parameter, click.Option)]


@click.command("launch", cls=ProgramCommand)
@click.option(
    *("-n", "--processes"), type=click.IntRange(min=1), default=1, metavar="N", show_default=True,
    help="Number of processes on this machine.",
)  # fmt: skip
@click.option(
    *("--devices-per-process", "devices"), type=click.IntRange(min=1), metavar="N",
    help="Devices per process: N virtual CPU devices, or a share of N GPUs.",
)  # fmt: skip
@click.option(
    "--nnodes", type=click.IntRange(min=1), default=1, metavar="N", show_default=True,
    help="Number of machines; run the command on each.",
)  # fmt: skip
@click.option(
    "--node-rank", type=click.IntRange(min=0), default=0, metavar="N", show_default=True,
    help="Index of this machine, starting at 0.",
)  # fmt: skip
@click.option(
    "--master", metavar="HOST:PORT", help="Address of the first machine, needed with --nnodes."
)
@click.pass_context
def command(
    context: click.Context,
    processes: int,
    devices: int | None,
    nnodes: int,
    node_rank: int,
    master: str | None,
    program: tuple[str, ...],
    when: tuple[str, ...],
    **options: Any,
) -> None:
    """Run a Python program as the processes of one job.

    Each process runs under `snaprt run` with the given options, and gets torchrun's variables:
    RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT.
    `jax.distributed.initialize()` needs no arguments. Each line of output starts with the rank that
    printed it. When a process fails, the others are stopped, its last output is repeated, and its
    exit status is that of the command. --metrics and --explain-json write one file per rank:
    run.json.0, run.json.1, ...

    \b
    Example:
      snaprt launch -n 4 -- train.py --epochs 3
      snaprt launch -n 2 --devices-per-process 4 --lazy --dump dump -- train.py
      snaprt launch -n 8 --nnodes 2 --node-rank 0 --master node0:29500 -- train.py
    """
    if node_rank >= nnodes:
        raise UsageError(
            f"--node-rank {node_rank} is out of range for --nnodes {nnodes}",
            hint="--node-rank starts at 0.",
        )
    if nnodes > 1 and master is None:
        raise UsageError(
            "--nnodes needs the address of the first machine",
            hint="Give each the same --master HOST:PORT.",
        )
    parse_conditions("; ".join(when))
    job = Job(
        processes=processes,
        master=check_master(master) if master else free_address(),
        nodes=nnodes,
        node_rank=node_rank,
        devices_per_process=devices,
    )
    given = list(output.given_options(context, _OF_RUN))

    def words(rank: int) -> list[str]:
        return [sys.executable, "-m", "snaprt", "run", *_words(given, rank), "--", *program]

    context.exit(launch(job, words))


command.params[-1:-1] = _OF_RUN


def _words(options: Sequence[tuple[click.Parameter, Sequence[str]]], rank: int) -> Iterator[str]:
    """Yield the options of ``snaprt run`` for one rank."""
    for option, words in options:
        if option.name == "explain_json":
            yield f"{'='.join(words)}.{rank}"
        else:
            yield from words
