"""The command line: its verbs, the error boundary, exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup

VERBS = {
    "launch": "Start a job on all its hosts, stream its output, and clean up.",
    "attach": "Watch a run; Ctrl-C leaves it running.",
    "top": "Show what the hosts and GPUs of running jobs do.",
    "ps": "List the runs of this machine.",
    "report": "Show what a run did, where its time went, and whether its plan was right.",
    "logs": "Show the output of a run's workers.",
    "stacks": "Show where the workers of a run are now, by their Python stacks.",
    "stop": "Stop runs on all their hosts.",
    "exec": "Run a command on all hosts of a cluster file or of a run.",
    "plan": "Choose how to split a model over a cluster: memory, speed, and why.",
    "check": "Find what would make a job fail, hang or slow down.",
    "init": "Write a first cluster file from your answers.",
    "schema": "Print the JSON Schema of the cluster file, for editors.",
    "help": "Show a documentation page; without TOPIC, list the topics.",
}
"""Each verb is the function of that name in `dtrain_cli.commands.<verb>`. A test checks that each
summary equals the first line of the function's docstring."""

ELSEWHERE = {
    **dict.fromkeys(("run", "start", "submit"), "launch"),
    **dict.fromkeys(("ls", "list", "status"), "ps"),
    **dict.fromkeys(("kill", "cancel", "down"), "stop"),
    "tail": "logs",
    **dict.fromkeys(("py-spy", "dump", "stack", "debug"), "stacks"),
    "validate": "check",
    "ssh": "exec",
    **dict.fromkeys(("dry-run", "render", "export"), "launch --dry-run"),
    "sync": "launch",
}
"""What other tools call our verbs."""

SETTINGS_ELSEWHERE = {
    **dict.fromkeys(("--include", "--hosts"), "cluster.hosts=HOSTS"),
    **dict.fromkeys(
        ("--nodes", "--nnodes", "--num-nodes"),
        "cluster.hosts=HOSTS`, or on Slurm and Kubernetes `--set cluster.nodes=N",
    ),
    **dict.fromkeys(("--gpus", "--num-gpus", "--nproc-per-node"), "cluster.gpus=N"),
    **dict.fromkeys(("--env", "-x"), "job.env.NAME=VALUE"),
    "--max-restarts": "job.restart.max=N",
    "--master-port": "job.rendezvous.port=N",
}
"""What other launchers have as options of their launch, as values of --set."""

PLAIN: dict[str, Any] = {
    "pretty_exceptions_enable": False,
    # No rich help: rich doubles the time of `--help`.
    "rich_markup_mode": None,
    # Views decide on color. Typer knows neither NO_COLOR nor TERM=dumb.
    "context_settings": {"help_option_names": ["-h", "--help"], "color": False},
}


class Verbs(TyperGroup):
    """Imports a verb's module when the verb is called, so that `dtrain --help` stays fast."""

    _names_only = False

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in VERBS:
            return None
        if self._names_only:
            return TyperCommand(cmd_name, short_help=VERBS[cmd_name])
        verb = typer.Typer(add_completion=False, **PLAIN)
        verb.command(cmd_name)(getattr(import_module(f"dtrain_cli.commands.{cmd_name}"), cmd_name))
        return typer.main.get_command(verb)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Raises UsageError for an unknown verb."""
        if args[0] not in VERBS and not args[0].startswith("-") and not ctx.resilient_parsing:
            from dtrain.diagnostics import UsageError
            from dtrain.messages.decode import excerpt
            from dtrain.spec.problems import nearest

            close = ELSEWHERE.get(args[0]) or nearest(args[0], VERBS)
            raise UsageError(
                f"there is no command {excerpt(args[0])!r}",
                hint=(f"did you mean {close!r}? " if close else "") + "`dtrain --help` lists all",
            )
        return super().resolve_command(ctx, args)

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Offer the verbs without importing their modules."""
        self._names_only = True
        return super().shell_complete(ctx, incomplete)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(VERBS.items()))


app = typer.Typer(
    name="dtrain",
    cls=Verbs,
    help="Launch multi-node training from one YAML file: over SSH, on Slurm or on Kubernetes.",
    invoke_without_command=True,
    epilog=(
        "Exit codes: 0 done, 1 the job failed, 2 usage or invalid file, 3 a host or its"
        " check failed, 70 internal error, 130 interrupted, 141 the output was closed."
    ),
    **PLAIN,
)


