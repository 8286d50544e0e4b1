"""Write answers and metrics into the journals, in batches, in a thread.

Answers and metrics are delivered only after they are on disk. If a journal cannot be written, the
coordinator ends; the engines still hold everything that was not committed.
"""

import asyncio

from holdfast.evaluate.coordinator.kept_metrics import Records
from holdfast.evaluate.coordinator.models import Models
from holdfast.evaluate.coordinator.open_requests import OpenSample
from holdfast.evaluate.coordinator.sample_queue import SampleQueue
from holdfast.evaluate.wire import messages
from holdfast.evaluate.wire.server import Connection

Measured = tuple[OpenSample, Records, bytes]
"""A sample, the journal records of its metric, and the metric's result."""


class Commits:
    """Queue answers and metrics, and commit them in batches.

    Args:
        models: the models, with the journals of answers and metrics.
        samples: receives the answers and metrics once they are committed.
    """

    def __init__(self, models: Models, samples: SampleQueue) -> None:
        self._models, self._samples = models, samples
        self._dones: list[tuple[Connection, messages.Done]] = []
        self._metrics_done: list[Measured] = []
        self._wanted = asyncio.Event()
        self._writing = asyncio.Lock()

    def add(self, peer: Connection, message: messages.Done) -> None:
        """Queue an engine's answers; the engine receives `Acked` after the commit."""
        self._dones.append((peer, message))
        self._wanted.set()

    def add_metric(self, sample: OpenSample, records: Records, measured: bytes) -> None:
        """Queue a metric with its journal records."""
        self._metrics_done.append((sample, records, measured))
        self._wanted.set()

    def journal_opened(self) -> None:
        """Wake `wait`, since queued answers can be committed once a model's journal is open."""
        self._wanted.set()

    async def wait(self) -> None:
        """Wait until there is something to commit."""
        await self._wanted.wait()
        self._wanted.clear()

    async def commit(self) -> None:
        """Wait for the commit in progress, then commit everything queued so far.

        Raises:
            JournalError: the disk is full or failing.
        """
        async with self._writing:
            await self._commit()

    async def _commit(self) -> None:
        dones, self._dones = self._dones, []
        metrics, self._metrics_done = self._metrics_done, []
        early = [one for one in dones if not self._has_journal(one[1].model)]
        ripe = [one for one in dones if self._has_journal(one[1].model)]
        self._dones += early  # an engine answered before any node reported the weights' digest
        answers: dict[int, list[tuple[bytes, bytes]]] = {}
        for _peer, message in ripe:
            answers.setdefault(message.model, []).extend(
                (one.key, one.body) for one in message.done if not one.error
            )
        await asyncio.to_thread(self._write, answers, metrics)
        for model, records in answers.items():
            for key, _body in records:
                self._samples.answered(model, key)
        waiting = {peer for peer, _ in early}
        for peer, message in ripe:
            if peer not in waiting:  # a number also acknowledges all earlier messages
                peer.send(messages.Acked(number=message.number))
        for sample, _records, measured in metrics:
            self._samples.measured(sample, measured)

    def _has_journal(self, number: int) -> bool:
        model = self._models.get(number)
        return model is None or model.outcome is not None or model.answers is not None

    def _write(
        self, answers: dict[int, list[tuple[bytes, bytes]]], metrics: list[Measured]
    ) -> None:
        for number, records in answers.items():
            model = self._models.get(number)
            if model is not None and model.answers is not None:
                model.answers.commit(records)
        measured: dict[int, list[tuple[bytes, bytes]]] = {}
        for sample, kept, _measured in metrics:
            measured.setdefault(sample.model, []).extend(kept)
        for number, records in measured.items():
            model = self._models.get(number)
            if model is not None and model.metrics is not None:
                model.metrics.commit(records)
