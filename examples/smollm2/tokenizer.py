"""SmolLM2's tokenizer, built from the GGUF's vocabulary and merges by the `tokenizers` library, and its chat format."""

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


def build_tokenizer(reader: GGUFReader) -> Tokenizer:
    def field(name: str):
        return reader.fields[f"tokenizer.ggml.{name}"].contents()

    if (kind := (field("model"), field("pre"))) != ("gpt2", "smollm"):
        raise ValueError(f"the GGUF's tokenizer is {kind}, not the byte-level BPE that SmolLM2 uses")
    tokens = field("tokens")
    merges = [tuple(merge.split(" ")) for merge in field("merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # What the name "smollm" in the file stands for: single digits, then GPT-2's split into words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, field("token_type"), strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return tokenizer


def system_turn(text: str = SYSTEM) -> str:
    """How a chat starts in ChatML, as the GGUF's chat template renders it; it ends where another turn may begin."""
    return f"<|im_start|>system\n{text}<|im_end|>\n"


def user_turn(prompt: str) -> str:
    """What follows: the user's turn, and the opening of the answer."""
    return f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"


def chat(prompt: str) -> str:
    """One user turn, with SmolLM2's default system prompt."""
    return system_turn() + user_turn(prompt)


def stop_ids(tokenizer: Tokenizer) -> frozenset[int]:
    return frozenset(tokenizer.token_to_id(t) for t in STOP_TOKENS)