def _version(wanted: bool) -> None:
    if wanted:
        from dtrain import __version__

        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Options before the verb. Without a verb, show where to start."""
    if ctx.invoked_subcommand is None:
        from dtrain.diagnostics import ExitCode
        from dtrain_cli.errors import say
        from dtrain_cli.welcome import welcome

        say(welcome())
        raise typer.Exit(ExitCode.INVALID)


def main() -> NoReturn:
    """Entry point of the `dtrain` command."""
    from dtrain_cli.standard import typed

    sys.stdout, sys.stderr = typed(sys.stdout), typed(sys.stderr)
    code = run()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # `run` has reported what it could not write
            if stream is not None:
                stream.flush()
    # Before 3.14, Python's own end kills daemon threads. Within a library in Rust, as that of the
    # ciphers, this aborts the process: "FATAL: exception not rethrown".
    os._exit(code)


def run() -> int:
    """Run the command line; every failure ends as a message and an exit code."""
    from dtrain.diagnostics import DtrainError, ExitCode, LimitError
    from dtrain_cli.errors import explain, say
    from dtrain_cli.standard import OutputClosedError

    if "_DTRAIN_COMPLETE" in os.environ:
        return _complete()
    try:
        code = app(prog_name="dtrain", standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except OutputClosedError as closed:
        return closed.exit_code
    except DtrainError as error:
        return explain(error)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except Exception as error:  # noqa: BLE001  the last boundary: users never see a traceback
        # Newer versions of Typer have a copy of click, with exceptions of their own.
        if hasattr(error, "format_message"):
            return _wrong_usage(error)
        if isinstance(error, FileNotFoundError) and _folder_is_gone():
            say("error: the current folder was removed\nhint: cd to another folder")
            return ExitCode.INVALID
        if limit := LimitError.of(error):
            return explain(limit)
        say(f"error: a bug in dtrain; please report {_crash_report(error)}")
        return ExitCode.INTERNAL
    return code if isinstance(code, int) else ExitCode.OK


def _folder_is_gone() -> bool:
    from pathlib import Path

    try:
        Path.cwd()
    except FileNotFoundError:
        return True
    return False


def _wrong_usage(error: Any) -> int:
    from dtrain.diagnostics import ExitCode
    from dtrain_cli.errors import say

    text, ctx = error.format_message(), getattr(error, "ctx", None)
    say(f"error: {text[:1].lower()}{text[1:].rstrip('.')}")
    params = ctx.command.params if ctx is not None else ()
    named = str(getattr(error, "option_name", "")).replace("_", "-")
    launches = ctx is not None and ctx.info_name in ("launch", "check")
    if launches and (setting := SETTINGS_ELSEWHERE.get(named)):
        say(f"hint: to replace a value of the cluster file, use `--set {setting}`")
    if any(param.nargs == -1 for param in params) and "option" in text:
        say("hint: options for your own program go after --")
    # click does not say in which command an option lacks its value.
    verb = next((f"dtrain {one}" for one in sys.argv[1:2] if one in VERBS), "dtrain")
    say(f"hint: `{ctx.command_path if ctx else verb} --help` shows the usage")
    return ExitCode.INVALID


def _complete() -> int:
    """Answer a shell that asks for values. A failure offers none: its message would end up within
    the line that the user types."""
    from dtrain_cli.completion import without_rich

    without_rich()
    try:
        app()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else 1
    except Exception:  # noqa: BLE001
        return 1
    return 0


def _crash_report(error: Exception) -> str:
    """What the user can report: the file with the traceback, if it can be written."""
    import tempfile
    import traceback

    text = f"{' '.join(sys.argv)}\n\n{traceback.format_exc()}"
    try:
        with tempfile.NamedTemporaryFile(
            "wb", prefix="dtrain-fault-", suffix=".txt", delete=False
        ) as file:
            file.write(text.encode(errors="backslashreplace"))
    except OSError as unwritable:
        return f"{error!r} (no file has the details: {unwritable.strerror})"
    return f"the file {file.name}"
