#!/usr/bin/env python3
"""Makes a tiny model with random weights, for engines on the CPU. Standard library only; the same on every machine.

    make_model.py dense|deepseek-v4 DIRECTORY [KEY=JSON ...]

dense        a Llama of 2 layers for vLLM and SGLang (1.4 million weights in bf16). Head dimension 64: vLLM's CPU
             attention refuses 16. 4 heads and 2 key heads: tensor parallel 2 works.
deepseek-v4  configuration and tokenizer only, for vLLM's `--load-format dummy`. The dimensions that the indexer's
             kernel fixes are the real ones (index_topk 512, index_head_dim 128, head_dim 512); the rest is small, and
             one layer of two has an indexer: its work grows with the square of the prompt.

KEY=JSON changes config.json, and with it the shapes of the weights: num_key_value_heads=1, tie_word_embeddings=true.

Tokens: 0-255 are the bytes, 256-258 <s> </s> <pad>; dense has 253 two-byte tokens after them.
"""
import json
import math
import random
import struct
import sys
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

BYTES, SPECIALS = 256, ("<s>", "</s>", "<pad>")
DENSE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "vocab_size": 512,
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "hidden_act": "silu", "rms_norm_eps": 1e-6, "initializer_range": 0.02,
    "max_position_embeddings": 32768, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
}
DEEPSEEK_V4 = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "dtype": "bfloat16", "vocab_size": 259,
    "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258,
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 128, "o_groups": 1,
    "index_head_dim": 128, "index_n_heads": 1, "index_topk": 512, "compress_ratios": [0, 4],
    "compress_rope_theta": 160000.0, "rope_theta": 10000.0,
    "rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536,
                     "beta_fast": 32, "beta_slow": 1},
    "max_position_embeddings": 1048576, "sliding_window": 128, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "n_routed_experts": 64, "n_shared_experts": 1, "num_experts_per_tok": 6, "moe_intermediate_size": 128,
    "num_hash_layers": 0, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "norm_topk_prob": True,
    "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "expert_dtype": "fp8", "tie_word_embeddings": False, "num_nextn_predict_layers": 0, "initializer_range": 0.02,
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                            "weight_block_size": [128, 128]},
}
MODELS = {"dense": DENSE, "deepseek-v4": DEEPSEEK_V4}


def byte_characters() -> list[str]:
    """The printable character that byte-level BPE uses for each byte: itself, or one from 256 on."""
    kept = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in kept else next(others)) for byte in range(BYTES)]


def tokenizer(vocabulary_size: int) -> dict[str, object]:
    """A byte-level BPE tokenizer.json: the bytes, the special tokens, and pairs of letters for the rest."""
    characters = byte_characters()
    tokens = [*characters, *SPECIALS]
    pairs = list(islice(product("etaoinshrd", "abcdefghijklmnopqrstuvwxyz"), vocabulary_size - len(tokens)))
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    specials = [{"id": BYTES + i, "content": text, "special": True, "single_word": False, "lstrip": False,
                 "rstrip": False, "normalized": False} for i, text in enumerate(SPECIALS)]
    vocabulary = [*tokens, *("".join(pair) for pair in pairs)]
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": specials, "normalizer": None,
            "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
            "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                      "vocab": {token: i for i, token in enumerate(vocabulary)},
                      "merges": [list(pair) for pair in pairs]}}


TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIALS[0], "eos_token": SPECIALS[1],
    "pad_token": SPECIALS[2], "clean_up_tokenization_spaces": False, "model_max_length": 1048576,
    "chat_template": "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:",
}


def shapes(config: dict[str, object]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a Llama's weights."""
    hidden, inner, vocabulary, head = (int(str(config[key])) for key in (
        "hidden_size", "intermediate_size", "vocab_size", "head_dim"))
    heads, key_heads, layers = (int(str(config[key])) for key in (
        "num_attention_heads", "num_key_value_heads", "num_hidden_layers"))
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", heads * head), ("k", key_heads * head), ("v", key_heads * head)):
            yield f"{prefix}self_attn.{name}_proj.weight", (rows, hidden)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, heads * head)
        yield f"{prefix}mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}mlp.down_proj.weight", (hidden, inner)
        yield f"{prefix}input_layernorm.weight", (hidden,)
        yield f"{prefix}post_attention_layernorm.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def bf16(values: list[float]) -> bytes:
    """The upper two bytes of each float32, little-endian."""
    raw = struct.pack(f"<{len(values)}f", *values)
    halves = bytearray(len(values) * 2)
    halves[0::2], halves[1::2] = raw[2::4], raw[3::4]
    return bytes(halves)


def weights(config: dict[str, object]) -> bytes:
    """A safetensors file: normal weights of variance 1 / inputs, so that the logits spread and the argmax is clear."""
    source, header, data = random.Random(0), {}, bytearray()
    for name, shape in shapes(config):
        count, spread = math.prod(shape), shape[-1] ** -0.5
        values = [1.0] * count if len(shape) == 1 else [source.gauss(0, spread) for _ in range(count)]
        start = len(data)
        data += bf16(values)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (start, len(data))}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    return struct.pack("<Q", len(text)) + text + data


def make(name: str, directory: Path, changes: dict[str, object]) -> None:
    """Writes the files of the model `name`, with `changes` in its config.json, into `directory`."""
    config = {**MODELS[name], **changes}
    directory.mkdir(parents=True, exist_ok=True)
    for file, content in (("config.json", config), ("tokenizer.json", tokenizer(int(str(config["vocab_size"])))),
                          ("tokenizer_config.json", TOKENIZER_CONFIG)):
        (directory / file).write_text(json.dumps(content, indent=1) + "\n")
    if name == "dense":
        (directory / "model.safetensors").write_bytes(weights(config))


if __name__ == "__main__":
    if len(sys.argv) < 3 or sys.argv[1] not in MODELS or not all("=" in word for word in sys.argv[3:]):
        sys.exit(__doc__)
    make(sys.argv[1], Path(sys.argv[2]), {key: json.loads(text) for key, _, text in (
        word.partition("=") for word in sys.argv[3:])})
