"""What a KV format costs SmolLM2 in prediction: paired negative log-likelihood (NLL) on real text.

    python examples/perplexity.py                          # the default formats
    python examples/perplexity.py k4c32,v4t32 k4c64,v2t64  # these, against f32
    python examples/perplexity.py --windows 3 --length 2048 k2c32,v2t32 k2c32,v2t32,sink4,recent128

Windows of text (four of 512 tokens by default) go through the cache, 64 tokens a step, and every prediction is made by
`decode_attention` over what the format has kept: the kernel's own answers, the same as token-by-token decoding gives.
All formats see the same tokens as the float32 control, so their differences are paired; `+-` is the standard error of
the mean difference.
A small model with 4-bit weights is harsher on a cache than a large one: take the ranking, not the figures, elsewhere.
"""

import argparse
import dataclasses
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from smollm2 import explain_missing

try:
    import jax
    import jax.numpy as jnp
    from tokenizers import Tokenizer

    from jax_foscar import KVCache, KVFormat
    from smollm2.arguments import Parser, kv_format, number, positive
    from smollm2.attention import create_cache, decode_hook
    from smollm2.model import Config, Params, forward, logits
    from smollm2.progress import Progress
    from smollm2.weights import model_path, open_model, read_params

    model_path()
except ModuleNotFoundError as missing:
    explain_missing(missing)

TEXT = Path(__file__).resolve().parents[1] / "tests" / "data" / "genesis.txt"
STEP = 64  # tokens a step; see `measure`
DEFAULT = ("bf16", "int4", "k4c32,v4t32", "k4t32,v4t32", "int2", "k2t32,v2t32")


class Result(NamedTuple):
    nll: np.ndarray  # [windows, length] -log p of the token that really follows
    top1: np.ndarray  # [windows, length] the token predicted first
    bits: float  # per cached value, scale and offset included


def read_windows(tokenizer: Tokenizer, count: int, length: int) -> np.ndarray:
    """[count, length + 1] tokens, spread evenly over the text; the last of each is only predicted."""
    ids = np.array(tokenizer.encode(TEXT.read_text(encoding="utf-8")).ids)
    if count * length + 1 > len(ids):
        raise ValueError(f"{count} windows of {length} tokens would overlap: the text has {len(ids)} tokens")
    starts = np.arange(count) * (len(ids) - length - 1) // max(count - 1, 1)
    return ids[starts[:, None] + np.arange(length + 1)]


def measure(fmt: KVFormat | None, params: Params, config: Config, windows: np.ndarray, progress: Progress) -> Result:
    """Feeds the windows, as rows of one batch, through a cache of format `fmt` (None: the float32 control)."""
    name = fmt or "f32"
    if fmt is not None:  # keep enough exact tokens that a whole step sees what single steps would
        fmt = dataclasses.replace(fmt, max_new=max(STEP, fmt.max_new))
    hook = decode_hook(fmt)

    @partial(jax.jit, donate_argnames="cache")
    def step(params, cache, tokens, targets):  # tokens, targets [windows, STEP]
        cache = cache.advance(STEP)
        hidden, cache = forward(params, config, tokens, cache.positions(STEP), hook, cache)
        log_p = jax.nn.log_softmax(logits(params, hidden))  # [windows, STEP, V]
        nll = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
        return cache, nll, log_p.argmax(axis=-1)

    length = windows.shape[1] - 1
    cache = create_cache(fmt, config, batch=len(windows), max_length=length)
    nll, top1 = [], []
    for t in range(0, length, STEP):
        progress.show(f"measuring {name}", f"{t}/{length} tokens")
        cache, n, p = step(params, cache, windows[:, t : t + STEP], windows[:, t + 1 : t + STEP + 1])
        nll.append(np.asarray(n))
        top1.append(np.asarray(p))
    bits = cache.effective_bits if isinstance(cache, KVCache) else 32.0
    return Result(np.concatenate(nll, axis=1), np.concatenate(top1, axis=1), bits)


def row(name: str, result: Result, control: Result) -> str:
    """One line of the table."""
    difference = (result.nll - control.nll).ravel()
    error = difference.std(ddof=1) / np.sqrt(difference.size)
    agreement = np.mean(result.top1 == control.top1)
    return (
        f"{name} {result.bits:5.2f}  {result.nll.mean():.4f}  "
        f"{difference.mean():+.4f} +- {error:.4f}  {100 * agreement:5.1f} %"
    )


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    defaults = [kv_format(text) for text in DEFAULT]
    parser.add_argument(
        "formats",
        type=kv_format,
        nargs="*",
        default=defaults,
        help=f"as --kv of generate.py; default: {' '.join(DEFAULT)}",
    )
    parser.add_argument("--windows", type=positive, default=4, metavar="N", help="default: %(default)s")
    steps = number(int, f"a positive multiple of {STEP}", lambda n: n > 0 and n % STEP == 0)
    parser.add_argument("--length", type=steps, default=512, metavar="N", help="tokens a window; default: %(default)s")
    args = parser.parse_args()

    progress = Progress()
    reader, config, tokenizer = open_model(progress)
    params = read_params(reader, config, progress)
    try:
        windows = read_windows(tokenizer, args.windows, args.length)
    except ValueError as e:
        parser.error(str(e))
    control = measure(None, params, config, windows, progress)
    progress.clear()
    width = max(len(str(fmt)) for fmt in args.formats)
    print(f"{'format':<{width}} {'bits':>5}  {'NLL':<6}  {'NLL - f32':<17}  same top-1", flush=True)
    print(f"{'f32':<{width}} {control.bits:5.2f}  {control.nll.mean():.4f}", flush=True)
    for fmt in args.formats:
        if fmt is not None:
            result = measure(fmt, params, config, windows, progress)
            progress.clear()
            print(row(f"{fmt!s:<{width}}", result, control), flush=True)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
