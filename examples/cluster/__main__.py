"""``python -m examples.cluster``: two prefill workers, two decode workers and a gateway, until Ctrl-C."""

import argparse
import signal
import tempfile
from pathlib import Path

from serving.processes import Processes, interrupt_on_signals

CONFIGURATION = Path(__file__).parent / "cluster.toml"
PLACES = (
    ("prefill", "127.0.0.1:8501"),
    ("prefill", "127.0.0.1:8502"),
    ("decode", "127.0.0.1:8503"),
    ("decode", "127.0.0.1:8504"),
    ("gateway", "127.0.0.1:8500"),
)
SECONDS = 300.0
DESCRIPTION = f"""
Start two prefill workers, two decode workers and a gateway on this machine. Clients call the gateway at
{PLACES[-1][1]}; the workers listen at {PLACES[0][1]} and the next three ports. Ctrl-C ends all of them. There are no
other arguments: all five processes read {CONFIGURATION.name} beside this example.
"""


def note(line: str) -> None:
    print(line, flush=True)


def main() -> None:
    # Before anything is started: it may be that only the help is asked for.
    argparse.ArgumentParser(prog="python -m examples.cluster", description=DESCRIPTION).parse_args()
    interrupt_on_signals()
    options = ["--config", str(CONFIGURATION)]
    with tempfile.TemporaryDirectory() as directory, Processes(Path(directory), options, note) as processes:
        try:
            note(f"logs are in {directory} while the cluster runs")
            processes.start_all(PLACES, seconds=SECONDS)
            note(f"clients call {PLACES[-1][1]}; Ctrl-C ends the cluster")
            signal.pause()
        except KeyboardInterrupt:
            note("ending")


if __name__ == "__main__":
    main()
