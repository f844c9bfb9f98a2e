"""``python -m tests.campaigns.cancels``: thousands of cancels at a cluster of processes; nothing may leak or grow.

A prefill worker whose states pass through a network that can be held, one whose states lie in files, a decode worker,
and a gateway over each pair. At least a tenth of the cancels come while the request is certainly queued, as many while
it is computed, while its state is handed over, and while it is answered.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import click

from tests.campaigns.cancelling import STAGES, Cancelling, LeakError, Sample
from tests.serving.bad_network import BadNetwork
from tests.serving.process_clusters import (
    TWO_WAYS_CONFIGURATION,
    TWO_WAYS_CONTEXT,
    TWO_WAYS_SLOTS,
    make_model,
    running_cluster,
    two_ways,
)

WAVES = {"queued": 64, "transferring": 32, "decoding": TWO_WAYS_SLOTS, "anywhere": 24}
# Of all cancels; what is left comes at random.
SHARE = 0.15
SAMPLED_EVERY = 250
# Of the cancels, after which processes are warm.
WARM = 0.2
# MiB that a process may grow by from then on: allocators do not give everything back.
MOST_GROWTH = 32.0
# Files and threads, which come and go with connections.
MOST_HANDLES = 8


async def cancel(campaign: Cancelling, cancels: int, waves: dict[str, int] = WAVES) -> None:
    """Cancel so many requests, a share of them in each stage, and look for leaks behind each wave."""
    least, told = int(SHARE * cancels), 0
    while campaign.total < cancels:
        stage = min(STAGES, key=lambda stage: campaign.cancelled[stage])
        if campaign.cancelled[stage] >= least:
            stage = "anywhere"
        if stage in ("queued", "computing"):
            # Those that are queued wait behind those that are computed.
            await campaign.queued_and_computing(waves["queued"] if stage == "queued" else 1)
        else:
            await getattr(campaign, stage)(waves[stage])
        due = campaign.total >= told + SAMPLED_EVERY
        await campaign.check(answers=due)
        if due:
            told = campaign.total
            click.echo(line(campaign.sample(), campaign), err=True)


def line(sample: Sample, campaign: Cancelling) -> str:
    """A sample for people."""
    sizes = ", ".join(
        f"{name} {sample.resident[name]:.0f} MiB {sample.files[name]} files {sample.threads[name]} threads"
        for name in sample.resident
    )
    return f"{sample.cancels} {dict(campaign.cancelled)}: {sizes}"


def growth(samples: list[Sample]) -> dict[str, tuple[float, int, int]]:
    """By how much each process grew between the first fifth and the end: MiB, files, threads."""
    early = next(sample for sample in samples if sample.cancels >= WARM * samples[-1].cancels)
    last = samples[-1]
    return {
        name: (
            last.resident[name] - early.resident[name],
            last.files[name] - early.files[name],
            last.threads[name] - early.threads[name],
        )
        for name in last.resident
    }


def faults(campaign: Cancelling, cancels: int, statuses: dict[str, int]) -> list[str]:
    """What must not be."""
    found = [
        f"{stage}: {campaign.cancelled[stage]} cancels, wanted at least {cancels // 10}"
        for stage in STAGES
        if campaign.cancelled[stage] < cancels // 10
    ]
    found += [f"{name} ended with status {status}" for name, status in statuses.items() if status]
    for name, (size, files, threads) in growth(campaign.samples).items():
        if size > MOST_GROWTH:
            found.append(f"{name} grew by {size:.0f} MiB")
        if files > MOST_HANDLES or threads > MOST_HANDLES:
            found.append(f"{name} has {files} files and {threads} threads more")
    return found


async def run(directory: Path, cancels: int, seed: int) -> tuple[Cancelling, dict[str, int]]:
    """A whole campaign. Gives it and the statuses with which its processes ended."""
    model = make_model(directory, TWO_WAYS_CONTEXT)
    place = directory / "c"
    place.mkdir()
    with (
        BadNetwork(place / "p") as network,
        running_cluster(place, model, two_ways(network), TWO_WAYS_CONFIGURATION) as cluster,
    ):
        await asyncio.to_thread(cluster.ensure)
        async with Cancelling(cluster, network, seed) as campaign:
            await cancel(campaign, cancels)
            campaign.sample()
        # A call that was left open would keep its process from ending in time.
        statuses = {name: cluster.running[name].stop() for name in reversed(cluster.members)}
    return campaign, statuses


@click.command()
@click.option("--cancels", type=int, default=10_000, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
def main(cancels: int, seed: int) -> None:
    """Print a table; ends with status 1 if anything leaked, grew or was wrong."""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cancels-") as directory:
        try:
            campaign, statuses = asyncio.run(run(Path(directory), cancels, seed))
        except LeakError as error:
            raise click.ClickException(str(error)) from error
    click.echo(f"{campaign.total} cancels in {time.monotonic() - begin:.0f} s, {campaign.missed} ended before")
    for stage in (*STAGES, "anywhere"):
        click.echo(f"{stage:<14}{campaign.cancelled[stage]:>7}")
    last = campaign.samples[-1]
    for name, (size, files, threads) in growth(campaign.samples).items():
        click.echo(f"{name:<14}{last.resident[name]:>7.0f} MiB, {size:+.1f} MiB, {files:+} files, {threads:+} threads")
    for fault in faults(campaign, cancels, statuses):
        raise click.ClickException(fault)


if __name__ == "__main__":
    main()
