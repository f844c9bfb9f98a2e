"""The ``deepinfer-jax`` command: finds its subcommands, and turns errors into sentences and exit codes.

Subcommands are the click commands of the entry-point group ``deepinfer_jax.commands``, so that other packages add their
own. The library's own subcommands are there in any case: ``python -m deepinfer_jax.cli`` works from a source tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType

import click

from deepinfer_jax import __version__
from deepinfer_jax.commands.settings import start_with_settings
from deepinfer_jax.errors import DeepInferError

COMMAND_GROUP = "deepinfer_jax.commands"
BUILT_IN: Mapping[str, str] = MappingProxyType(
    {
        name: f"deepinfer_jax.commands.{name}:command"
        for name in ("bench", "convert", "generate", "inspect", "logits", "synthesize")
    }
)
# What a shell reports for a program that ended by SIGINT: 128 + 2.
INTERRUPTED = 130

EPILOG = """
\b
Examples:
  deepinfer-jax inspect --preset v4.1-flash
  deepinfer-jax generate --prompt 'def main(argv=None):' --temperature 0
  deepinfer-jax generate --model MODEL --messages chat.json
  deepinfer-jax logits --model MODEL --token-ids 0,17,25 --out logits.npz
  deepinfer-jax synthesize --preset mini-40 MODEL
  deepinfer-jax convert MODEL CONVERTED
  deepinfer-jax bench model --preset peer-50m --batch 8

Commands that take --model use the small trained model that comes with the library where none is named.

\b
Exit codes:
  0    done
  1    a file could not be read or written
  2    an option, a prompt or a file of the request is not accepted
  3    the model's configuration is not accepted
  4    the checkpoint is incomplete or does not fit its configuration
  130  interrupted

\b
Environment:
  GLIBC_TUNABLES             set to a faster allocation unless it is there, even empty
  JAX_COMPILATION_CACHE_DIR  where compiled steps are kept between runs; empty: nowhere
                             [default: ~/.cache/deepinfer-jax/compiled]

Every command has a --help of its own.
"""


def command_entries() -> dict[str, EntryPoint]:
    """Every subcommand by name, not yet imported; installed entry points win over the built-in ones."""
    built_in = {name: EntryPoint(name, place, COMMAND_GROUP) for name, place in BUILT_IN.items()}
    return built_in | {entry.name: entry for entry in entry_points(group=COMMAND_GROUP)}


class SentenceGroup(click.Group):
    """A command group whose refused values end it with one sentence and the exit code of the error's kind."""

    def invoke(self, ctx: click.Context) -> object:
        """Run the subcommand."""
        try:
            return super().invoke(ctx)
        except DeepInferError as error:
            click.echo(f"Error: {error}", err=True)
            return ctx.exit(error.exit_code)
        except OSError as error:
            # Without a file name it is a closed pipe, which click ends without a word.
            if error.filename is None:
                raise
            click.echo(f"Error: {error.filename}: {error.strerror}", err=True)
            return ctx.exit(1)
        except KeyboardInterrupt:
            return ctx.exit(INTERRUPTED)


class CommandGroup(SentenceGroup):
    """The subcommands found by :func:`command_entries`, imported when they are used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted(command_entries())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        entry = command_entries().get(cmd_name)
        if entry is None:
            return None
        loaded: click.Command = entry.load()
        return loaded


@click.group(cls=CommandGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="deepinfer-jax")
def main() -> None:
    """Inference for DeepSeek-V4.1-Flash and models of its architecture, in JAX/XLA."""


def run() -> None:
    """The installed program: :func:`main` in a process with the settings of :mod:`deepinfer_jax.commands.settings`."""
    start_with_settings()
    main()


if __name__ == "__main__":
    run()
