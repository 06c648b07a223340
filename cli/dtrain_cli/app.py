"""The command line: verbs, the error boundary, exit codes.

Each verb's work is imported when it is called, so that `dtrain --help` stays fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

app = typer.Typer(
    name="dtrain",
    help="Launch multi-node training over SSH from one YAML file.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Help in plain text: rich would double the time that it takes to show.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=(
        "Exit codes: 0 done, 1 the job failed, 2 usage or invalid file, 3 a node or the"
        " preflight failed, 70 internal error, 130 interrupted."
    ),
)


def _version(wanted: bool) -> None:
    if wanted:
        from dtrain import __version__

        typer.echo(f"dtrain {__version__}")
        raise typer.Exit


@app.callback()
def main_options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """Options before the verb."""


@app.command()
def launch(
    file: Annotated[Path, typer.Argument(help="The cluster file.", metavar="FILE")],
    args: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments for the script, after --.", metavar="ARGS"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be started; touch no host.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --dry-run: write a script and its environment for each process.",
            metavar="DIR",
        ),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="JSON: the plan of a dry run, or a line an event.")
    ] = False,
    rank: Annotated[
        str | None, typer.Option(help="Show only these ranks' output, e.g. 0,4-7.", metavar="RANKS")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(help="Show only these hosts' output, e.g. gpu[01-03].", metavar="HOSTS"),
    ] = None,
    fold: Annotated[
        bool, typer.Option("--fold", help="Show a line that several ranks write alike once.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Bring the job's TensorBoard to this machine.")
    ] = False,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Go on in the background once it runs.")
    ] = False,
    no_check: Annotated[
        bool, typer.Option("--no-check", help="Start without looking for faults of the hosts.")
    ] = False,
) -> None:
    """Start a job on all its hosts, stream its output, and clean up."""
    from dtrain.diagnostics import UsageError
    from dtrain_cli.commands import launch as command

    options = command.Options(
        file, tuple(args or ()), json, fold, rank, host, tensorboard, detach, check=not no_check
    )
    if output is not None and not dry_run:
        raise UsageError("--output is for --dry-run", hint="add --dry-run")
    if dry_run:
        if rank is not None or host is not None or fold:
            raise UsageError("--rank, --host and --fold choose output, which a dry run has none of")
        _print(command.dry_run(options, output))
    else:
        raise typer.Exit(command.launch(options))


@app.command()
def attach(
    run: Annotated[str, typer.Argument(help="A run, or how its name begins.", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json", help="A line of JSON for each event.")] = False,
    fold: Annotated[
        bool, typer.Option("--fold", help="Show a line that several ranks write alike once.")
    ] = False,
) -> None:
    """Watch a run that was launched before; Ctrl-C leaves it running."""
    from dtrain_cli.commands import attach as command

    raise typer.Exit(command.attach(command.Options(run, json, fold)))


@app.command()
def ps(
    run: Annotated[
        str | None, typer.Argument(help="One run, with its hosts.", metavar="[RUN]")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
    everything: Annotated[
        bool, typer.Option("--all", "-a", help="All runs, not only what runs and the latest.")
    ] = False,
) -> None:
    """List the runs of this machine."""
    from dtrain_cli.commands import ps as command

    _print(command.ps(run, json=json, everything=everything))


@app.command()
def logs(
    run: Annotated[str, typer.Argument(help="A run, or how its name begins.", metavar="RUN")],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on as output comes, until the run is over.")
    ] = False,
    rank: Annotated[
        str | None, typer.Option(help="Only these ranks' output, e.g. 0,4-7.", metavar="RANKS")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Only these hosts' output.", metavar="HOSTS")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="Only what came in this time, e.g. 10m.", metavar="TIME")
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="A line of JSON for each line.")] = False,
    fold: Annotated[
        bool, typer.Option("--fold", help="Show a line that several ranks write alike once.")
    ] = False,
) -> None:
    """Show what a run's workers have written."""
    from dtrain.diagnostics import UsageError
    from dtrain.messages.decode import excerpt
    from dtrain.spec.schema import seconds
    from dtrain_cli.commands import logs as command

    age = None if since is None else seconds(since)
    if since is not None and age is None:
        raise UsageError(
            f"--since {excerpt(since)}: no duration", hint="write e.g. 30s, 10m or 1h30m"
        )
    options = command.Options(run, follow, json, fold, rank, host, age)
    raise typer.Exit(command.logs(options))


