# Generated from notebooks/09_engine.ipynb, 10_gpu_performance.ipynb by tools/export.py; edit there.
"""What a user sees: prompts in, text out."""

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from minivllm import STORYTELLER
from minivllm.config import ConfigError, EngineConfig
from minivllm.engine.llm_engine import LLMEngine, Prompt
from minivllm.engine.request import Request
from minivllm.outputs import RequestOutput
from minivllm.sampling_params import SamplingParams, SamplingParamsError

Message = dict[str, str]  # {"role": "user", "content": "…"}


class ChatTemplateError(ValueError):
    """A conversation for a model that has no chat template."""


class LLM:
    """A model, ready to answer. `LLM()` is the storyteller that ships with the course.

    model: a folder, or a name on the Hugging Face hub. options: fields of EngineConfig, such as max_model_len,
    block_size, max_num_seqs, dtype. Raises ConfigError for an unknown option, and what LLMEngine raises.
    """

    def __init__(self, model: str | Path = STORYTELLER, **options: Any) -> None:
        fields = EngineConfig.__dataclass_fields__
        if unknown := [name for name in options if name not in fields]:
            raise ConfigError(f"unknown option {unknown[0]!r}; there are {', '.join(fields)}")
        self.llm_engine = LLMEngine.from_config(EngineConfig(model=str(model), **options))

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it; None when the folder has none."""
        return self.llm_engine.tokenizer

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one prompt or several, all at once; the results are in the order of the prompts.

        prompts: text, token ids, a dict with "prompt" or "prompt_token_ids", or a list of these. sampling_params: one
        for all, or one for each. Raises what `LLMEngine.add_request` raises, before anything is computed; after
        Ctrl-C it raises KeyboardInterrupt, with its requests aborted and their blocks free.
        """
        if is_one_prompt(prompts):
            prompts = [prompts]
        requests = self._add_all(prompts, sampling_params or SamplingParams())
        try:
            self._run(requests, use_tqdm)
        finally:
            for request in requests:
                self.llm_engine.abort(request)
        return [request.output() for request in requests]

    def _add_all(self, prompts: list[Prompt], params: SamplingParams | list[SamplingParams]) -> list[Request]:
        """Queue all prompts, or, if one of them is refused, none."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        if len(each) != len(prompts):
            raise SamplingParamsError(f"{len(prompts)} prompts, but {len(each)} sampling_params: give one, or one each")
        requests: list[Request] = []
        try:
            with collector_paused():
                for prompt, wanted in zip(prompts, each, strict=True):
                    requests.append(self.llm_engine.add_request(prompt, wanted))
        except ValueError:
            for request in requests:
                self.llm_engine.abort(request)
            raise
        return requests

    def _run(self, requests: list[Request], use_tqdm: bool) -> None:
        """Step until these requests are finished; others that the engine has are served along."""
        metrics, waiting = self.llm_engine.metrics, {request.request_id for request in requests}
        before = metrics.num_generated_tokens
        progress = tqdm(total=len(requests), disable=not use_tqdm, unit="req")
        with collector_paused(), interrupts_between_steps() as pressed, progress as bar:
            while waiting:
                done = waiting.intersection(request.request_id for request in self.llm_engine.step())
                waiting -= done
                if pressed.is_set():
                    raise KeyboardInterrupt
                bar.update(len(done))
                seconds = bar.format_dict["elapsed"] or 1e-9
                bar.set_postfix_str(f"{(metrics.num_generated_tokens - before) / seconds:,.0f} tok/s", refresh=False)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[str]:
        """The answer to one prompt, piece by piece as it grows. Pieces are whole characters, and what was given out is
        never taken back. Closing the iterator, or dropping it, aborts the request.

        Raises what `LLMEngine.add_request` raises, at once, and SamplingParamsError for n above 1.
        """
        params = sampling_params or SamplingParams()
        if params.n > 1:
            raise SamplingParamsError(f"a stream is one answer, but n is {params.n}")
        pieces = self._pieces(self.llm_engine.add_request(prompt, params))
        next(pieces)  # starts it: closing a generator that never ran would not reach its `finally`
        return pieces

    def _pieces(self, request: Request) -> Iterator[str]:
        sample, num_shown, finished = request.samples[0], 0, False
        try:
            yield ""  # for `stream`, which takes it
            while not finished:
                finished = request.finished
                sample.update_text()
                if piece := sample.stream.text[num_shown:]:
                    num_shown += len(piece)
                    yield piece
                if not finished:
                    self._one_step()
        finally:
            self.llm_engine.abort(request)

    def _one_step(self) -> None:
        with interrupts_between_steps() as pressed:
            self.llm_engine.step()
        if pressed.is_set():
            raise KeyboardInterrupt

    def chat(
        self,
        messages: list[Message] | list[list[Message]],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": "user", "content": "…"}, …]) or several, by the model's chat template.

        template_options go to the template (Qwen3 knows enable_thinking). Raises ChatTemplateError for a model
        without a template, and what `generate` raises.
        """
        tokenizer = self.get_tokenizer()
        if getattr(tokenizer, "chat_template", None) is None:
            raise ChatTemplateError("this model has no chat template, so it cannot chat: use generate with a prompt")
        conversations = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [
            tokenizer.apply_chat_template(
                one, add_generation_prompt=True, tokenize=True, return_dict=False, **template_options
            )
            for one in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)


@contextmanager
def interrupts_between_steps() -> Iterator[threading.Event]:
    """Inside the block, Ctrl-C (or a notebook's stop button) only sets the event that the block gets.

    An interrupt in the middle of a step would leave the books half written. Only the main thread receives signals;
    elsewhere nothing is changed.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


def is_one_prompt(prompts: Prompt | list[Prompt]) -> bool:
    """A list of integers is one prompt; a list of anything else is several."""
    return not isinstance(prompts, list | tuple) or (bool(prompts) and all(isinstance(p, int) for p in prompts))


@contextmanager
def collector_paused() -> Iterator[None]:
    """No search for reference cycles inside the block: it walks over every cached block, and finds nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
