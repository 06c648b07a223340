"""The planner's question, and the training time of its answer, as text. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from dtrain.framing import clean
from dtrain.parallelism.answer import explain, units
from dtrain.parallelism.cluster.hardware import GpuCluster
from dtrain.parallelism.cluster.probe import Measurement
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.question import Answer, Question, RunError, TrainingCost
from dtrain.wording import counted
from dtrain_cli.options import as_options
from dtrain_cli.views import names


def described(asked: Question, notes: Sequence[str]) -> list[tuple[str, str]]:
    """Return titles and texts: model, cluster and batch, each with its source, and notes."""
    entries = [
        ("Model", _model(asked.shape)),
        ("Cluster", _cluster(asked.cluster) + _source(asked.cluster_source)),
        ("Batch", _batch(asked) + _source(asked.batch_source)),
    ]
    if asked.probe is not None:
        entries += [
            ("Measured", _measured(one))
            for one in asked.probe.measurements(asked.cluster.gpu, asked.cluster.network)
        ]
        entries.append(("Stored", f"{clean(asked.probe.path)}, for --calibrate"))
    entries += [("Learned", _calibration(one)) for one in asked.calibration]
    return [*entries, *(("Note", as_options(clean(note))) for note in notes)]


def _model(shape: Shape) -> str:
    head = f"{clean(shape.name)}, " if shape.name else ""
    head += f"{units.large(shape.parameters)} parameters"
    if shape.active_parameters != shape.parameters:
        head += f" ({units.large(shape.active_parameters)} active)"
    parts = [f"{head}: {shape.layers} layers{explain.kinds(shape)} of hidden size {shape.hidden:,}"]
    if shape.heads:
        parts.append(f"{shape.heads} heads ({shape.kv_heads} for keys and values)")
    if shape.ffn_hidden:
        parts.append(f"MLP {shape.ffn_hidden:,}{' (gated)' if shape.gated else ''}")
    if shape.experts:
        parts.append(f"{shape.experts} experts, {shape.experts_per_token} for each token")
    parts.append(f"{'outputs' if shape.input_parameters else 'vocabulary'} {shape.vocab:,}")
    parts.append(f"sequences of {shape.seq_len:,} tokens")
    model = ", ".join(parts)
    if shape.target_len:
        model += f" with {shape.target_len:,} targets"
    if (lora := shape.lora) is not None:
        where = "all matrices" if lora.adapts_mlp else "attention"
        model += (
            f"; frozen in {lora.base_bits} bits, with adapters of rank {lora.rank} in {where}: "
            f"{units.large(shape.trained_parameters)} trained parameters"
        )
    return model


def _cluster(cluster: GpuCluster) -> str:
    gpus = f"{cluster.gpus:,} × {cluster.gpu.name}"
    if cluster.hosts == 1:
        return f"{gpus} in one host" if cluster.gpus > 1 else gpus
    hosts = (
        f"{gpus} in {cluster.hosts:,} hosts of {cluster.gpus_per_host}, "
        f"{_gbps(cluster.network)} between hosts"
    )
    if not cluster.rack_hosts:
        return hosts
    return (
        f"{hosts}, {_gbps(cluster.between_racks)} of a host between racks of {cluster.rack_hosts}"
    )


def _gbps(speed: float) -> str:
    """Measured speeds have many digits."""
    return f"{round(speed * 8, 2):g} Gb/s"


def _batch(asked: Question) -> str:
    tokens = units.large(asked.global_batch * asked.shape.seq_len)
    states = ", states too" if asked.narrow_states else ""
    sequences = counted(asked.global_batch, "sequence")
    return f"{sequences} = {tokens} tokens a step, in {asked.precision}{states}"


def _measured(one: Measurement) -> str:
    text = f"{one.what}: {one.value:.3g} {one.unit}"
    if one.catalogue is None:
        return text
    share = units.percent(one.value / one.catalogue)
    return f"{text}, {share} of the {one.catalogue:.4g} in the catalogue"


def _calibration(error: RunError) -> str:
    estimates = [("before", error.before_s), ("after", error.after_s)]
    if error.unseen_s is not None:
        estimates.append(("from the other runs alone", error.unseen_s))
    texts = (
        f"{units.seconds(estimate)} {how} ({(estimate / error.measured_s - 1) * 100:+.0f} %)"
        for how, estimate in estimates
    )
    return (
        f"a step of run {clean(error.run)} took {units.seconds(error.measured_s)}; estimated: "
        f"{', '.join(texts)}"
    )


def _source(text: str) -> str:
    return f" ({as_options(clean(text))})" if text else ""


def training_time(answer: Answer) -> str:
    """Return how long training on the given number of tokens takes; empty without a number."""
    training, cluster = answer.training(answer.best), answer.question.cluster
    if not training:
        return ""
    machines = counted(cluster.hosts, "host") if cluster.gpu.is_cpu else cluster.devices
    return (
        f"{units.large(training.tokens)} tokens take {_days(training.days)} on {machines}: "
        f"{counted(training.steps, 'step')}, {_hours(cluster, training.gpu_hours)}, "
        f"if nothing fails. {_failures(cluster, training)}{_energy(answer, training)}"
    )


def _hours(cluster: GpuCluster, gpu_hours: float) -> str:
    """Of GPUs; of whole hosts, if processes are what shares them."""
    if cluster.gpu.is_cpu:
        return f"{units.amount(gpu_hours * cluster.hosts / cluster.gpus)} host-hours"
    return f"{units.amount(gpu_hours)} {cluster.gpu.unit}-hours"


def _days(days: float) -> str:
    """``182 days``, ``4 h 30 min``."""
    return f"{units.amount(days)} days" if days >= 1 else names.duration(days * 86400)


def _energy(answer: Answer, training: TrainingCost) -> str:
    if training.energy_mwh is None or not math.isfinite(training.energy_mwh):
        return ""
    energy, unit = training.energy_mwh, "MWh"
    if energy < 1:
        energy, unit = energy * 1000, "kWh"
    return (
        f" The {answer.question.cluster.gpu.unit}s use at most {units.amount(energy)} {unit}, at "
        f"{answer.question.cluster.gpu.watts:g} W each; hosts, network and cooling come on top."
    )


def _failures(cluster: GpuCluster, training: TrainingCost) -> str:
    """Return what failures add to a training."""
    found = training.with_failures
    rate = f"{found.failures_per_1000_node_days:.2g} per 1,000 node-days"
    if not cluster.gpu.is_cpu:
        rate += " of 8 GPUs"
    source = f", the rate of {found.source.partition(' (')[0]}" if found.source else ""
    often = f"a failure every {names.duration(found.seconds_between_failures)} ({rate}{source})"
    if not math.isfinite(found.days):
        return f"With {often}, it never ends: it fails before it saves a checkpoint."
    least, most = map(_days, (found.days_at_least, found.days_at_most))
    spread = ""
    if not math.isfinite(found.days_at_most):
        spread = f" ({least} with the lowest published rate, no end with the highest)"
    elif least != most:
        if most.endswith(" days"):
            least, most = least.removesuffix(" days"), most.removesuffix(" days")
        spread = f" ({least} to {most} with other published rates)"
    save = names.duration(math.ceil(found.save_s))
    price = "" if training.price is None else f" at a price of {units.amount(training.price)}"
    return (
        f"With failures, expect {_days(found.days)}{spread} and "
        f"{_hours(cluster, found.gpu_hours)}{price}, a goodput of "
        f"{found.goodput * 100:.1f} %: {often}, "
        f"{names.duration(found.restart_s)} until it trains again, and a checkpoint of "
        f"{units.amount(found.checkpoint_gb)} GB, saved in {save}, every "
        f"{names.duration(found.interval_s)}."
    )