@app.command()
def stop(
    run: Annotated[str, typer.Argument(help="A run, or how its name begins.", metavar="RUN")],
    force: Annotated[bool, typer.Option("--force", help="Kill at once, without TERM.")] = False,
) -> None:
    """End a run on all its hosts."""
    from dtrain_cli.commands import stop as command

    raise typer.Exit(command.stop(command.Options(run, force)))


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(help="A cluster file: its hosts, GPUs and network.", metavar="[FILE]"),
    ] = None,
    model_size: Annotated[
        str | None,
        typer.Option(help="Model: a sensible one of that many parameters.", metavar="100B"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model: a well-known one.", metavar="NAME")
    ] = None,
    model_config: Annotated[
        Path | None,
        typer.Option(help="Model: a Hugging Face config.json.", metavar="FILE"),
    ] = None,
    layers: Annotated[int | None, typer.Option(help="Model: its layers.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Model: its hidden size.")] = None,
    heads: Annotated[int | None, typer.Option(help="Model: attention heads.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="Model: heads of keys and values.")] = None,
    ffn_hidden: Annotated[
        int | None, typer.Option(help="Model: inner width of its MLP, or of one expert.")
    ] = None,
    experts: Annotated[int | None, typer.Option(help="Model: experts of each layer.")] = None,
    experts_per_token: Annotated[
        int | None, typer.Option(help="Model: experts that one token uses.")
    ] = None,
    vocab: Annotated[int | None, typer.Option(help="Words of its vocabulary.")] = None,
    seq_len: Annotated[int | None, typer.Option(help="Tokens in one sequence.")] = None,
    global_batch: Annotated[
        int | None, typer.Option(help="Sequences in one step; about 4M tokens if absent.")
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Tokens to train on: shows days and GPU-hours.", metavar="2T"),
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp8 or fp32.", metavar="NAME")
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="Where: GPUs in all.")] = None,
    gpu: Annotated[
        str | None, typer.Option(help="Where: kind of GPU, such as h100-80gb.", metavar="NAME")
    ] = None,
    gpus_per_host: Annotated[int | None, typer.Option(help="Where: GPUs of one host.")] = None,
    network_gbps: Annotated[
        float | None,
        typer.Option(help="Where: Gb/s of one host, all its NICs together."),
    ] = None,
    hardware: Annotated[
        Path | None, typer.Option(help="JSON table of GPUs of your own.", metavar="FILE")
    ] = None,
    calibrate: Annotated[
        Path | None, typer.Option(help="JSON of measured efficiencies.", metavar="FILE")
    ] = None,
    tensor: Annotated[int | None, typer.Option(help="Only: GPUs that split a layer.")] = None,
    pipeline: Annotated[int | None, typer.Option(help="Only: pipeline stages.")] = None,
    virtual_pipeline: Annotated[int | None, typer.Option(help="Only: pieces of a stage.")] = None,
    context: Annotated[int | None, typer.Option(help="Only: GPUs that split a sequence.")] = None,
    expert: Annotated[int | None, typer.Option(help="Only: GPUs that share experts.")] = None,
    data: Annotated[int | None, typer.Option(help="Only: data ranks.")] = None,
    sharding: Annotated[
        str | None,
        typer.Option(help="Only: none, optimizer, gradients, full or hybrid.", metavar="KIND"),
    ] = None,
    micro_batch: Annotated[
        int | None, typer.Option(help="Only: sequences in a micro-batch.")
    ] = None,
    recompute: Annotated[
        str | None, typer.Option(help="Only: none, selective or full.", metavar="KIND")
    ] = None,
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="Only: with (without) sequence parallelism beside tensor parallelism.",
        ),
    ] = None,
    offload: Annotated[
        bool | None,
        typer.Option(
            "--offload/--no-offload",
            help="Only: with (without) the optimizer in the hosts' memory.",
        ),
    ] = None,
    framework: Annotated[
        str | None,
        typer.Option(help="torch or tensorflow; else FILE's, or torch.", metavar="NAME"),
    ] = None,
    top: Annotated[int, typer.Option(help="Layouts to compare.")] = 8,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(help="Write the best layout into this cluster file.", metavar="FILE"),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts.", metavar="FILE")
    ] = None,
) -> None:
    """Choose how to split a model over a cluster: memory, speed, and why.

    Name the model in one way: --model-size, --model, --model-config, or --layers and --hidden.
    Options go before FILE's values; with neither, the cluster is 8 hosts of 8 A100-80GB. What is
    marked "Only" narrows the search; with all of it fixed, that one layout is evaluated.
    """
    from dtrain_cli.commands import plan as command

    sizes = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn_hidden": ffn_hidden,
        "experts": experts,
        "experts_per_token": experts_per_token,
    }
    fixed = {
        "tensor": tensor,
        "pipeline": pipeline,
        "virtual_pipeline": virtual_pipeline,
        "context": context,
        "expert": expert,
        "data": data,
        "sharding": sharding,
        "micro_batch": micro_batch,
        "recompute": recompute,
        "sequence_parallel": sequence_parallel,
        "offload": offload,
    }
    _print(
        command.plan(
            command.Options(
                file=file,
                model_size=model_size,
                model=model,
                model_config=model_config,
                sizes=sizes,
                vocab=vocab,
                seq_len=seq_len,
                global_batch=global_batch,
                tokens=tokens,
                precision=precision,
                gpus=gpus,
                gpu=gpu,
                gpus_per_host=gpus_per_host,
                network_gbps=network_gbps,
                hardware=hardware,
                calibrate=calibrate,
                fixed={name: value for name, value in fixed.items() if value is not None},
                framework=framework,
                top=top,
                json=json,
                output=output,
                html=html,
            )
        )
    )


