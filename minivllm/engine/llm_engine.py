# Generated from notebooks/09_engine.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""The step loop: requests in, and step by step their tokens out."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minivllm.config import ConfigError, EngineConfig, ModelConfig, SchedulerConfig
from minivllm.core.batch import Batch
from minivllm.core.block_manager import BlockManager
from minivllm.core.kv_cache import PagedKVCache
from minivllm.core.scheduler import Scheduler
from minivllm.core.sequence import Sequence, SequenceStatus
from minivllm.engine.detokenizer import Detokenizer, TextStream
from minivllm.engine.fast_runner import FastRunner
from minivllm.engine.memory import count_blocks
from minivllm.engine.request import Request, Sample
from minivllm.engine.transfer import Launched
from minivllm.kernels.backends import load_backend
from minivllm.layers.sampler import SamplingRow, top_logprobs
from minivllm.model.qwen3 import Qwen3
from minivllm.outputs import Logprob, RequestMetrics
from minivllm.sampling_params import SamplingParams, SamplingParamsError
from minivllm.utils.loader import find_model
from minivllm.utils.prompts import PromptError, check_prompt


@dataclass
class EngineMetrics:
    """What the engine has done so far. Seconds are of the host's clock."""

    num_steps: int = 0
    num_computed_tokens: int = 0  # rows that went through the model
    num_generated_tokens: int = 0
    schedule_seconds: float = 0.0  # choosing rows, taking in results
    model_seconds: float = 0.0  # building the Context, the model
    sample_seconds: float = 0.0  # choosing tokens, stop strings


@contextmanager
def timed(metrics: EngineMetrics, name: str) -> Iterator[None]:
    """Add the seconds that the block takes to one of the metrics."""
    start = time.perf_counter()
    yield
    setattr(metrics, name, getattr(metrics, name) + time.perf_counter() - start)


