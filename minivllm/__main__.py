"""`python -m minivllm "Once upon a time"`: a text that grows in the terminal."""

import argparse
import sys
from collections.abc import Sequence

from minivllm import STORYTELLER
from minivllm.llm import LLM
from minivllm.sampling_params import SamplingParams


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line as a namespace; leaves the program on a wrong one."""
    parser = argparse.ArgumentParser("python -m minivllm", description="Continue a text, token by token.")
    parser.add_argument("prompt", help="the beginning of the text")
    parser.add_argument("--model", default=str(STORYTELLER), help="a folder or a name on the Hugging Face hub")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--stop", action="append", help="a string that ends the text; may be given again")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Stream an answer to standard output. Returns 0, or 2 for a request that is refused, or 130 after Ctrl-C."""
    options = parse(arguments)
    try:
        params = SamplingParams(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            top_p=options.top_p,
            seed=options.seed,
            stop=options.stop,
        )
        pieces = LLM(options.model).stream(options.prompt, params)
        print(options.prompt, end="", flush=True)
        for piece in pieces:
            print(piece, end="", flush=True)
    except (ValueError, FileNotFoundError) as error:
        print(f"minivllm: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
