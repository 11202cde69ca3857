"""Generates text with SmolLM2-135M-Instruct through a quantized KV cache.

    python examples/generate.py --kv int2 --prompt "Why is the sky blue?"

The text goes to stdout; progress and the closing figures go to stderr.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from smollm2 import explain_missing

try:
    import jax
    import jax.numpy as jnp
    from tokenizers.decoders import DecodeStream

    from jax_foscar import KVCache, KVFormat
    from smollm2.arguments import Parser, kv_format, number, positive
    from smollm2.attention import FORMATS, Cache, create_cache, decode_hook, parse_kv, prefill_hook
    from smollm2.model import AttentionHook, Config, Params, forward, logits
    from smollm2.progress import CompileLog, Progress
    from smollm2.tokenizer import chat, stop_ids
    from smollm2.weights import model_path, open_model, read_params

    model_path()
except ModuleNotFoundError as missing:
    explain_missing(missing)

Sampler = Callable[[jax.Array, jax.Array], jax.Array]


def make_sampler(temperature: float, top_p: float) -> Sampler:
    """A function of logits [B, V] and a key that picks one token a row."""

    def sample(logits: jax.Array, key: jax.Array) -> jax.Array:
        if temperature == 0:
            return jnp.argmax(logits, axis=-1)
        order = jnp.argsort(logits, axis=-1, descending=True)
        ranked = jnp.take_along_axis(logits, order, axis=-1) / temperature
        probability = jax.nn.softmax(ranked, axis=-1)
        # Keep a token if those before it have not reached top_p; so the first one always stays.
        before = jnp.cumsum(probability, axis=-1) - probability
        choice = jax.random.categorical(key, jnp.where(before < top_p, ranked, -jnp.inf))
        return jnp.take_along_axis(order, choice[:, None], axis=-1)[:, 0]

    return sample


def make_steps(config: Config, hook: AttentionHook, sample: Sampler):
    """The two programs. Both are compiled once: no shape depends on how much text there is."""

    @partial(jax.jit, donate_argnames="cache")
    def prefill(params: Params, cache: Cache, tokens: jax.Array, counts: jax.Array, key: jax.Array):
        """tokens [B, T], of which each row's first `counts` [B] are the prompt and the rest is padding."""
        key, now = jax.random.split(key)
        cache = cache.advance(counts)
        hidden, cache = forward(params, config, tokens, cache.positions(tokens.shape[1]), prefill_hook, cache)
        last = hidden[jnp.arange(tokens.shape[0]), counts - 1]  # [B, E]
        return sample(logits(params, last), now), cache, key

    @partial(jax.jit, donate_argnames="cache")
    def decode(params: Params, cache: Cache, token: jax.Array, key: jax.Array):
        """token [B], the one sampled last."""
        key, now = jax.random.split(key)
        cache = cache.advance(1)
        hidden, cache = forward(params, config, token[:, None], cache.positions(1), hook, cache)
        return sample(logits(params, hidden[:, 0]), now), cache, key

    return prefill, decode


def parse_args() -> tuple[argparse.Namespace, Parser]:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--kv",
        type=kv_format,
        default="int4",
        help="how the cache keeps keys and values: f32 (plain JAX, the control), "
        + ", ".join(f"{name} ({text})" for name, text in FORMATS.items())
        + " or any such format string; default int4",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", default="What is the capital of France?", help="default: %(default)s")
    source.add_argument("--prompt-file", type=Path, metavar="PATH", help="read the prompt from a UTF-8 text file")
    parser.add_argument(
        "--no-chat", action="store_true", help="continue the prompt as it is, without the chat template"
    )
    parser.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="default: %(default)s")
    heat = number(float, "0 or from 0.001 to 1000", lambda x: x == 0 or 1e-3 <= x <= 1e3)
    parser.add_argument("--temperature", type=heat, default=0.0, metavar="X", help="0, the default, is greedy")
    share = number(float, "above 0 and at most 1", lambda x: 0 < x <= 1)
    parser.add_argument("--top-p", type=share, default=1.0, metavar="P", help="sample from this share of probability")
    parser.add_argument("--seed", type=number(int, "in [0, 2**32)", lambda n: 0 <= n < 2**32), default=0, metavar="N")
    return parser.parse_args(), parser


