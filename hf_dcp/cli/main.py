"""The commands of `hf-dcp`, and how bad arguments are reported: one line on standard error, exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import typer

COMMANDS = {
    "plan": "hf_dcp.cli.plan:plan",
    "selftest": "hf_dcp.cli.selftest:selftest",
    "env": "hf_dcp.cli.env:env",
    "estimate": "hf_dcp.cli.estimate:estimate",
    "view": "hf_dcp.cli.view:view",
    "bench": "hf_dcp.cli.bench:app",
}
"""Where each command's function, or group of commands, is. Only what is asked for is imported: `plan` must not wait
for torch."""

UsageError = typer.BadParameter.__bases__[0]
"""What wrong arguments raise. Typer carries its own copy of click in some versions, and uses click in others."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command and leave the process with its exit status."""
    sys.exit(run(sys.argv[1:] if argv is None else list(argv)))


def run(argv: list[str]) -> int:
    """Run one command: its exit status, 2 after one line about wrong arguments."""
    name = argv[0] if argv else "--help"
    if not name.startswith("-") and name not in COMMANDS:
        return fail("hf-dcp", f"there is no command {name!r}: use one of {', '.join(COMMANDS)}")
    command = typer.main.get_command(make_app([name] if name in COMMANDS else list(COMMANDS)))
    prefix = f"hf-dcp {name}" if name in COMMANDS else "hf-dcp"
    try:
        status = command.main(argv or ["--help"], prog_name="hf-dcp", standalone_mode=False)
    except UsageError as error:  # type: ignore[misc]
        return fail(prefix, explain(error))
    except ValueError as error:
        return fail(prefix, str(error))
    return status if isinstance(status, int) else 0


def make_app(names: Sequence[str]) -> typer.Typer:
    """The application with the named commands."""
    app = typer.Typer(
        help="Dynamic Context Parallelism: would it help, what would it do, is it right here?", add_completion=False
    )
    app.callback()(_no_options)
    for name in names:
        module, _, function = COMMANDS[name].partition(":")
        target = getattr(import_module(module), function)
        if isinstance(target, typer.Typer):
            app.add_typer(target, name=name)
        else:
            app.command(name)(target)
    return app


def explain(error: Exception) -> str:
    """One sentence that says what is wrong with the arguments and what to write instead."""
    message = " ".join(error.format_message().split()).rstrip(".")  # type: ignore[attr-defined]
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoSuchOption" and context is not None:
        known = [name for parameter in context.command.params for name in parameter.opts if name.startswith("--")]
        return f"{message}: use one of {', '.join(known)}"
    if type(error).__name__ == "BadParameter":
        for word, wanted in (("integer", "an integer, such as 4"), ("number", "a number, such as 0.1")):
            if word in message or (word == "number" and "float" in message):
                return f"{message}: write {wanted}"
    return f"{message}: see --help"


def fail(prefix: str, message: str) -> int:
    """Report wrong arguments on one line of standard error: 2."""
    print(f"{prefix}: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _no_options() -> None:
    """Keeps the name of a command necessary, also where only one is loaded."""
