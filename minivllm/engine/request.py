# Generated from notebooks/09_engine.ipynb by tools/export.py; edit there.
"""A request inside the engine: its sequences, their texts, and when things happened."""

from dataclasses import dataclass, field

from minivllm.core.sequence import Sequence, SequenceStatus
from minivllm.engine.detokenizer import TextStream
from minivllm.layers.sampler import SamplingRow
from minivllm.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from minivllm.sampling_params import SamplingParams


@dataclass
class Sample:
    """One of the n answers of a request."""

    row: SamplingRow
    stream: TextStream
    num_shown: int = 0  # tokens that `stream` has taken in
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    @property
    def seq(self) -> Sequence:
        """The sequence whose completion this is."""
        return self.row.seq

    @property
    def finished(self) -> bool:
        """Whether no token will follow."""
        return self.seq.status is SequenceStatus.FINISHED

    @property
    def stopped_by_token(self) -> bool:
        """Whether the last token is one that ended the answer."""
        return self.seq.finish_reason == "stop" and self.stream.stopped_by is None

    def update_text(self) -> None:
        """Let the text catch up with the tokens. A token that ended the answer is none of its text."""
        seq = self.seq
        end = seq.num_completion_tokens
        if self.finished and self.stopped_by_token:
            end -= 1
        new = seq.token_ids[seq.num_prompt_tokens + self.num_shown : seq.num_prompt_tokens + end]
        if new or self.finished:
            early = end < self.row.params.min_tokens
            self.stream.add(new, last=self.finished, ignore_stops=early)
            self.num_shown = end

    def output(self, index: int) -> CompletionOutput:
        """What the caller sees of it now."""
        self.update_text()
        token_ids, wants = self.seq.completion_token_ids, self.row.params.logprobs is not None
        # Nobody asked: self.logprobs is empty, and so is this.
        chosen = [found[token].logprob for found, token in zip(self.logprobs, token_ids, strict=wants)]
        stopped_by = self.stream.stopped_by
        if stopped_by is None and self.finished and self.stopped_by_token:
            stopped_by = token_ids[-1] if token_ids[-1] in (self.row.params.stop_token_ids or ()) else None
        return CompletionOutput(
            index,
            self.stream.text,
            token_ids,
            sum(chosen) if wants else None,
            self.logprobs if wants else None,
            self.seq.finish_reason,
            stopped_by,
        )


@dataclass
class Request:
    """A prompt and its n answers."""

    request_id: str
    prompt: str | None
    params: SamplingParams
    samples: list[Sample]
    metrics: RequestMetrics

    @property
    def finished(self) -> bool:
        """Whether all of its answers are."""
        return all(sample.finished for sample in self.samples)

    def output(self) -> RequestOutput:
        """What the caller sees of it now."""
        outputs = [sample.output(index) for index, sample in enumerate(self.samples)]
        prompt_token_ids = self.samples[0].seq.prompt_token_ids
        return RequestOutput(self.request_id, self.prompt, prompt_token_ids, outputs, self.finished, self.metrics)