def read_prompt(args: argparse.Namespace, parser: Parser) -> str:
    prompt = args.prompt
    if args.prompt_file is not None:
        try:
            prompt = args.prompt_file.read_text(encoding="utf-8")
        except OSError as e:
            parser.error(f"cannot read --prompt-file {args.prompt_file}: {e.strerror}")
        except UnicodeDecodeError:
            parser.error(f"--prompt-file {args.prompt_file} is not UTF-8 text")
    if not prompt.strip():
        parser.error("the prompt is empty")
    if any("\ud800" <= c <= "\udfff" for c in prompt):  # how Python carries bytes of the command line that are not text
        parser.error("the prompt is not valid UTF-8")
    return prompt


def round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def main() -> None:
    args, parser = parse_args()
    prompt = read_prompt(args, parser)
    progress, compiled = Progress(), CompileLog("prefill", "decode")

    reader, config, tokenizer = open_model(progress)
    ids = tokenizer.encode(prompt if args.no_chat else chat(prompt)).ids
    if (total := len(ids) + args.max_new_tokens) > config.context_length:
        parser.error(
            f"the prompt has {len(ids)} tokens, which with --max-new-tokens {args.max_new_tokens} makes {total}, more "
            f"than the model's context of {config.context_length}"
        )
    params = read_params(reader, config, progress)

    # Room in steps of 1024 tokens and a prompt padded to a power of two: few shapes serve all prompts.
    cache = create_cache(args.kv, config, batch=1, max_length=round_up(total, 1024))
    bucket = max(64, 1 << (len(ids) - 1).bit_length())
    tokens = jnp.array([ids + [0] * (bucket - len(ids))])
    prefill, decode = make_steps(config, decode_hook(args.kv), make_sampler(args.temperature, args.top_p))

    start = time.perf_counter()
    counts, key = jnp.array([len(ids)]), jax.random.key(args.seed)
    token, cache, key = progress.wait(
        f"prefilling {len(ids)} tokens", lambda: prefill(params, cache, tokens, counts, key)
    )
    prefill_seconds = time.perf_counter() - start - compiled.seconds["prefill"]
    progress.clear()

    # A character may need several tokens; the stream holds its bytes back until it is whole.
    stream, stop = DecodeStream(skip_special_tokens=True), stop_ids(tokenizer)
    start, steps = time.perf_counter(), 0
    for _ in range(args.max_new_tokens - 1):
        if (new := int(token[0])) in stop:
            break
        print(stream.step(tokenizer, new) or "", end="", flush=True)
        token, cache, key = decode(params, cache, token, key)
        steps += 1
    if (new := int(token[0])) not in stop:
        print(stream.step(tokenizer, new) or "", end="")
    print(flush=True)
    decode_seconds = time.perf_counter() - start - compiled.seconds["decode"]

    report(args.kv, config, cache, round_up(total, 1024))
    speed = f"; {steps} steps at {steps / decode_seconds:.1f} tokens/s" if steps else ""
    print(f"prefill {len(ids)} tokens in {prefill_seconds:.2f} s{speed}", file=sys.stderr)
    compilations = ", ".join(f"{name} {n}x in {compiled.seconds[name]:.1f} s" for name, n in compiled.count.items())
    print(f"compiled {compilations} (not counted above)", file=sys.stderr)


def report(fmt: KVFormat | None, config: Config, cache: Cache, max_length: int) -> None:
    """The cache's bytes beside those of a bfloat16 cache of the same capacity."""
    bf16 = jax.eval_shape(lambda: create_cache(parse_kv("bf16"), config, batch=1, max_length=max_length)).nbytes
    exact = ""
    if isinstance(cache, KVCache) and cache.exact_key is not None:
        newest = (cache.exact_key.nbytes + cache.exact_value.nbytes) / 1e6
        exact = f", {newest:.1f} MB of it for the {cache.format.ring} newest tokens, which stay exact"
    print(
        f"\ncache {fmt or 'f32'}: {cache.nbytes / 1e6:.1f} MB for {max_length} tokens{exact}; "
        f"bf16 would take {bf16 / 1e6:.1f} MB",
        file=sys.stderr,
    )


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        os._exit(130)  # at once: a normal exit would pull XLA's compiler away from under the thread that compiles