@app.command()
def check(
    file: Annotated[Path, typer.Argument(help="The cluster file.", metavar="FILE")],
    rendezvous: Annotated[
        bool,
        typer.Option("--rendezvous", help="Also start a real process group, and end it again."),
    ] = False,
    bandwidth: Annotated[
        bool,
        typer.Option("--bandwidth", help="Also measure how fast all-reduces and links are."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            help="With --bandwidth: write what `dtrain plan --calibrate` reads.", metavar="FILE"
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Find what would make a job fail, hang or crawl, on all hosts at once.

    Starts no job, but runs the setup lines and imports the framework as a launch would. Exit code 3
    says that a launch would fail, 0 that there is nothing worse than warnings.
    """
    from dtrain_cli.commands import check as command

    text, exit_code = command.check(command.Options(file, rendezvous, bandwidth, output, json))
    _print(text)
    raise typer.Exit(exit_code)


@app.command()
def init(
    file: Annotated[Path, typer.Argument(help="The file to write.", metavar="[FILE]")] = Path(
        "cluster.yaml"
    ),
    hosts: Annotated[
        str | None, typer.Option(help="The machines, e.g. gpu[01-08].", metavar="HOSTS")
    ] = None,
    framework: Annotated[
        str | None, typer.Option(help="torch or tensorflow.", metavar="NAME")
    ] = None,
    script: Annotated[str | None, typer.Option(help="The training script.", metavar="FILE")] = None,
    user: Annotated[
        str | None, typer.Option(help="Whom to log in as, if not ssh's choice.", metavar="NAME")
    ] = None,
    probe: Annotated[
        bool | None,
        typer.Option("--probe/--no-probe", help="Look at the hosts over SSH; else it is asked."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Write a first cluster file: asks for what is not given, and looks at the hosts."""
    from dtrain_cli.commands import init as command

    options = command.Options(file, hosts, framework, script, user, probe, force)
    _print(command.init(options))


@app.command()
def schema() -> None:
    """Print the cluster file's format as JSON Schema, for completion and checks in editors.

    Save it beside your cluster file and name it in the file's first line:

    # yaml-language-server: $schema=cluster.schema.json
    """
    from dtrain_cli.commands.schema import schema_json

    _print(schema_json())


def main() -> NoReturn:
    """Entry point of the `dtrain` command."""
    from dtrain_cli.standard import typed

    sys.stdout, sys.stderr = typed(sys.stdout), typed(sys.stderr)
    sys.exit(run())


def run() -> int:
    """Run the command line; every failure ends as a message and an exit code."""
    from dtrain.diagnostics import DtrainError, ExitCode, SpecError

    try:
        app()
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(bool(exit_.code))
    except SpecError as error:
        from dtrain.spec.report import render_problems

        _say(render_problems(error))
        return error.exit_code
    except DtrainError as error:
        _say(f"error: {error.message}")
        for line in error.hint.splitlines():
            _say(f"hint: {line}")
        return error.exit_code
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has left; there is nobody to tell.
        sys.stdout = None
        return ExitCode.INTERRUPTED
    except Exception:  # noqa: BLE001  the last boundary: no traceback of ours reaches a user
        _say(f"error: a fault in dtrain itself; please report the file {_crash_report()}")
        return ExitCode.INTERNAL
    return ExitCode.OK


def _print(text: str) -> None:
    """Write data to stdout: the same bytes whatever the locale."""
    typer.echo(text.encode(errors="surrogateescape"), nl=False)


def _say(text: str) -> None:
    """Print to stderr what may quote files and hosts: nothing in it reaches the terminal raw."""
    from dtrain.framing import clean

    if sys.stderr is not None:
        typer.echo("\n".join(clean(line) for line in text.split("\n")), err=True)


def _crash_report() -> str:
    import tempfile
    import traceback

    with tempfile.NamedTemporaryFile(
        "w", prefix="dtrain-fault-", suffix=".txt", delete=False
    ) as file:
        file.write(f"{' '.join(sys.argv)}\n\n{traceback.format_exc()}")
    return file.name
