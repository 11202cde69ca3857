"""Writes tests/data/smollm2_kv.npz: real queries, keys and values of one layer of SmolLM2, for the tests.

Random data hides a wrong scale axis and a lost first token; these do not. The layer is one in the middle, over the
first 256 tokens of tests/data/genesis.txt, everything after RoPE and in float16:

    k, v  [256, 3, 64]  tokens, KV heads, head dim
    q     [8, 9, 64]    the last 8 tokens, query heads, head dim
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from smollm2 import explain_missing

try:
    from smollm2.model import forward
    from smollm2.progress import Progress
    from smollm2.weights import model_path, open_model, read_params

    model_path()
except ModuleNotFoundError as missing:
    explain_missing(missing)

DATA = Path(__file__).resolve().parents[1] / "tests" / "data"
LAYER, TOKENS, QUERIES = 15, 256, 8


def main() -> None:
    progress = Progress()
    reader, config, tokenizer = open_model(progress)
    params = read_params(reader, config, progress)
    ids = tokenizer.encode((DATA / "genesis.txt").read_text(encoding="utf-8")).ids[:TOKENS]

    def capture(q, k, v, kept, layer):
        """An attention hook whose state keeps what it is given in one layer."""
        kept = jax.tree.map(lambda old, new: jnp.where(layer == LAYER, new, old), kept, (q, k, v))
        return jax.nn.dot_product_attention(q, k, v, is_causal=True), kept

    heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    kept = tuple(jnp.zeros((1, TOKENS, n, config.head_dim)) for n in heads)
    positions = jnp.arange(TOKENS)[None]
    _, (q, k, v) = progress.wait(
        "running the model", lambda: forward(params, config, jnp.array([ids]), positions, capture, kept)
    )
    progress.clear()
    path = DATA / "smollm2_kv.npz"
    np.savez_compressed(path, **{n: np.float16(x) for n, x in {"q": q[0, -QUERIES:], "k": k[0], "v": v[0]}.items()})
    print(f"wrote {path}, {path.stat().st_size} bytes")


if __name__ == "__main__":
    main()
