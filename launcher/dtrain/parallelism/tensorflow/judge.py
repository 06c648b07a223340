"""Evaluate every strategy of ``tf.distribute`` for a model on a cluster."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from dtrain.parallelism.answer.explain import brief
from dtrain.parallelism.answer.units import gib, large, seconds
from dtrain.parallelism.assumptions import Assumptions, communicator
from dtrain.parallelism.cluster.efficiency import of_gpu
from dtrain.parallelism.cluster.hardware import GIB, GpuCluster, Precision
from dtrain.parallelism.constraints import divisors
from dtrain.parallelism.cost.candidate import HEADROOM, Candidate
from dtrain.parallelism.cost.keras_memory import KerasMemory, Part, Way, on_gpu
from dtrain.parallelism.model.shape import Shape
from dtrain.parallelism.question import Question
from dtrain.parallelism.search import candidates, search
from dtrain.parallelism.tensorflow.balance import split
from dtrain.parallelism.tensorflow.verdict import Assignment, Placed, TensorFlowPlan, Verdict
from dtrain.records import dataclass
from dtrain.runtime.layout import Layout
from dtrain.wording import counted, plural


def answer(question: Question) -> TensorFlowPlan:
    """Evaluate every strategy of ``tf.distribute``.

    Strategies that keep variables in hosts' memory, which is unknown, are evaluated by their GPUs
    only, and state the memory that hosts need.
    """
    job = _Job(question.shape, question.cluster, question.global_batch, question.precision)
    verdicts = tuple(sorted(job.verdicts(), key=lambda verdict: not verdict.fits))
    held = verdicts[0].fits
    assignment = None if held or job.tpu else job.assignment()
    # Reads limit training with variables in hosts' memory, so mention torch.
    torch = None if (held and not verdicts[0].host_gib) or job.tpu else job.torch()
    return TensorFlowPlan(
        question,
        verdicts=verdicts,
        assignment=assignment,
        torch=torch,
        limit=job.limit,
        sentence=job.sentence(verdicts, assignment, torch),
        notes=tuple(job.notes(held)),
    )


@dataclass(frozen=True, slots=True)
class _Job:
    shape: Shape
    cluster: GpuCluster
    global_batch: int
    precision: Precision

    @property
    def limit(self) -> float:
        return self.cluster.gpu.memory * (1 - HEADROOM)

    @property
    def unit(self) -> str:
        """What a replica runs on: GPU, or chip."""
        return self.cluster.gpu.unit

    @property
    def units(self) -> str:
        return plural(2, self.unit)

    @property
    def tpu(self) -> bool:
        return self.cluster.gpu.family == "tpu"

    @property
    def gigabytes(self) -> float:
        """GiB of all parameters at one byte each."""
        return self.shape.parameters / GIB

    def verdicts(self) -> Iterator[Verdict]:
        """Yield the verdicts in order of preference."""
        hosts, local = self.cluster.hosts, self.cluster.gpus_per_host
        if self.tpu:
            yield self._copied("tpu", "each TPU chip", self.cluster.gpus)
            return
        if hosts > 1:
            where = f"each of the {self.cluster.devices}"
            yield self._copied("multi_worker_mirrored", where, self.cluster.gpus)
        each = f"each of the {local} {self.units}" if local > 1 else f"the {self.unit}"
        of_host = f"{each} of one host"
        if local > 1:
            yield self._copied("mirrored", of_host, local)
        yield self._copied("one_device", f"one {self.unit}", 1)
        if local == 1:
            yield self._copied("mirrored", of_host, 1)
        if hosts == 1:
            yield self._copied("multi_worker_mirrored", each, local)
        yield self._central(of_host)
        yield self._parameter_server()
        tpu = self._copied("tpu", "each TPU chip", self.cluster.gpus)
        yield replace(
            tpu,
            fits=False,
            reason=f"the cluster has no TPUs but {self.cluster.gpu.name} {self.units}",
        )

    def _way(self, replicas: int, *, variables: bool = True) -> tuple[Way, KerasMemory]:
        """Return the fastest way that fits, or the smallest: recomputing costs a third of
        the time, and small micro-batches less than that."""
        part = Part.whole(self.shape)
        tried = []
        for way in _ways(-(-self.global_batch // replicas)):
            memory = on_gpu(
                self.shape,
                part,
                way,
                self.precision,
                replicas=replicas,
                variables=variables,
                communicator=communicator(self.cluster.gpu),
            )
            if memory.total <= self.limit:
                return way, memory
            tried.append((way, memory))
        return min(tried, key=lambda one: one[1].total)

    def _copied(self, name: str, where: str, replicas: int) -> Verdict:
        """Evaluate a strategy in which every GPU holds the whole model and its optimizer."""
        way, memory = self._way(replicas)
        fits = memory.total <= self.limit
        states = 16 * self.gigabytes
        if fits:
            reason = f"{where} holds a whole copy in {memory.total:,.1f} of {self.limit:,.1f} GiB"
            reason += self._idle(replicas)
        else:
            reason = (
                f"{where} holds a whole copy: {states:,.0f} GiB of variables, Adam's slots and "
                f"gradients alone, {gib(memory.total)} in all; a {self.cluster.gpu.unit} has "
                f"{gib(self.limit)}"
            )
        if name == "tpu":
            reason += (
                "; not counted is what TPUStrategy.experimental_split_to_logical_devices "
                "can split by hand"
            )
        return Verdict(name, fits, where, way, memory, 0.0, reason)

    def _central(self, where: str) -> Verdict:
        """Evaluate variables on the host's CPU, or on the only GPU
        (``central_storage_strategy.py``).

        Optimizer slots are next to their variables, and gradients of all GPUs are summed there.
        """
        local = self.cluster.gpus_per_host
        if local == 1:
            alone = self._copied("central_storage", where, 1)
            stay = f"with one {self.unit} variables stay on it"
            return replace(alone, reason=f"{stay}: {alone.reason}")
        host = (12 + 4 * local) * self.gigabytes
        return self._read_from_hosts(
            "central_storage",
            where,
            local,
            host,
            f"one host's memory, which each of its {self.units} reads in every step",
        )

    def _parameter_server(self) -> Verdict:
        """Evaluate variables and slots in the memory of ps tasks, one on every host.

        Every worker sends its gradients, summed over its own GPUs. Each host receives its share
        from all workers.
        """
        hosts, local = self.cluster.hosts, self.cluster.gpus_per_host
        host = (12 / hosts + 4 + (4 * local if local > 1 else 0)) * self.gigabytes
        verdict = self._read_from_hosts(
            "parameter_server",
            f"each of the {self.cluster.devices}",
            self.cluster.gpus,
            host,
            f"the memory of {counted(hosts, 'parameter server')}, which every {self.unit} reads "
            "over the network in every step",
        )
        # fchollet in keras-team/keras issue 18624: "not supported in Keras 3".
        loop = "; asynchronous, and needs a training loop of your own (Keras 3 dropped it from fit)"
        return replace(verdict, reason=verdict.reason + loop)

    def _read_from_hosts(
        self, name: str, where: str, replicas: int, host: float, home: str
    ) -> Verdict:
        """Evaluate a strategy that keeps states in hosts' memory.

        The reads have no order, so a GPU may hold copies of all parameters and their gradients
        at once.
        """
        way, memory = self._way(replicas, variables=False)
        fits = memory.total <= self.limit
        reason = f"variables live in {home}: "
        if not fits:
            reason += (
                f"a copy of all of them and their gradients take {8 * self.gigabytes:,.0f} GiB of "
                f"it, {gib(memory.total)} with the rest; a {self.unit} has {gib(self.limit)}"
            )
        else:
            reason += (
                f"fits in {memory.total:,.1f} of {self.limit:,.1f} GiB if each host has "
                f"{host:,.0f} GiB, but is slow{self._idle(replicas)}"
            )
        return Verdict(name, fits, where, way, memory, host, reason)

    def _idle(self, replicas: int) -> str:
        others = self.cluster.gpus - replicas
        return f"; the other {counted(others, self.unit)} {'are' if others > 1 else 'is'} idle" * (
            others > 0
        )

    def assignment(self) -> Assignment | None:
        """Assign consecutive layers to the GPUs of one host, balanced by memory."""
        local = self.cluster.gpus_per_host
        if local == 1:
            return None
        least: Assignment | None = None
        for way in _ways(-(-self.global_batch // self.cluster.hosts)):
            placed = tuple(self._placed(way, local))
            fullest = max(one.memory.total for one in placed)
            if fullest <= self.limit:
                return Assignment(placed, way, fits=True)
            if least is None or fullest < least.fullest.memory.total:
                least = Assignment(placed, way, fits=False)
        return least

    def _placed(self, way: Way, gpus: int) -> Iterator[Placed]:
        """Yield layers, with the embedding before the first and the output layer after the last."""
        blocks = [Part(0, 0, head=False)]
        dense = self.shape.layers - self.shape.moe_layers
        blocks += [Part(1, 0, embedding=False, head=False)] * dense
        blocks += [Part(0, 1, embedding=False, head=False)] * self.shape.moe_layers
        blocks += [Part(0, 0, embedding=False)]
        weights = {block: self._weight(block, way) for block in set(blocks)}
        start = 0
        for gpu, count in enumerate(split([weights[block] for block in blocks], gpus)):
            own = blocks[start : start + count]
            part = Part(
                dense=sum(block.dense for block in own),
                moe=sum(block.moe for block in own),
                embedding=any(block.embedding for block in own),
                head=any(block.head for block in own),
            )
            memory = on_gpu(self.shape, part, way, self.precision)
            first = max(0, start - 1)
            yield Placed(gpu, first, part.layers, part.embedding, part.head, memory)
            start += count

    def _weight(self, block: Part, way: Way) -> float:
        memory = on_gpu(self.shape, block, way, self.precision)
        return memory.total - memory.context - memory.fragmentation - memory.temporary

    def torch(self) -> Candidate | None:
        gpu = self.cluster.gpu
        assumed = Assumptions.usual(self.precision, gpu, Layout().backend)
        every = candidates(
            self.shape, self.cluster, of_gpu(gpu), assumed, global_batch=self.global_batch
        )
        return search(every).best

    def sentence(
        self, verdicts: Sequence[Verdict], assignment: Assignment | None, torch: Candidate | None
    ) -> str:
        """Return the recommendation."""
        best = verdicts[0]
        size = f"{large(self.shape.parameters)} parameters"
        if best.fits:
            sentence = f"Use {best.name} for {size}{_how(best.way)}: {best.reason}."
            return sentence + (_torch(torch, f"keeps it on the {self.units}") if torch else "")
        if self.tpu:
            return f"TPUStrategy cannot hold {size}: {best.reason}."
        sentence = (
            f"No strategy of tf.distribute holds {size}, because none splits a layer or a stack "
            f"of layers: a whole copy takes {gib(_needs(verdicts, 'one_device'))} of the "
            f"{gib(self.limit)} of a {self.unit}"
        )
        if self.cluster.gpus_per_host > 1:
            central = _needs(verdicts, "central_storage")
            sentence += f", and with variables in the host's memory still {gib(central)}"
        sentence += "."
        if assignment is not None:
            sentence += " " + self._by_hand(assignment)
        if torch is not None:
            sentence += _torch(torch, "holds it")
        elif assignment is None or not assignment.fits:
            sentence += " torch does not hold it on this cluster either."
        return sentence

    def _by_hand(self, assignment: Assignment) -> str:
        local, hosts = self.cluster.gpus_per_host, self.cluster.hosts
        fullest = assignment.fullest.memory.total
        sentence = f"Split by hand over the {local} {self.units} of a host (tf.device), it "
        if not assignment.fits:
            return (
                f"{sentence}still needs {fullest:,.0f} GiB on the fullest {self.unit}"
                + (f", because each of the {hosts} hosts holds a whole copy" if hosts > 1 else "")
                + "."
            )
        sentence += f"fits in {fullest:,.0f} GiB{_how(assignment.way)}"
        sentence += f", but one {self.unit} computes at a time"
        if hosts > 1:
            sentence += f", and the {hosts} hosts must average gradients by themselves"
        return sentence + "."

    def notes(self, held: bool) -> Iterator[str]:
        if self.precision == "fp8":
            yield "Keras trains in fp8 by rounding inputs of Dense alone: counted as 16 bits."
        if self.precision == "nvfp4":
            yield "Keras does not train in nvfp4: counted as bf16."
        if held or self.tpu:
            return
        each = 16 * self.gigabytes / self.cluster.gpus
        yield (
            f"tf.experimental.dtensor can split variables over all {self.cluster.devices} "
            f"({each:,.1f} GiB of states each) in a script written for it, op by op. It is not "
            "offered: the API is still experimental, Keras 3 does not build on it, and "
            "keras.distribution.ModelParallel runs on TensorFlow without splitting anything."
        )
        if self.cluster.hosts > 1:
            yield (
                f"tf.device can also name {self.units} of other hosts (tf.config."
                "experimental_connect_to_cluster), but activations then travel by gRPC, and one "
                f"{self.unit} in {self.cluster.gpus} computes at a time: not offered either."
            )


def _torch(candidate: Candidate, can: str) -> str:
    unit = candidate.cluster.gpu.unit
    return (
        f" torch {can}: {brief(candidate)}, {gib(candidate.memory.total)} on the fullest {unit} "
        f"and about {seconds(candidate.time.total)} a step."
    )


def _needs(verdicts: Sequence[Verdict], name: str) -> float:
    return next(verdict.memory.total for verdict in verdicts if verdict.name == name)


def _ways(sequences: int) -> Iterator[Way]:
    """Yield the ways to pass this number of sequences through one replica, fastest first."""
    for recompute in ("none", "full"):
        for micro_batch in reversed(divisors(sequences)):
            yield Way(micro_batch, sequences // micro_batch, recompute)


def _how(way: Way) -> str:
    sentence = f", {counted(way.micro_batch, 'sequence')} at a time"
    if way.grad_accumulation > 1:
        sentence += f", {way.grad_accumulation} times a step"
    return sentence + (", with keras.RematScope" if way.recompute == "full" else "")