def pick_device(name: str) -> torch.device:
    """The device of that name; "auto" is the GPU if there is one."""
    return torch.device(("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name)


def pick_dtype(name: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" is the model's own on a GPU, float32 on a CPU (which computes 16 bits slowly)."""
    auto = config.dtype if device.type == "cuda" else "float32"
    return getattr(torch, auto if name == "auto" else name)


def pick_backend(name: str, device: torch.device) -> str:
    """The backend of that name; "auto" is the kernels on a GPU, plain PyTorch on a CPU."""
    auto = "triton" if device.type == "cuda" else "torch"
    return auto if name == "auto" else name


def pick_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """Tokens of one sequence: as asked for, else the model's positions. Raises ConfigError for more than these."""
    limit = model_config.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is beyond the model's {limit} positions")
    return config.max_model_len or limit


def load_tokenizer(folder: Path) -> Any | None:
    """The folder's tokenizer, or None when it has none: prompts must be token ids then, and answers have no text."""
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        return None
    from transformers import AutoTokenizer  # here, as it takes a second that not every import of this module needs

    return AutoTokenizer.from_pretrained(folder)


Prompt = str | list[int] | dict[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}


class LLMEngine:
    """Serves many requests at once: `add_request`, then `step` until they are finished.

    Several engines may share a model: each has its own cache. Without a tokenizer, prompts must be token ids, and
    answers have no text. Raises ConfigError or BackendError for what this model or machine cannot do; `from_config`
    also ModelNotFoundError, FileNotFoundError and WeightsError.
    """

    _under_way: Launched | None = None

    def __init__(self, config: EngineConfig, model: Qwen3, tokenizer: Any | None = None) -> None:
        self.config, self.model, self.tokenizer = config, model, tokenizer
        backend = pick_backend(config.attention_backend, model.lm_head.weight.device)
        limit = pick_max_model_len(config, model.config)
        self._set_up_cache(backend, SchedulerConfig(config.max_num_seqs, config.max_num_batched_tokens, limit))
        self.metrics, self._num_requests, self._num_sequences = EngineMetrics(), 0, 0
        self._requests: dict[str, Request] = {}  # the unfinished ones
        self._owners: dict[int, tuple[Request, Sample]] = {}  # of their sequences, by seq_id

    @classmethod
    def from_config(cls, config: EngineConfig) -> "LLMEngine":
        """Load the model that the config names, and its tokenizer, and make an engine of them. Raises as above."""
        folder, device = find_model(config.model), pick_device(config.device)
        load_backend(pick_backend(config.attention_backend, device))  # refused before the weights are read
        dtype = pick_dtype(config.dtype, ModelConfig.from_folder(folder), device)
        model = Qwen3.from_pretrained(folder, dtype=dtype, device=device)
        return cls(config, model, load_tokenizer(folder))

    def _set_up_cache(self, backend: str, limits: SchedulerConfig) -> None:
        weight = self.model.lm_head.weight
        num_blocks = count_blocks(self.model, self.config, limits.max_model_len, backend)
        block_size, caching = self.config.block_size, self.config.enable_prefix_caching
        self.block_manager = BlockManager(num_blocks, block_size, enable_prefix_caching=caching)
        self.scheduler = Scheduler(limits, self.block_manager)
        cache = PagedKVCache.for_model(
            self.model.config, num_blocks, block_size, device=weight.device, dtype=weight.dtype
        )
        on_gpu = weight.is_cuda and backend == "triton"
        fused, ahead = self.config.fused_kernels, self.config.async_scheduling
        self.runs_ahead = on_gpu if ahead is None else ahead
        self.runner = FastRunner(self.model, cache, limits, backend=backend, fused=on_gpu if fused is None else fused)
        if on_gpu and not self.config.enforce_eager:
            self.runner.record_steps()

    def tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """Text (if there is one) and token ids of a prompt. Raises PromptError for one that cannot be run."""
        if isinstance(prompt, dict):
            prompt = prompt.get("prompt_token_ids", prompt.get("prompt"))
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise PromptError("this model has no tokenizer: pass the prompt as token ids")
            text, token_ids = prompt, self.tokenizer(prompt)["input_ids"]
        elif isinstance(prompt, list | tuple):  # check_prompt looks at each id
            text, token_ids = None, list(prompt)
        else:
            raise PromptError(f"a prompt is a string, a list of token ids or a dict with either, not {prompt!r:.80}")
        check_prompt(token_ids, self.model.config.vocab_size)
        return text, token_ids

    def add_request(self, prompt: Prompt, params: SamplingParams, request_id: str | None = None) -> Request:
        """Queue a request; it is served by the calls of `step` that follow. Without a request_id it gets a free number.

        Raises PromptError, SamplingParamsError or RequestError, and leaves the engine as it was, for a request that
        cannot be served: no tokens, ids outside the vocabulary, no room for an answer, an id that is in use.
        """
        text, token_ids = self.tokenize(prompt)
        if request_id is None:
            request_id = next(name for name in map(str, count(self._num_requests)) if name not in self._requests)
        if request_id in self._requests:
            raise PromptError(f"request_id {request_id!r} is in use by an unfinished request")
        samples = [self._make_sample(token_ids, params, index) for index in range(params.n)]
        self.scheduler.add(*(sample.seq for sample in samples))
        self._num_requests += 1
        request = Request(request_id, text, params, samples, RequestMetrics(time.perf_counter()))
        self._requests[request_id] = request
        self._owners.update((sample.seq.seq_id, (request, sample)) for sample in samples)
        return request

    def _make_sample(self, token_ids: list[int], params: SamplingParams, index: int) -> Sample:
        """Sequence, seed and text stream of one of the n answers."""
        stops = self._stop_token_ids(params)
        max_tokens = params.max_tokens or self.scheduler.max_seq_len
        self._num_sequences += 1
        seq = Sequence(
            self._num_sequences, token_ids, max_tokens=max_tokens, min_tokens=params.min_tokens, stop_token_ids=stops
        )
        own = ("request", params.seed) if params.seed is not None else ("engine", self.config.seed, self._num_requests)
        row = SamplingRow(seq, params, derive_seed(*own, index))
        return Sample(row, TextStream(Detokenizer(self._decoder(params), token_ids), params.stop_strings))

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        vocab_size = self.model.config.vocab_size
        for token_id in params.stop_token_ids or ():
            if not 0 <= token_id < vocab_size:
                raise SamplingParamsError(f"stop_token_ids has {token_id}: ids go from 0 to {vocab_size - 1}")
        own = () if params.ignore_eos else self.model.config.eos_token_ids
        return frozenset(own).union(params.stop_token_ids or ())

    def _decoder(self, params: SamplingParams) -> Callable[[list[int]], str]:
        if self.tokenizer is None:
            return lambda token_ids: ""
        options = {"skip_special_tokens": params.skip_special_tokens, "clean_up_tokenization_spaces": False}
        return lambda token_ids: self.tokenizer.decode(token_ids, **options)

    def has_unfinished_requests(self) -> bool:
        """Whether `step` has anything to do."""
        return bool(self._requests)

    def step(self) -> list[Request]:
        """Launch a step, and take in the tokens of the one before it; returns who finished.

        If a launch raises, the step is undone, and the error raised again: all sequences keep the tokens that they had.
        """
        if not self._requests:
            return []
        with timed(self.metrics, "schedule_seconds"):
            batch = self.scheduler.schedule()
        launched = self._compute(batch) if batch.rows else None
        finished = self._settle()
        self._under_way = launched
        if launched is not None and not (self.runs_ahead and self._can_wait(launched)):
            finished += self._settle()
        return finished

    def _compute(self, batch: Batch) -> Launched:
        self._note_start(batch)
        samples = [self._owners[row.seq.seq_id][1] for row in batch.rows if row.needs_logits]
        try:
            with timed(self.metrics, "model_seconds"):
                tokens = self.runner.launch(batch, [sample.row for sample in samples])
        except BaseException:
            self.scheduler.retreat()
            self._settle()  # the step before this one was fine
            raise
        with timed(self.metrics, "schedule_seconds"):
            self.scheduler.advance(batch)
        return Launched(batch, samples, tokens)

    def _note_logprobs(self, samples: list[Sample], logits: Tensor, tokens: list[int]) -> None:
        widest = max(one.row.params.logprobs for one in samples)
        for one, token, found in zip(samples, tokens, top_logprobs(logits, tokens, widest), strict=True):
            decode, wanted = self._decoder(one.row.params), one.row.params.logprobs
            one.logprobs.append(
                {
                    token_id: Logprob(value, rank, decode([token_id]))
                    for token_id, (value, rank) in found.items()
                    if rank <= wanted or token_id == token
                }
            )

    def _note_start(self, batch: Batch) -> None:
        """Remember when the first step of a request began."""
        now = time.perf_counter()
        for row in batch.rows:
            metrics = self._owners[row.seq.seq_id][0].metrics
            metrics.first_scheduled_time = metrics.first_scheduled_time or now

    def _take_in(self, batch: Batch) -> list[Request]:
        """After a step: first-token times, stop strings, who finished. Who is gone already is skipped."""
        now, ended = time.perf_counter(), {}
        for row in batch.rows:
            owner = self._owners.get(row.seq.seq_id)
            if owner is None or not row.needs_logits:
                continue
            request, sample = owner
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if request.params.stop_strings:
                self._stop_at_string(sample)
            if row.seq.status is SequenceStatus.FINISHED:
                ended[request.request_id] = request
        finished = [request for request in ended.values() if request.finished]
        for request in finished:
            self._close(request)
        return finished

    def _stop_at_string(self, sample: Sample) -> None:
        sample.update_text()
        if sample.stream.stopped_by is not None:
            self.scheduler.finish(sample.seq.seq_id, "stop")
            sample.seq.finish_reason = "stop"  # also when the same token was the last of max_tokens

    def abort(self, request: Request) -> None:
        """End a request now, with what it has; its blocks are free. Nothing happens to one that is finished."""
        if self._requests.get(request.request_id) is request:
            for sample in request.samples:
                self.scheduler.abort(sample.seq.seq_id)
            self._close(request)

    def _close(self, request: Request) -> None:
        """The request is finished: forget it, and fill in its metrics."""
        del self._requests[request.request_id]
        seqs = [sample.seq for sample in request.samples]
        for seq in seqs:
            del self._owners[seq.seq_id]
        metrics = request.metrics
        metrics.finished_time = time.perf_counter()
        metrics.num_generated_tokens = max(seq.num_completion_tokens for seq in seqs)  # the longest sets the end
        metrics.num_cached_tokens = seqs[0].num_cached_tokens
        metrics.num_preemptions = sum(seq.num_preemptions for seq in seqs)

    def _can_wait(self, launched: Launched) -> bool:
        """Whether the next step can be launched without the values of these tokens."""
        return not any(sample.row.needs_values for sample in launched.samples)

    def _settle(self) -> list[Request]:
        """Wait for the tokens of the step under way, if there is one, and take them in; returns who finished."""
        launched, self._under_way = self._under_way, None
        if launched is None:
            return []
        with timed(self.metrics, "sample_seconds"):
            tokens = launched.tokens.wait()
        self._note_tokens(launched, tokens)
        with timed(self.metrics, "schedule_seconds"):
            self.scheduler.settle(launched.batch, tokens)
        return self._take_in(launched.batch)

    def _note_tokens(self, launched: Launched, tokens: list[int]) -> None:
        """Count, and look up the log probabilities that were asked for."""
        self.metrics.num_steps += 1
        self.metrics.num_computed_tokens += launched.batch.num_tokens
        self.metrics.num_generated_tokens += len(tokens)
        if launched.tokens.logits is not None:
            asking = [i for i, one in enumerate(launched.samples) if one.row.params.logprobs is not None]
            samples = [launched.samples[i] for i in asking]
            self._note_logprobs(samples, launched.tokens.logits[asking], [tokens[i] for i in asking])


def derive_seed(*parts: int | str) -> int:
    """A 64-bit seed from several numbers, such that neighbours have nothing in common."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
