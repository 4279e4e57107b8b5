"""`sideline completion`: the script that teaches a shell our commands."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from sideline.cli import main

_HELP = """Print the script that completes sideline's commands in your SHELL.

\b
  bash   sideline completion bash >> ~/.bashrc
  zsh    sideline completion zsh >> ~/.zshrc
  fish   sideline completion fish > ~/.config/fish/completions/sideline.fish
"""


@click.command(help=_HELP, short_help="Shell completion.")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the completion script."""
    script = get_completion_class(shell)
    if script is None:  # pragma: no cover - click knows all three
        raise click.UsageError(f"click cannot complete in {shell}.")
    click.echo(script(main.cli, {}, main.PROGRAM, main.COMPLETION_VARIABLE).source())
